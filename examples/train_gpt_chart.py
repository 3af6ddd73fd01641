#!/usr/bin/env python3
"""Draws NAME.svg from NAME.json of train_gpt.py: loss over time, a line for each kind of attention.

    python3 examples/train_gpt_chart.py bench/results/NAME.json      (needs matplotlib)"""

import itertools
import json
import pathlib
import sys

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
matplotlib.rcParams["svg.hashsalt"] = "train_gpt"  # the same file from the same figures
from matplotlib import pyplot  # noqa: E402

COLOURS = {"libfa3": "#c53030", "cuDNN": "#2f855a", "PyTorch's math": "#718096"}


def main(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    figure, (by_step, by_time) = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for run in result["runs"]:
        name, losses = run["attention"], run["losses"]
        label = f"{name}: {run['tokens per second']:,} tokens/s"
        seconds = run["milliseconds per step"] / 1e3
        times = list(itertools.accumulate([seconds] * len(losses)))
        style = {"color": COLOURS[name], "linewidth": 1.3}
        by_step.plot(range(1, len(losses) + 1), losses, **style)
        by_time.plot(times, losses, label=label, **style)
    by_step.set_xlabel("step")
    by_step.set_ylabel("loss")
    by_time.set_xlabel("seconds")
    by_time.set_xscale("log")
    by_time.legend(fontsize=8)
    parameters = result["runs"][0]["parameters"] / 1e6
    figure.suptitle(
        f"GPT of {parameters:.0f}M parameters, sequences of {result['seqlen']}, "
        f"{result['device']}, PyTorch {result['torch']}",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


main(pathlib.Path(sys.argv[1]))
