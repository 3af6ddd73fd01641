#!/usr/bin/env python3
"""The CUDA engine beside the official FlashAttention-3, PyTorch's cuDNN and FlashAttention-2, Triton
(FlexAttention) and cuBLAS, in one process.

    python3 bench/gpu.py [--library build/release/libfa3.so] [--results bench/results/NAME.json]
                         [--parts forward,backward,shapes,decode,float8,cases] [--peers fa3,cudnn,...]
                         [--head-dims 64,...] [--seqlens 512,...] [--energy]

forward and backward: the FlashAttention-3 paper's setting, bfloat16, 16384 tokens in all, hidden size
2048. shapes: the problems of bench/gpu_shapes.py, smaller or thinner, both passes. decode: one query
token and a cache of keys, bench/gpu_decode.py. float8: bench/gpu_float8.py. cases: two head dims, a million tokens.

Every result is compared with float64 before it is timed. Each kernel's calls are then captured in a
CUDA graph, as many as fill some milliseconds, so that nothing of the host is in the figures. The
graphs are replayed in turn, in random order each round, timed by events; a figure is the median over
the rounds, its spread half the distance between the quartiles. Calls of a round use the same tensors,
so what fits into the L2 cache may be there, for all of them.

--energy: what a call of the grid from 4096 tokens on takes, in joules, ours and FlashAttention-3's, by
replaying its graph until NVML's counter has changed several times. At its power limit a card is as fast
as its calls are frugal.

The official FlashAttention-3 is measured where its module flash_attn_interface can be imported.
A results file that is there already keeps the parts that are not measured now. It says of each part
when it was measured, and at which commit. bench/gpu_chart.py draws the figures."""

import argparse
import datetime
import json
import pathlib
import random
import statistics
import subprocess

import torch

import gpu_decode
import gpu_energy
import gpu_float8
import gpu_problem
import gpu_shapes
from c_abi import Library

ROOT = pathlib.Path(__file__).resolve().parent.parent
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
PARTS = ("forward", "backward", "shapes", "decode", "float8", "cases")
PEERS = ("fa3", "cudnn", "fa2", "triton", "fa3_deterministic")
MOST_CALLS = 100  # of a graph
WITH_ENERGY = {"libfa3", "fa3"}
ENERGY_SEQLEN = 4096  # and longer


def commit():
    command = ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        found = ""
    return found or "not known"


def numbers(text):
    return [int(number) for number in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/release/libfa3.so")
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS))
    parser.add_argument("--peers", default="fa3,cudnn,fa2", help="of " + ", ".join(PEERS))
    parser.add_argument("--head-dims", type=numbers, default=HEAD_DIMS, help="of the grid")
    parser.add_argument("--seqlens", type=numbers, default=SEQLENS, help="of the grid")
    parser.add_argument("--energy", action="store_true", help="joules of the grid's longer calls")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--milliseconds", type=float, default=5, help="of each kernel in a round")
    parser.add_argument("--results", type=pathlib.Path, help="also write the figures there, as JSON")
    parser.add_argument("--commit", default=commit(), help="of the library, for the results")
    options = parser.parse_args()
    for name, known in (("parts", PARTS), ("peers", PEERS)):
        setattr(options, name, [part for part in getattr(options, name).split(",") if part])
        if not set(getattr(options, name)) <= set(known):
            parser.error(f"--{name} takes {', '.join(known)}")
    return options


def captured(call, count):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(count):
            call()
    return graph


def queue(replay):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    return start, end


def elapsed(replay):
    start, end = queue(replay)
    end.synchronize()
    return start.elapsed_time(end)


def take_turns(calls, rounds, milliseconds):
    """{name: milliseconds of a call, one for each round}."""
    graphs, counts = {}, {}
    for name, call in calls.items():
        call()
        once = captured(call, 1)
        once.replay()
        counts[name] = max(1, min(MOST_CALLS, round(milliseconds / elapsed(once.replay))))
        graphs[name] = captured(call, counts[name])
        graphs[name].replay()
    samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            samples[name].append(elapsed(graphs[name].replay) / counts[name])
    return samples


def summary(samples, flops):
    low, median, high = statistics.quantiles(samples, n=4)
    spread = (high - low) / 2 / median
    return {"milliseconds": median, "tflops": flops / median * 1e-9, "spread": spread}


def time_calls(options, calls, flops):
    samples = take_turns(calls, options.rounds, options.milliseconds)
    return {name: summary(values, flops) for name, values in samples.items()}


def open_meter(options):
    """The energy counter, or None and why there is none."""
    if not options.energy:
        return None, "not asked for"
    try:
        return gpu_energy.Meter(), "joules of a call, by NVML"
    except gpu_energy.Unread as error:
        print(f"energy: not read, {error}")
        return None, f"not read, {error}"


def add_energy(options, meter, calls, figures):
    """Watts and joules of a call that follows itself for half a second."""
    for name in calls.keys() & WITH_ENERGY:
        count = max(1, round(options.milliseconds / figures[name]["milliseconds"]))
        try:
            watts, milliseconds = meter.measure(captured(calls[name], count).replay)
        except gpu_energy.Unread as error:
            figures[name]["energy"] = f"not read, {error}"
            continue
        figures[name].update(watts=watts, joules=watts * milliseconds / count * 1e-3)


CALLS = {"forward": gpu_problem.forward_calls, "backward": gpu_problem.backward_calls}


def measure(library, options, phase, shape, meter):
    problem = gpu_problem.Problem(shape)
    calls = CALLS[phase](library, problem, options.peers)
    figures = time_calls(options, calls, shape.flops(phase))
    if meter:
        add_energy(options, meter, calls, figures)
    return figures


def rate(cell, name):
    return cell[name]["tflops"]


def ratio(cell, *names):
    """libfa3 over the fastest of `names` that were measured, or None."""
    rates = [rate(cell, name) for name in names if name in cell]
    return rate(cell, "libfa3") / max(rates) if rates else None


def row(cell, kernels):
    figures = "".join(f"{rate(cell, k):6.0f}" if k in cell else "     -" for k in kernels)
    ratios = (ratio(cell, "fa3"), ratio(cell, "cudnn"), ratio(cell, "fa3", "cudnn"))
    energies = "".join(
        f"  {k} {cell[k]['joules']:.3g} J, {cell[k]['watts']:.0f} W"
        for k in kernels
        if "joules" in cell.get(k, {})
    )
    ratios = "".join(f"{r:7.3f}" if r else "      -" for r in ratios)
    return f"{cell['shape']:44}{figures}{ratios}{energies}"


def table(library, options, phase, shapes, save, meter=None):
    kernels = ("libfa3", *options.peers)
    print(f"{phase}, TFLOP/s:", *kernels, "and libfa3 over fa3, cudnn, the better of both")
    cells = []
    for shape in shapes:
        cell = {"shape": shape.name(), "head_dim": shape.head_dim, "causal": shape.causal}
        meter_of_cell = meter if shape.queries >= ENERGY_SEQLEN else None
        cell.update(seqlen=shape.queries, **measure(library, options, phase, shape, meter_of_cell))
        cells.append(cell)
        save(cells)
        print(row(cell, kernels), flush=True)
    return cells


def summarise(cells):
    figures = {}
    for label, names in {"fa3": ["fa3"], "cudnn": ["cudnn"], "better": ["fa3", "cudnn"]}.items():
        for part in ("", *HEAD_DIMS):
            ratios = [ratio(c, *names) for c in cells if part in ("", c["head_dim"])]
            ratios = [r for r in ratios if r]
            if ratios:
                suffix = f"_{part}" if part else ""
                figures[f"over_{label}{suffix}"] = statistics.geometric_mean(ratios)
                figures[f"worst_over_{label}{suffix}"] = min(ratios)
    energies = [
        cell["libfa3"]["joules"] / cell["fa3"]["joules"]
        for cell in cells
        if "joules" in cell["libfa3"] and "joules" in cell.get("fa3", {})
    ]
    if energies:
        figures["joules_over_fa3"] = statistics.geometric_mean(energies)
    return figures


def bandwidth(options):
    """Bytes a second that a plain read of 2 GiB gets."""
    numbers = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    samples = take_turns({"read": numbers.sum}, options.rounds, 4 * options.milliseconds)["read"]
    return 4 * numbers.numel() / statistics.median(samples) * 1e3


def decode(library, options, save):
    """Microseconds of a call: hot, on the same cache again and again, and cold, on a cache that no
    call before it has touched for as long as the L2 cache remembers."""
    read = bandwidth(options)
    print(f"decode, us; a plain read: {read * 1e-9:.0f} GB/s")
    print(f"{'heads, batch, keys, pages of':30}     hot     fa3   ratio    cold     fa3   GB/s of read")
    cells = []
    for shape in gpu_decode.SHAPES:
        cell = {"shape": shape.name(), "bytes": shape.cache_bytes(), "read_bandwidth": read}
        for name, caches in (("hot", 1), ("cold", shape.caches_beyond_l2())):
            calls = gpu_decode.calls(library, shape, caches, "fa3" in options.peers)
            samples = take_turns(calls, options.rounds, options.milliseconds)
            times = {k: 1e3 * statistics.median(v) / caches for k, v in samples.items()}
            cell[name] = times
        cells.append(cell)
        save(cells)
        hot, cold, peers = cell["hot"], cell["cold"], {"libfa3", "fa3"}
        rate_cold = cell["bytes"] / cold["libfa3"] * 1e6
        print(
            f"{cell['shape']:30}{hot['libfa3']:8.1f}{hot.get('fa3', 0):8.1f}"
            f"{hot.get('fa3', 0) / hot['libfa3']:8.2f}{cold['libfa3']:8.1f}{cold.get('fa3', 0):8.1f}"
            f"{rate_cold * 1e-9:7.0f} {rate_cold / read:.2f}"
            + "".join(f"  {name} {hot[name]:.1f}, {cold[name]:.1f}" for name in hot.keys() - peers),
            flush=True,
        )
    for miss in gpu_decode.misses(cells):
        print("missed:", miss)
    ratios = [c["hot"]["fa3"] / c["hot"]["libfa3"] for c in cells if "fa3" in c["hot"]]
    if not ratios:
        return {}
    cold = [c["cold"]["fa3"] / c["cold"]["libfa3"] for c in cells if "fa3" in c["cold"]]
    mean = statistics.geometric_mean
    return {
        "hot_over_fa3": mean(ratios),
        "worst_hot_over_fa3": min(ratios),
        "cold_over_fa3": mean(cold),
        "worst_cold_over_fa3": min(cold),
    }


def two_head_dims(library, options):
    """Gradients where V's head dim is smaller than that of Q and K."""
    batch, seqlen, heads, head_dim, value_head_dim = 4, 4096, 16, 192, 128
    query, key = (gpu_problem.random(batch, seqlen, heads, head_dim) for _ in range(2))
    value, grad_output = (
        gpu_problem.random(batch, seqlen, heads, value_head_dim) for _ in range(2)
    )
    output = gpu_problem.unwritten(value)
    lse = torch.full((batch, heads, seqlen), float("nan"), device="cuda")
    gradients = [gpu_problem.unwritten(tensor) for tensor in (query, key, value)]
    library.forward_gpu(query, key, value, output, True, lse=lse)()
    call = library.backward_gpu(query, key, value, output, lse, grad_output, gradients, True)
    call()
    problem = gpu_problem.Problem(gpu_shapes.square(batch, 16, heads, heads, value_head_dim))
    expected = problem.exact_gradients(query[-1], key[-1], value[-1], grad_output[-1])
    for name, result, right in zip(("query", "key", "value"), gradients, expected):
        gpu_problem.compare(f"libfa3's gradient of {name}", result[-1, :, -1], right)
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


def earlier_results(path, gpu):
    """What the file has of parts that are not measured now."""
    if not path or not path.exists():
        return {}
    before = json.loads(path.read_text())
    if before["gpu"] != gpu:
        raise SystemExit(f"{path} has figures of {before['gpu']}: they can't be mixed with {gpu}'s")
    return before


def run(options):
    library = Library(options.library.resolve())
    library.prepare_gpu()
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    driver, *clocks = subprocess.run(query, capture_output=True, text=True).stdout.strip().split(", ")
    gpu, today = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    results = earlier_results(options.results, gpu) | {
        "date": today,
        "gpu": gpu,
        "driver": driver,
        "clocks_before": clocks,
        "libfa3": library.version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "timed": "CUDA graph replays",
        "gemm": gemm(options),
    }
    print(f"{results['gpu']}, driver {driver}, torch {torch.__version__}; cuBLAS 8192^3", end=" ")
    print(f"{results['gemm']['tflops']:.0f} TFLOP/s")

    measured = results.setdefault("measured", {})  # when and at which commit each part was

    def save(name, figures, is_part=True):
        results[name] = figures
        if is_part:
            measured[name] = {"date": today, "commit": options.commit}
        if options.results:
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(results, indent=1) + "\n")

    summaries = results.get("summary", {})
    meter, results["energy"] = open_meter(options)
    grid = gpu_shapes.grid(options.head_dims, options.seqlens)
    tables = {"forward": ("forward", grid), "backward": ("backward", grid)}
    if "shapes" in options.parts:
        tables["shapes_forward"] = ("forward", gpu_shapes.THIN)
        tables["shapes_backward"] = ("backward", gpu_shapes.THIN)
    for name, (phase, shapes) in tables.items():
        if name in PARTS and name not in options.parts:
            continue
        of_grid = meter if name in PARTS else None
        cells = table(library, options, phase, shapes, lambda cells: save(name, cells), of_grid)
        summaries[name] = summarise(cells)
        save("summary", summaries, is_part=False)
        print(name, {k: round(v, 3) for k, v in summaries[name].items()}, flush=True)
    if "decode" in options.parts:
        summaries["decode"] = decode(library, options, lambda cells: save("decode", cells))
        save("summary", summaries, is_part=False)
        print("decode", {k: round(v, 3) for k, v in summaries["decode"].items()}, flush=True)
    if "float8" in options.parts:
        save("float8", gpu_float8.measure(library, take_turns, options))
    if "cases" in options.parts:
        for name, case in (
            ("192_128_backward", lambda: two_head_dims(library, options)),
            ("million", lambda: million(library)),
        ):
            save(name, case())
            print(name, round(results[name]["libfa3"]["tflops"]), "TFLOP/s", flush=True)
    save("gemm_after", gemm(options), is_part=False)
    print(f"cuBLAS after: {results['gemm_after']['tflops']:.0f} TFLOP/s")


def main():
    options = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("bench/gpu.py needs a Hopper GPU")
    # Graphs are not captured on the default stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        run(options)


main()
