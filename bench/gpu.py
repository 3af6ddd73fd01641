#!/usr/bin/env python3
"""The CUDA engine beside PyTorch's cuDNN and FlashAttention-2, the official FlashAttention-3, and
cuBLAS, in one process.

    python3 bench/gpu.py [--library build/release/libfa3.so] [--parts forward,backward,cases]
                         [--results bench/results/NAME.json]

The FlashAttention-3 paper's setting: bfloat16, 16384 tokens in all, hidden size 2048. Results are
compared with float64 before anything is timed. Then the kernels take turns, in random order each
round, as many calls as fill some milliseconds, timed by events; a figure is the median over the
rounds, its spread half the distance between the quartiles. Calls of a round use the same tensors,
so what fits into the L2 cache may be there, for all of them.

The official FlashAttention-3 is measured where its module flash_attn_interface can be imported.
Where not, it stands in the table as its ratio to cuDNN in bench/peers.json, cell by cell, times the
cuDNN of this run. bench/gpu_chart.py draws the figures."""

import argparse
import datetime
import json
import math
import pathlib
import random
import statistics
import subprocess

import torch

import fa3
import gpu_problem

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS, HIDDEN = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
PARTS = ("forward", "backward", "cases")
KERNELS = ("libfa3", "fa3", "cudnn", "fa2", "libfa3_deterministic", "fa3_deterministic")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/libfa3.so")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--milliseconds", type=float, default=5, help="of each kernel in a round")
    parser.add_argument("--results", type=pathlib.Path, help="also write the figures there, as JSON")
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if not set(options.parts) <= set(PARTS):
        parser.error(f"--parts takes {', '.join(PARTS)}")
    return options


def queue(call, count):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    return start, end


def take_turns(calls, rounds, milliseconds):
    """{name: milliseconds of a call, one for each round}."""
    counts = {}
    for name, call in calls.items():
        call()
        start, end = queue(call, 2)
        end.synchronize()
        counts[name] = max(2, min(500, round(milliseconds / (start.elapsed_time(end) / 2))))
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            start, end = queue(calls[name], counts[name])
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / counts[name])
    return samples


def summary(samples, flops):
    low, median, high = statistics.quantiles(samples, n=4)
    spread = (high - low) / 2 / median
    return {"milliseconds": median, "tflops": flops / median * 1e-9, "spread": spread}


def time_calls(options, calls, flops):
    samples = take_turns(calls, options.rounds, options.milliseconds)
    return {name: summary(values, flops) for name, values in samples.items()}


def measure(library, options, phase, batch, seqlen, heads, head_dim, causal, window=None):
    """Of both phases: `heads` are those of queries and of keys."""
    torch.manual_seed(seqlen + head_dim + causal)
    query = gpu_problem.random(batch, seqlen, heads[0], head_dim)
    key, value = (gpu_problem.random(batch, seqlen, heads[1], head_dim) for _ in range(2))
    pairs = seqlen * seqlen / (2 if causal else 1)
    if window:
        pairs = sum(min(row + 1, window[0] + 1) for row in range(seqlen))
    flops = 4 * pairs * head_dim * heads[0] * batch
    if phase == "backward":
        calls = gpu_problem.backward_calls(library, query, key, value, causal)
        return time_calls(options, calls, 2.5 * flops)
    calls = gpu_problem.forward_calls(library, query, key, value, causal, window)
    return time_calls(options, calls, flops)


def fill_in(cell, known, index):
    """FlashAttention-3's speed, measured or by its ratio to cuDNN elsewhere."""
    cell["fa3_is"] = "measured" if "fa3" in cell else "by its ratio to cuDNN"
    for name, peer in (("fa3", "FA3"), ("fa3_deterministic", "FA3 deterministic")):
        ratio = known.get((cell["head_dim"], cell["causal"], peer))
        if cell["fa3_is"] != "measured" and ratio:
            cudnn = known[cell["head_dim"], cell["causal"], "cuDNN"][index]
            cell[name] = {"tflops": ratio[index] / cudnn * cell["cudnn"]["tflops"]}


def grid(library, options, phase, save):
    peers = json.loads((ROOT / "bench/peers.json").read_text())
    known = {(c["head_dim"], c["causal"], c["kernel"]): c["tflops"] for c in peers[phase]}
    cells = []
    kernels = KERNELS if phase == "backward" else KERNELS[:4]
    print(f"{phase}, TFLOP/s", *kernels, "and libfa3 over fa3, cudnn, the better")
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for i, seqlen in enumerate(SEQLENS):
                heads = 2 * [HIDDEN // head_dim]
                shape = (TOKENS // seqlen, seqlen, heads, head_dim, causal)
                cell = {"head_dim": head_dim, "causal": causal, "seqlen": seqlen}
                cell.update(measure(library, options, phase, *shape))
                fill_in(cell, known, i)
                cells.append(cell)
                save(cells)
                print(row(cell, kernels), flush=True)
    return cells


def rate(cell, name):
    return cell[name]["tflops"]


def row(cell, kernels):
    figures = "".join(f"{rate(cell, k):6.0f}" if k in cell else "     -" for k in kernels)
    ours, official, cudnn = (rate(cell, name) for name in KERNELS[:3])
    return (
        f"{cell['head_dim']:3} {'causal' if cell['causal'] else 'full':6} {cell['seqlen']:6}{figures}"
        f"  {ours / official:6.3f}{ours / cudnn:6.3f}{ours / max(official, cudnn):6.3f}"
    )


def summarise(cells):
    def mean(part, ours, other):
        return statistics.geometric_mean(rate(c, ours) / other(c) for c in part)

    def better(cell):
        return max(rate(cell, "fa3"), rate(cell, "cudnn"))

    over_fa3 = [rate(c, "libfa3") / rate(c, "fa3") for c in cells]
    over_cudnn = [rate(c, "libfa3") / rate(c, "cudnn") for c in cells if c["seqlen"] >= 2048]
    figures = {
        "fa3_is": cells[0]["fa3_is"],
        "over_fa3": statistics.geometric_mean(over_fa3),
        "worst_over_fa3": min(over_fa3),
        "over_cudnn": mean(cells, "libfa3", lambda c: rate(c, "cudnn")),
        "worst_over_cudnn_from_2048": min(over_cudnn),
    }
    for head_dim in HEAD_DIMS:
        part = [cell for cell in cells if cell["head_dim"] == head_dim]
        figures[f"over_fa3_{head_dim}"] = mean(part, "libfa3", lambda c: rate(c, "fa3"))
        figures[f"over_better_{head_dim}"] = mean(part, "libfa3", better)
    if "libfa3_deterministic" in cells[0]:
        figures["deterministic_over_libfa3"] = mean(
            cells, "libfa3_deterministic", lambda c: rate(c, "libfa3")
        )
    return figures


def packed(library, options):
    """Sequences of many lengths, one after the other: both phases."""
    torch.manual_seed(1)
    lengths = [128, 3000, 512, 1024, 77, 2048, 4096, 1500, 3999]
    starts = torch.tensor([0] + lengths).cumsum(0).to(torch.int32).cuda()
    heads, head_dim = 16, 128
    query, key, value = (gpu_problem.random(sum(lengths), heads, head_dim) for _ in range(3))
    output = gpu_problem.unwritten(query)
    bounds = (starts, max(lengths))
    call = library.forward_gpu(query, key, value, output, causal=True, lengths=bounds)
    call()
    for first, length in zip(starts.tolist(), lengths):
        part = [tensor[None, first : first + length] for tensor in (query, key, value, output)]
        gpu_problem.check_output("libfa3", *part, causal=True)
    flops = sum(2 * length**2 * head_dim * heads for length in lengths)
    forward = time_calls(options, {"libfa3": call}, flops)
    call = gpu_problem.backward_alone(library, query, key, value, True, bounds)
    backward = time_calls(options, {"libfa3": call}, 2.5 * flops)
    return {"lengths": lengths, **forward}, {"lengths": lengths, **backward}


def two_head_dims(library, options):
    """Gradients where value's head dim is smaller than query's and key's."""
    batch, seqlen, heads, head_dim, value_head_dim = 4, 4096, 16, 192, 128
    query, key = (gpu_problem.random(batch, seqlen, heads, head_dim) for _ in range(2))
    value = gpu_problem.random(batch, seqlen, heads, value_head_dim)
    call = gpu_problem.backward_alone(library, query, key, value, True)
    flops = batch * heads * seqlen**2 * (3 * head_dim + 2 * value_head_dim)
    return time_calls(options, {"libfa3": call}, flops)


def million(library):
    """One sequence of a million tokens, and what memory it takes beside its tensors."""
    seqlen, head_dim = 1 << 20, 128
    query, key, value = (gpu_problem.random(1, seqlen, 1, head_dim) for _ in range(3))
    output = gpu_problem.unwritten(query)
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_allocated()
    call = library.forward_gpu(query, key, value, output, causal=True)
    call()
    torch.cuda.synchronize()
    workspace = torch.cuda.memory_allocated() - held
    after, _ = torch.cuda.mem_get_info()
    samples = take_turns({"libfa3": call}, 3, 1)["libfa3"]
    for row_index in (0, 5, seqlen // 2, seqlen - 1):
        rows = torch.tensor([row_index]).cuda()
        scores = gpu_problem.scores_of(query[0, :, 0], key[0, :, 0], rows, causal=True)
        expected = torch.softmax(scores, 1) @ value[0, :, 0].double()
        gpu_problem.compare(f"row {row_index} of a million", output[0, rows, 0], expected)
    return {
        "tensor_bytes": 4 * query.numel() * 2,
        "workspace_bytes": workspace,
        "memory_lost_bytes": max(0, free - after),
        "libfa3": summary(samples, 2 * seqlen**2 * head_dim),
    }


def gemm(options):
    a, b = gpu_problem.random(8192, 8192), gpu_problem.random(8192, 8192)
    samples = take_turns({"gemm": lambda: a @ b}, options.rounds, 4 * options.milliseconds)
    return summary(samples["gemm"], 2 * 8192**3)


def cases(library, options, keep):
    """What the grid leaves out; `keep` takes the figures of each."""
    grouped = (4, 4096, (32, 8), 128, True)
    keep("grouped_32_8", measure(library, options, "forward", *grouped))
    keep("grouped_32_8_backward", measure(library, options, "backward", *grouped))
    window = (1, 16384, (16, 16), 128, True, (1024, 0))
    keep("window_1024", measure(library, options, "forward", *window))
    for name, figures in zip(("packed", "packed_backward"), packed(library, options)):
        keep(name, figures)
    keep("192_128_backward", two_head_dims(library, options))
    keep("million", million(library))


def main():
    options = arguments()
    library = fa3.Library(options.library)
    library.prepare_gpu()
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    driver, *clocks = subprocess.run(query, capture_output=True, text=True).stdout.strip().split(", ")
    results = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "clocks_before": clocks,
        "libfa3": library.version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "gemm": gemm(options),
    }
    print(f"{results['gpu']}, driver {driver}, torch {torch.__version__}; cuBLAS 8192^3", end=" ")
    print(f"{results['gemm']['tflops']:.0f} TFLOP/s")

    def save():
        if options.results:
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(results, indent=1) + "\n")

    def save_cells(phase, cells):
        results[phase] = cells
        save()

    summaries = results["summary"] = {}
    for phase in ("forward", "backward"):
        if phase in options.parts:
            cells = grid(library, options, phase, lambda cells: save_cells(phase, cells))
            summaries[phase] = summarise(cells)
            rounded = {k: v if isinstance(v, str) else round(v, 3) for k, v in summaries[phase].items()}
            print(phase, rounded, flush=True)
            save()
    if "cases" in options.parts:

        def keep(name, figures):
            results[name] = figures
            save()
            rates = {k: round(v["tflops"]) for k, v in figures.items() if isinstance(v, dict)}
            print(name, rates, flush=True)

        cases(library, options, keep)
    results["gemm_after"] = gemm(options)
    print(f"cuBLAS after: {results['gemm_after']['tflops']:.0f} TFLOP/s")
    save()


main()
