"""Draws chart.svg from results.json: TFLOP/s per step beside cuDNN and the GEMM."""

import json
import pathlib
import textwrap

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "ladder"  # the same file from the same figures
from matplotlib import pyplot  # noqa: E402

HERE = pathlib.Path(__file__).parent


def rate(entries, key, name, seqlen, causal):
    for one in entries:
        if (one[key], one["seqlen"], one["causal"]) == (name, seqlen, causal):
            return one["tflops"]
    return None


def main():
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    attention = [one for one in results["yardsticks"] if "seqlen" in one]
    gemm = [one["tflops"] for one in results["yardsticks"] if one["name"] == "gemm"]
    names = [step["name"] for step in results["steps"]]
    labels = [
        step["name"].split("_")[0].upper() + "\n" + textwrap.fill(step["idea"], 16)
        for step in results["steps"]
    ]

    figure, axes = pyplot.subplots(figsize=(10, 5))
    for causal, shift, colour in ((False, -0.2, "#2b6cb0"), (True, 0.2, "#90b4d8")):
        rates = [rate(results["results"], "step", name, 4096, causal) for name in names]
        bars = axes.bar(
            [i + shift for i in range(len(names))],
            rates,
            width=0.38,
            color=colour,
            label="causal" if causal else "full",
        )
        axes.bar_label(bars, fmt="%.3g", fontsize=8, padding=1,
                       bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
        cudnn = rate(attention, "name", "cudnn", 4096, causal)
        if cudnn:
            axes.axhline(cudnn, color=colour, linestyle="--", linewidth=1)
            axes.text(-0.45, cudnn + 6, f"cuDNN, {'causal' if causal else 'full'}: {cudnn:.0f}",
                      fontsize=8, color=colour)
    if gemm:
        axes.axhline(gemm[0], color="#444444", linewidth=1)
        axes.text(-0.45, gemm[0] + 6, f"cuBLAS, 8192 x 8192 x 8192: {gemm[0]:.0f}", fontsize=8,
                  color="#444444")
    axes.set_xticks(range(len(names)), labels, fontsize=8)
    axes.set_ylabel("TFLOP/s")
    axes.set_title(
        f"{results['gpu']}: forward, bf16, head dim 128, batch 4, 16 heads, seqlen 4096",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(HERE / "chart.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
