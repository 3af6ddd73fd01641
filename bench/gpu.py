#!/usr/bin/env python3
"""The CUDA engine beside PyTorch's cuDNN and FlashAttention-2, and beside cuBLAS, in one process.

    python3 bench/gpu.py [--library build/release/libfa3.so] [--results bench/results/NAME.json]

The FlashAttention-3 paper's setting: bfloat16, 16384 tokens in all, hidden size 2048. Outputs are
compared with float64 before anything is timed. Then the kernels take turns, several rounds of as
many calls as fill some milliseconds, timed by events; a figure is the median over the rounds, its
spread half the distance between the quartiles. Calls of a round use the same tensors, so what fits
into the L2 cache may be there, for all of them.

The official FlashAttention-3 is not on every machine: where it is not, it stands in the table as
its ratio to cuDNN in bench/peers.json, cell by cell, times the cuDNN of this run."""

import argparse
import datetime
import json
import math
import pathlib
import statistics
import subprocess

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa3

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS, HIDDEN = 16384, 2048
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
attention = torch.nn.functional.scaled_dot_product_attention


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/libfa3.so")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--milliseconds", type=float, default=10, help="of each kernel in a round")
    parser.add_argument("--results", type=pathlib.Path, help="also write the figures there, as JSON")
    return parser.parse_args()


def random(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(torch.bfloat16)


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
        for name, call in calls.items():
            start, end = queue(call, counts[name])
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / counts[name])
    return samples


def summary(samples, flops):
    low, median, high = statistics.quantiles(samples, n=4)
    spread = (high - low) / 2 / median
    return {"milliseconds": median, "tflops": flops / median * 1e-9, "spread": spread}


def check(query, key, value, output, causal, window=None):
    """Sampled rows of the first and the last head against float64."""
    seqlen, group = query.shape[1], query.shape[2] // key.shape[2]
    rows = torch.cat([torch.arange(16), torch.randint(seqlen, (32,)), torch.arange(seqlen - 16, seqlen)])
    rows = rows.cuda()
    for batch, head in ((0, 0), (query.shape[0] - 1, query.shape[2] - 1)):
        scores = query[batch, rows, head].double() @ key[batch, :, head // group].double().T
        column = torch.arange(seqlen, device="cuda")[None]
        if causal or window:
            scores.masked_fill_(column > rows[:, None], -math.inf)
        if window:
            scores.masked_fill_(column < rows[:, None] - window[0], -math.inf)
        weights = torch.softmax(scores / math.sqrt(query.shape[3]), dim=1)
        expected = weights @ value[batch, :, head // group].double()
        error = (output[batch, rows, head].double() - expected).norm() / expected.norm()
        if not error <= 6e-3:  # bfloat16 rounds by up to 3.9e-3
            raise SystemExit(f"an output is {error:.2g} off: nothing was timed")
    if not torch.isfinite(output).all():
        raise SystemExit("not every element of an output was written: nothing was timed")


def torch_call(kind, query, key, value, causal):
    """Through PyTorch, its own cost on the host included: calls are queued, so it hides."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    grouped = query.shape[2] != key.shape[2]

    def call():
        with sdpa_kernel(kind):
            attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def compare(library, options, batch, seqlen, heads_q, heads_k, head_dim, causal, window=None):
    torch.manual_seed(seqlen + head_dim + causal)
    query = random(batch, seqlen, heads_q, head_dim)
    key, value = (random(batch, seqlen, heads_k, head_dim) for _ in range(2))
    output = torch.full_like(query, math.nan)
    calls = {"fa3": library.forward_gpu(query, key, value, output, causal, window)}
    calls["fa3"]()
    check(query, key, value, output, causal, window)
    if not window:
        for name, kind in BACKENDS.items():
            calls[name] = torch_call(kind, query, key, value, causal)
    pairs = seqlen * seqlen / (2 if causal else 1)
    if window:
        pairs = sum(min(row + 1, window[0] + 1) for row in range(seqlen))
    flops = 4 * pairs * head_dim * heads_q * batch
    samples = take_turns(calls, options.rounds, options.milliseconds)
    return {name: summary(values, flops) for name, values in samples.items()}


def grid(library, options):
    peers = json.loads((ROOT / "bench/peers.json").read_text())
    known = {(c["head_dim"], c["causal"], c["kernel"]): c["tflops"] for c in peers["cells"]}
    cells = []
    print("dim mask   seqlen  libfa3  cuDNN   FA2  FA3*   /cuDNN  /FA3*  /better   (TFLOP/s)")
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for i, seqlen in enumerate(SEQLENS):
                heads = HIDDEN // head_dim
                cell = compare(
                    library, options, TOKENS // seqlen, seqlen, heads, heads, head_dim, causal
                )
                ours, cudnn = cell["fa3"]["tflops"], cell["cudnn"]["tflops"]
                ratio = known[head_dim, causal, "FA3"][i] / known[head_dim, causal, "cuDNN"][i]
                official = ratio * cudnn
                cell.update(head_dim=head_dim, causal=causal, seqlen=seqlen, official=official)
                cells.append(cell)
                print(
                    f"{head_dim:3} {'causal' if causal else 'full':6} {seqlen:6}"
                    f" {ours:7.0f} {cudnn:6.0f} {cell['fa2']['tflops']:5.0f} {official:5.0f}"
                    f" {ours / cudnn:8.3f} {ours / official:6.3f} {ours / max(cudnn, official):8.3f}",
                    flush=True,
                )
    return cells


def mean_ratio(cells, other):
    return statistics.geometric_mean(cell["fa3"]["tflops"] / other(cell) for cell in cells)


def summarise(cells):
    def better(cell):
        return max(cell["official"], cell["cudnn"]["tflops"])

    figures = {
        "over_fa3": mean_ratio(cells, lambda c: c["official"]),
        "worst_over_fa3": min(c["fa3"]["tflops"] / c["official"] for c in cells),
        "over_cudnn": mean_ratio(cells, lambda c: c["cudnn"]["tflops"]),
        "worst_over_cudnn_from_2048": min(
            c["fa3"]["tflops"] / c["cudnn"]["tflops"] for c in cells if c["seqlen"] >= 2048
        ),
    }
    for head_dim in (64, 128, 256):
        part = [cell for cell in cells if cell["head_dim"] == head_dim]
        figures[f"over_better_{head_dim}"] = mean_ratio(part, better)
    return figures


def packed(library, options):
    """Sequences of many lengths, one after the other, against the same work without packing."""
    torch.manual_seed(1)
    lengths = [128, 3000, 512, 1024, 77, 2048, 4096, 1500, 3999]
    starts = torch.tensor([0] + lengths).cumsum(0).to(torch.int32).cuda()
    heads, head_dim = 16, 128
    query, key, value = (random(sum(lengths), heads, head_dim) for _ in range(3))
    output = torch.full_like(query, math.nan)
    call = library.forward_gpu(
        query, key, value, output, causal=True, lengths=(starts, max(lengths))
    )
    call()
    for first, length in zip(starts.tolist(), lengths):
        part = [tensor[None, first : first + length] for tensor in (query, key, value, output)]
        check(*part, causal=True)
    flops = sum(2 * length**2 * head_dim * heads for length in lengths)
    samples = take_turns({"fa3": call}, options.rounds, options.milliseconds)
    return {"lengths": lengths, "fa3": summary(samples["fa3"], flops)}


def million(library):
    """One sequence of a million tokens, and what memory it takes beside its tensors."""
    seqlen, head_dim = 1 << 20, 128
    query, key, value = (random(1, seqlen, 1, head_dim) for _ in range(3))
    output = torch.full_like(query, math.nan)
    free, _ = torch.cuda.mem_get_info()
    held = torch.cuda.memory_allocated()
    call = library.forward_gpu(query, key, value, output, causal=True)
    call()
    torch.cuda.synchronize()
    workspace = torch.cuda.memory_allocated() - held
    after, _ = torch.cuda.mem_get_info()
    samples = take_turns({"fa3": call}, 3, 1)["fa3"]
    rows = torch.tensor([0, 5, seqlen // 2, seqlen - 1]).cuda()
    for row in rows.tolist():
        scores = key[0, : row + 1, 0].double() @ query[0, row, 0].double() / math.sqrt(head_dim)
        expected = torch.softmax(scores, 0) @ value[0, : row + 1, 0].double()
        error = (output[0, row, 0].double() - expected).norm() / expected.norm()
        if not error <= 6e-3:
            raise SystemExit(f"row {row} of a million is {error:.2g} off")
    return {
        "tensor_bytes": 4 * query.numel() * 2,
        "workspace_bytes": workspace,
        "memory_lost_bytes": max(0, free - after),
        "fa3": summary(samples, 2 * seqlen**2 * head_dim),
    }


def gemm(options):
    a, b = random(8192, 8192), random(8192, 8192)
    samples = take_turns({"gemm": lambda: a @ b}, options.rounds, 4 * options.milliseconds)
    return summary(samples["gemm"], 2 * 8192**3)


def save(options, results):
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n")


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
        "fa3": library.version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "gemm": gemm(options),
    }
    print(f"{results['gpu']}, driver {driver}, torch {torch.__version__}; cuBLAS 8192^3", end=" ")
    print(f"{results['gemm']['tflops']:.0f} TFLOP/s")
    results["grid"] = grid(library, options)
    results["summary"] = summarise(results["grid"])
    save(options, results)
    results["grouped_32_8"] = compare(library, options, 4, 4096, 32, 8, 128, True)
    results["window_1024"] = compare(library, options, 1, 16384, 16, 16, 128, True, (1024, 0))
    results["packed"] = packed(library, options)
    results["million"] = million(library)
    results["gemm_after"] = gemm(options)
    for name in ("grouped_32_8", "window_1024", "packed", "million"):
        print(name, {key: round(value["tflops"]) for key, value in results[name].items()
                     if isinstance(value, dict)})
    print(f"cuBLAS after: {results['gemm_after']['tflops']:.0f} TFLOP/s;", end=" ")
    print({key: round(value, 3) for key, value in results["summary"].items()})
    save(options, results)


main()
