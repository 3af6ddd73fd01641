"""Draws chart.svg from results.json: TFLOP/s of each step beside cuDNN and the matrix products, and
its error."""

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


def labels(results):
    return [
        step["name"].split("_")[0].upper() + "\n" + textwrap.fill(step["idea"], 14)
        for step in results["steps"]
    ]


def draw_speeds(axes, results):
    attention = [one for one in results["yardsticks"] if "seqlen" in one]
    names = [step["name"] for step in results["steps"]]
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
    for name, kind in (("gemm", "bf16"), ("gemm_fp8", "E4M3")):
        for one in results["yardsticks"]:
            if one["name"] == name:
                axes.axhline(one["tflops"], color="#444444", linewidth=1)
                axes.text(-0.45, one["tflops"] + 6,
                          f"cuBLAS, {kind}, 8192 x 8192 x 8192: {one['tflops']:.0f}",
                          fontsize=8, color="#444444")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(
        f"{results['gpu']}: forward, head dim 128, batch 4, 16 heads, seqlen 4096; "
        "bf16, K7 and K8 E4M3",
        fontsize=10,
    )
    axes.legend(loc=(0.02, 0.72), frameon=False, fontsize=8)


def draw_errors(axes, results):
    outliers = results["outliers"]
    errors = [one["rms_error"] for one in outliers["results"]]
    bars = axes.bar(range(len(errors)), errors, width=0.6, color="#b7791f")
    axes.bar_label(bars, fmt="%.1e", fontsize=8, padding=1)
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 1e-1)
    axes.set_ylabel("rms error")
    axes.set_title(
        f"against float64, inputs with outliers, {outliers['heads']} heads, "
        f"seqlen {outliers['seqlen']}, full",
        fontsize=10,
    )


def main():
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    figure, (speeds, errors) = pyplot.subplots(
        2, figsize=(11, 8), height_ratios=(2.2, 1), sharex=True
    )
    draw_speeds(speeds, results)
    draw_errors(errors, results)
    errors.set_xticks(range(len(results["steps"])), labels(results), fontsize=8)
    for axes in (speeds, errors):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "chart.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
