#!/usr/bin/env python3
"""Prints the tables of README.md, from what bench/gpu.py measured on each card.

    python3 bench/gpu_tables.py [bench/results/nvidia-h100-graphs.json ...]"""

import argparse
import json
import math
import pathlib
import statistics

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
CARDS = [RESULTS / f"nvidia-{card}-graphs.json" for card in ("h100", "h200")]
CHUNKS = (" x512", " x2048")  # parts of prompts, which the table leaves out
MASKS = {False: "full", True: "causal"}
SHAPE_COLUMNS = "batch, queries x keys, heads of queries/of keys, head dim, mask"


def print_row(*cells):
    print("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")


def speed_over(peer, cell):
    return cell["libfa3"]["tflops"] / cell[peer]["tflops"]


def rate(cell):
    """TFLOP/s, and in brackets the speed over FlashAttention-3."""
    return f"{cell['libfa3']['tflops']:.0f} ({speed_over('fa3', cell):.2f})"


def print_grid(phase, cells):
    seqlens = sorted({cell["seqlen"] for cell in cells})
    print_row(f"{phase}: head dim", "mask", *map(str, seqlens))
    print("|---" * (2 + len(seqlens)) + "|")
    for head_dim in sorted({cell["head_dim"] for cell in cells}):
        for causal, mask in MASKS.items():
            line = [c for c in cells if (c["head_dim"], c["causal"]) == (head_dim, causal)]
            print_row(str(head_dim), mask, *map(rate, sorted(line, key=lambda c: c["seqlen"])))
    print()


def rounded_down(ratio):
    return math.floor(100 * ratio) / 100


def mean_and_worst(ratios):
    """Rounded to the nearest, but the worst never upwards."""
    if not ratios:
        return "", ""
    return f"{statistics.geometric_mean(ratios):.2f}", f"{rounded_down(min(ratios)):.2f}"


def over(cells, peer):
    return [speed_over(peer, cell) for cell in cells if peer in cell]


def print_means(results):
    card = results["gpu"].split()[1]
    parts = {
        "forward": "forward, these {}",
        "backward": "backward, these {}",
        "shapes_forward": "forward, {} smaller or thinner problems",
        "shapes_backward": "backward, the same {}",
    }
    for part, label in parts.items():
        cells = results[part]
        figures = [*mean_and_worst(over(cells, "fa3")), *mean_and_worst(over(cells, "cudnn"))]
        print_row(f"{card}: {label.format(len(cells))}", *figures)
    caches = [c["hot"] for c in results["decode"] if not c["shape"].endswith(CHUNKS)]
    hot = [times["fa3"] / times["libfa3"] for times in caches if "fa3" in times]
    print_row(f"{card}: decode, {len(hot)} caches, read again and again", *mean_and_worst(hot), "", "")
    float8 = {"attention": "{} of these sizes", "thin": "{} smaller or thinner problems"}
    for part, label in float8.items():
        ratios = [c["over_fa3"] for c in results["float8"].get(part, []) if "over_fa3" in c]
        if ratios:
            name = f"{card}: FP8 forward, a scale for each head, {label.format(len(ratios))}"
            print_row(name, *mean_and_worst(ratios), "", "")


def ratios_by_shape(results):
    """{(pass, problem): speed over FlashAttention-3}, of both passes and both lists of problems."""
    found = {}
    for part in ("forward", "shapes_forward", "backward", "shapes_backward"):
        for cell in results[part]:
            if "fa3" in cell:
                found[part.removeprefix("shapes_"), cell["shape"]] = speed_over("fa3", cell)
    return found


def print_slowest(every, below=0.97):
    """Every problem that is slower than `below` of FlashAttention-3 on one of the cards."""
    cards = [ratios_by_shape(results) for results in every]
    print_row("pass", SHAPE_COLUMNS, *(results["gpu"].split()[1] for results in every))
    print("|---" * (2 + len(every)) + "|")
    for phase, shape in cards[0]:
        ratios = [card.get((phase, shape)) for card in cards]
        if min(ratio for ratio in ratios if ratio) < below:
            print_row(phase, shape, *(f"{rounded_down(r):.2f}" if r else "-" for r in ratios))


def slowest(cells, which):
    """Rounded down: the least of FlashAttention-3's time over ours."""
    return f"{rounded_down(min(cell[which]['fa3'] / cell[which]['libfa3'] for cell in cells)):.2f}"


def print_further(every):
    """FP8 by head dim, and parts of prompts on a cache."""
    print_row("", *(results["gpu"].split()[1] for results in every))
    print("|---" * (1 + len(every)) + "|")
    for head_dim in (64, 128, 256):
        figures = []
        for results in every:
            cells = [c for c in results["float8"]["attention"] if c["head_dim"] == head_dim]
            ratios = [c["over_fa3"] for c in cells if "over_fa3" in c]
            figures.append(", ".join(mean_and_worst(ratios)))
        print_row(f"FP8, sizes of head dim {head_dim}", *figures)
    for in_pages, label in ((False, "without pages"), (True, "in pages")):
        figures = []
        for results in every:
            cells = [c for c in results["decode"] if c["shape"].endswith(CHUNKS) and "fa3" in c["hot"]]
            cells = [c for c in cells if (c["shape"].count(", ") > 2) == in_pages]
            figures.append(f"{slowest(cells, 'hot')}, {slowest(cells, 'cold')}")
        print_row(f"a part of a prompt, 512 or 2048 queries, on a cache {label}", *figures)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="*", type=pathlib.Path, default=CARDS)
    every = [json.loads(path.read_text()) for path in parser.parse_args().results]
    for phase in ("forward", "backward"):
        print_grid(phase, every[0][phase])
    print_row("speed, geometric mean", "over FlashAttention-3", "its worst cell", "over cuDNN", "its worst cell")
    print("|---" * 5 + "|")
    for results in every:
        print_means(results)
    print()
    print_slowest(every)
    print()
    print_further(every)


if __name__ == "__main__":
    main()
