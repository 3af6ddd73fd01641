#!/usr/bin/env python3
"""Draws NAME.svg from NAME.json of bench/gpu.py: TFLOP/s over the sequence length, a panel for each
head dim and mask.

    python3 bench/gpu_chart.py bench/results/NAME.json"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "gpu"  # the same file from the same figures
from matplotlib import pyplot  # noqa: E402

LINES = {  # name: label, colour, line
    "libfa3": ("libfa3", "#c53030", "-"),
    "fa3": ("FlashAttention-3", "#2b6cb0", "-"),
    "fa3_deterministic": ("FlashAttention-3, deterministic", "#2b6cb0", ":"),
    "cudnn": ("cuDNN", "#2f855a", "--"),
    "fa2": ("FlashAttention-2", "#718096", "--"),
    "triton": ("Triton (FlexAttention)", "#975a16", "--"),
}


def panel(axes, cells, gemm):
    for name, (label, colour, line) in LINES.items():
        points = [(c["seqlen"], c[name]["tflops"]) for c in cells if name in c]
        if points:
            axes.plot(*zip(*points), line, color=colour, label=label, marker=".", linewidth=1.5)
    axes.axhline(gemm, color="#444444", linewidth=0.8)
    axes.text(512, gemm, " cuBLAS, 8192 x 8192 x 8192", fontsize=7, va="bottom")
    axes.set_xscale("log", base=2)
    seqlens = [c["seqlen"] for c in cells]
    axes.set_xticks(seqlens, [str(s) if s < 1024 else f"{s // 1024}k" for s in seqlens], fontsize=8)
    axes.set_ylim(0, 1.12 * gemm)
    axes.grid(axis="y", linewidth=0.3)


def main(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    kinds = [
        (phase, causal)
        for phase in ("forward", "backward")
        if phase in results
        for causal in (False, True)
    ]
    head_dims = sorted({cell["head_dim"] for cell in results[kinds[0][0]]})
    figure, grid = pyplot.subplots(
        len(kinds), len(head_dims), figsize=(11, 3.1 * len(kinds)), sharey=True, squeeze=False
    )
    for (phase, causal), line in zip(kinds, grid):
        for head_dim, axes in zip(head_dims, line):
            cells = [
                c for c in results[phase] if (c["head_dim"], c["causal"]) == (head_dim, causal)
            ]
            if cells:
                panel(axes, cells, results["gemm"]["tflops"])
            axes.set_title(
                f"{phase}, {'causal' if causal else 'full'}, head dim {head_dim}", fontsize=9
            )
        line[0].set_ylabel("TFLOP/s")
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    handles, labels = grid[-1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.suptitle(f"{results['gpu']}: bf16, 16384 tokens, hidden size 2048", fontsize=10)
    figure.tight_layout(rect=(0, 0.08 / len(kinds), 1, 1))
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


main(pathlib.Path(sys.argv[1]))
