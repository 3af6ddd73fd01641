#!/usr/bin/env python3
"""How long small calls of the CPU engine take beside PyTorch's own threads, in one process.

    OMP_WAIT_POLICY=active build/bench-venv/bin/python bench/beside_torch.py [--results FILE.json]

A layer of a model: some of PyTorch's work on all its threads (a matrix product), then attention. By
default PyTorch's OpenMP threads spin for some milliseconds after their work and have the processors
then, which OMP_WAIT_POLICY decides; the environment is taken as it is found. Timed is the attention
alone, ours and PyTorch's own by turns, and in each round ours with nothing of PyTorch's before it as
well, after a pause in which its threads have gone to sleep. What the slowest calls take says more
than the median: a thread that has to wait for a processor waits for milliseconds.

The check: a thread that has lost its processor gets it back after 3 ms or more, and a call with several
threads must not wait for one. So 99 of 100 calls are to be within 2 ms, or twice the median of calls on
one thread where that is more; or as many as of the calls on one thread, which lose theirs too.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import time

import torch

from c_abi import Library

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHAPES = ((1, 8, 64, 64), (1, 8, 128, 64), (1, 8, 256, 64), (1, 8, 512, 64))
attention = torch.nn.functional.scaled_dot_product_attention


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/libfa3.so")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--calls", type=int, default=2000, help="of each kind, for each shape")
    parser.add_argument("--alone", type=int, default=100, help="calls without PyTorch's work")
    parser.add_argument("--results", type=pathlib.Path, help="also write the figures there, as JSON")
    return parser.parse_args()


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def summary(samples):
    cuts = statistics.quantiles(samples, n=100)
    return {
        "median_ms": 1e3 * cuts[49],
        "p90_ms": 1e3 * cuts[89],
        "p99_ms": 1e3 * cuts[98],
        "longest_ms": 1e3 * max(samples),
        "calls": len(samples),
    }


def times(library, options, shape):
    inputs = [torch.randn(shape) for _ in range(3)]
    output = torch.full(shape, math.nan)
    weight = torch.randn(512, 512)
    one = library.forward(*inputs, output, False, 1)
    ours = library.forward(*inputs, output, False, options.threads)
    theirs = lambda: attention(*inputs)  # noqa: E731
    ours()
    assert (output - theirs()).abs().max().item() < 1e-4, "the outputs differ"
    samples = {"alone": [], "one thread": [], "beside": [], "torch": []}
    for _ in range(options.alone):
        time.sleep(0.02)
        ours()  # its own threads are awake, as in the other kinds
        samples["alone"].append(seconds_of(ours))
    kinds = (("one thread", one), ("beside", ours), ("torch", theirs))
    for i in range(options.calls):
        for name, call in kinds[i % 3 :] + kinds[: i % 3]:
            torch.mm(weight, weight)
            samples[name].append(seconds_of(call))
    row = {name: summary(values) for name, values in samples.items()}
    bound = max(2, 2 * row["one thread"]["median_ms"])
    for name, values in samples.items():
        row[name]["within_bound"] = sum(1e3 * value <= bound for value in values) / len(values)
    return row | {"bound_ms": bound}


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    library = Library(options.library)
    name, level = library.cpu()
    results = {
        "processor": name,
        "level": level,
        "threads": options.threads,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "fa3": library.version(),
        "torch": torch.__version__,
        "shapes": [],
    }
    print(f"{name}, {level}, {options.threads} threads of each; torch {torch.__version__}", end=", ")
    print(f"OMP_WAIT_POLICY {results['wait_policy']}; ms")
    print("shape              attention     median     90%      99%  longest   within")
    for shape in SHAPES:
        row = times(library, options, shape)
        results["shapes"].append({"shape": shape, **row})
        for kind in ("alone", "one thread", "beside", "torch"):
            values = row[kind]
            print(
                f"{str(shape):18} {kind:11} {values['median_ms']:8.3f} {values['p90_ms']:8.3f}"
                f" {values['p99_ms']:8.3f} {values['longest_ms']:8.2f} {values['within_bound']:8.2%}",
                flush=True,
            )
        share = row["beside"]["within_bound"]
        good = share >= min(0.99, row["one thread"]["within_bound"])
        print(f"{str(shape):18} {'good' if good else 'SLOW'}: the bound is {row['bound_ms']:.2f} ms")
    if options.results:
        options.results.write_text(json.dumps(results, indent=1) + "\n")


main()
