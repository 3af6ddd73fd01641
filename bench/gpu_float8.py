"""FP8 on a GPU: fa3_quantize beside a plain copy, and attention of bfloat16 tensors by way of their
E4M3 codes beside the bfloat16 forward pass. A part of bench/gpu.py."""

import statistics

import torch

import gpu_problem
import gpu_shapes

E4M3 = torch.float8_e4m3fn
LARGEST_ERROR = 0.1  # of the output's norm, on normal inputs: codes have 3 bits of mantissa
# Of what is quantised: batch, seqlen, heads, head dim. All are more than the L2 cache holds.
TENSORS = ((8, 8192, 16, 64), (4, 8192, 16, 128), (4, 4096, 16, 256), (1, 16384, 64, 128))
# How: rows of a scale (0: all of a sequence, None: of the tensor), and what goes before.
WAYS = {
    "128 rows": (128, {}),
    "128 rows, rotated": (128, {"rotate": True}),
    "row": (1, {}),
    "row, rotated": (1, {"rotate": True}),
    "sequence": (0, {}),
    "sequence, rotated": (0, {"rotate": True}),
    "tensor": (None, {}),
    "128 rows, mean off, rotated": (128, {"subtract_mean": True, "rotate": True}),
    "sequence, mean off, rotated": (0, {"subtract_mean": True, "rotate": True}),
    "128 rows, turned, rotated": (128, {"rotary": True, "rotate": True}),
}
SEQLENS, HEAD_DIMS = (1024, 2048, 4096, 8192, 16384), (64, 128, 256)
# Smaller or thinner than that grid, for codes alone.
THIN = [
    gpu_shapes.square(1, 2048, 8, 8, 128),
    gpu_shapes.square(1, 4096, 8, 8, 128),
    gpu_shapes.square(1, 8192, 8, 8, 128, causal=False),
    gpu_shapes.square(4, 4096, 8, 1, 128),
    gpu_shapes.square(2, 4096, 32, 8, 128),
    gpu_shapes.square(2, 4096, 32, 8, 128, causal=False),
    gpu_shapes.square(1, 5000, 20, 5, 128),
    gpu_shapes.Shape(4, 1024, 8192, 16, 16, 128, False),
    gpu_shapes.Shape(1, 512, 32768, 32, 8, 128, True),
    gpu_shapes.packed([8, 77, 300, 512, 1024, 2048, 3000, 4096], 16, 16, 128),
    gpu_shapes.square(1, 4096, 8, 8, 64),
    gpu_shapes.square(2, 3333, 12, 12, 64, causal=False),
    gpu_shapes.square(1, 8192, 16, 1, 64),
    gpu_shapes.packed([8, 77, 300, 512, 1024, 2048, 3000, 4096], 12, 12, 64),
    gpu_shapes.square(1, 4096, 8, 8, 256),
    gpu_shapes.square(4, 2048, 8, 1, 256),
]
# For which others publish figures: SageAttention2, cuDNN.
PUBLISHED = [
    gpu_shapes.square(1, 32768, 16, 16, 128),
    *[
        gpu_shapes.square(1, seqlen, 64, 8, 128, causal)
        for seqlen in (8192, 16384, 32768)
        for causal in (True, False)
    ],
]


def make_codes(tensor, rows):
    """Codes and scales, yet to be written."""
    batch, seqlen, heads, _ = tensor.shape
    shape = (1,) if rows is None else (batch, heads, -(-seqlen // rows)) if rows else (batch, heads)
    return torch.empty_like(tensor, dtype=E4M3), torch.full(shape, torch.nan, device="cuda")


def quantize_call(library, tensor, rows, codes, scale, rotary=False, **how):
    """A function that queues the call; with rotary embedding of the whole head."""
    if rotary:
        angles = torch.rand(tensor.shape[1], tensor.shape[3] // 2, device="cuda")
        how["tables"] = angles.cos().to(tensor.dtype), angles.sin().to(tensor.dtype)
    return library.quantize_gpu(tensor, codes, scale, rows or 0, **how)


def check_codes(name, tensor, codes, scale, rows):
    """Where nothing goes before: the largest of each head is 448, and all are near."""
    spread = scale if rows is None else scale.repeat_interleave(rows or tensor.shape[1], -1)
    if rows == 0:
        spread = scale[:, None, :, None]
    elif rows:
        spread = spread[:, :, : tensor.shape[1]].transpose(1, 2)[..., None]
    error = (codes.float() * spread - tensor.float()).abs()
    # Half of a step, a sixteenth of the number or 2^-10 of a code, and the rounding of both scales.
    if not (error <= tensor.float().abs() * (2**-4 + 2**-20) + 2**-10 * spread).all():
        gpu_problem.refuse(f"fa3_quantize, {name}")


def time_quantize(library, take_turns, options, copy_bandwidth):
    """Microseconds and the share of the bandwidth of a copy, of two bytes read and one written for
    each element."""
    cells = []
    for shape in TENSORS:
        tensor = gpu_problem.random(*shape)
        calls = {}
        for name, (rows, how) in WAYS.items():
            codes, scale = make_codes(tensor, rows)
            calls[name] = quantize_call(library, tensor, rows, codes, scale, **how)
            calls[name]()
            if not how:
                check_codes(name, tensor, codes, scale, rows)
            if not torch.isfinite(scale).all():
                gpu_problem.refuse(f"fa3_quantize, {name}: not every scale was written")
        samples = take_turns(calls, options.rounds, options.milliseconds)
        for name, values in samples.items():
            milliseconds = sorted(values)[len(values) // 2]
            share = 3 * tensor.numel() / milliseconds * 1e3 / copy_bandwidth
            cell = {"shape": list(shape), "scale_of": name}
            cells.append({**cell, "microseconds": 1e3 * milliseconds, "of_copy": share})
            print(f"{str(shape):24}{name:32}{1e3 * milliseconds:8.1f} us {share:6.2f} of a copy")
    return cells


def measure_copy(options):
    """Bytes a second that a copy of 2 GiB reads and writes together. Not in a graph, whose copies are
    a fifth slower: there they are nodes of the driver's own."""
    numbers = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    other = torch.empty_like(numbers)
    samples = []
    for _ in range(options.rounds + 1):  # the first warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            other.copy_(numbers)
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 4)
    return 2 * 4 * numbers.numel() / sorted(samples[1:])[options.rounds // 2] * 1e3


class Quantized:
    """Query, key and value of a problem, with what makes codes of them: blocks of 128 rows, query
    and key rotated."""

    def __init__(self, library, problem):
        self.tensors = (problem.query, problem.key, problem.value)
        made = [make_codes(tensor, 128) for tensor in self.tensors]
        self.codes, self.scales = [codes for codes, _ in made], [scale for _, scale in made]
        self.calls = [
            quantize_call(library, tensor, 128, codes, scale, rotate=rotate)
            for tensor, (codes, scale), rotate in zip(self.tensors, made, (True, True, False))
        ]

    def __call__(self):
        for call in self.calls:
            call()


def check_output(name, problem, output):
    """Sampled rows of a head of the last sequence."""
    tensors = problem.sequences(problem.query, problem.key, problem.value, output)[-1]
    query, key, value, result = (tensor[:, 0] for tensor in tensors)
    rows = torch.randint(len(query), (64,)).cuda()
    scores = gpu_problem.scores_of(query, key, rows, problem.shape.causal)
    expected = gpu_problem.softmax(scores) @ value.double()
    error = (result[rows].double() - expected).norm() / expected.norm()
    if not error <= LARGEST_ERROR:
        gpu_problem.refuse(f"{name} is {error:.2g} off")
    return error.item()


def codes_calls(library, problem, peers):
    """{name: a function that queues it}: attention of codes with one scale for each batch entry and
    head, which is what FlashAttention-3 takes, from the same codes."""
    shape = problem.shape
    codes = [tensor.to(E4M3) for tensor in (problem.query, problem.key, problem.value)]
    scales = [torch.ones(shape.batch, heads, device="cuda")
              for heads in (shape.heads, shape.heads_k, shape.heads_k)]
    output = gpu_problem.unwritten(problem.query)
    calls = {"fp8, a scale a head": library.forward_gpu(
        *codes, output, shape.causal, lengths=problem.lengths, scales=scales
    )}
    calls["fp8, a scale a head"]()
    check_output("attention with a scale a head", problem, output)
    if gpu_problem.flash_attn_func and "fa3" in peers:
        official = {name: scales[2] for name in ("q_descale", "k_descale", "v_descale")}

        def fa3():
            if not shape.lengths:
                return gpu_problem.flash_attn_func(*codes, causal=shape.causal, **official)
            bounds = (problem.starts, problem.starts, shape.queries, shape.queries)
            return gpu_problem.flash_attn_varlen_func(
                *codes, *bounds, causal=shape.causal, **official
            )

        check_output("fa3's FP8", problem, fa3())
        calls["fa3 fp8"] = fa3
    return calls


def attention_calls(library, problem, peers):
    """{name: a function that queues it}: the bfloat16 forward pass, codes alone, attention of codes
    alone, and both; and those of codes_calls."""
    quantized, causal = Quantized(library, problem), problem.shape.causal
    output = gpu_problem.unwritten(problem.query)
    forward = library.forward_gpu(
        *quantized.codes, output, causal, scales=quantized.scales, scale_rows=128
    )

    def both():
        quantized()
        forward()

    both()
    error = check_output("attention by way of codes", problem, output)
    calls = {"bf16": library.forward_gpu(*quantized.tensors, problem.output, causal)}
    calls["bf16"]()
    problem.check_output("bf16", problem.output)
    calls |= {"quantize": quantized, "fp8": forward, "quantize and fp8": both}
    return calls | codes_calls(library, problem, peers), error


def one_cell(shape, calls, take_turns, options):
    samples = take_turns(calls, options.rounds, options.milliseconds)
    times = {name: sorted(values)[len(values) // 2] for name, values in samples.items()}
    cell = {"shape": shape.name(), "head_dim": shape.head_dim, "seqlen": shape.queries}
    rates = {f"{name}_tflops": shape.flops("forward") / times[name] * 1e-9
             for name in times if name != "quantize"}
    cell |= {"milliseconds": times, **rates}
    if "fa3 fp8" in times:
        cell["over_fa3"] = times["fa3 fp8"] / times["fp8, a scale a head"]
    line = "".join(f"  {name} {1e3 * time:.0f}" for name, time in times.items())
    over = f"; {cell['over_fa3']:.3f} of fa3" if "over_fa3" in cell else ""
    print(f"{cell['shape']:44}{line} us{over}", flush=True)
    return cell


def time_attention(library, take_turns, options):
    cells = []
    for shape in gpu_shapes.grid(HEAD_DIMS, SEQLENS):
        calls, error = attention_calls(library, gpu_problem.Problem(shape), options.peers)
        cell = one_cell(shape, calls, take_turns, options) | {"relative_error": error}
        times = cell["milliseconds"]
        cell["over_bf16"] = times["bf16"] / times["quantize and fp8"]
        cells.append(cell)
    return cells


def time_codes(library, take_turns, options, shapes):
    cells = []
    for shape in shapes:
        calls = codes_calls(library, gpu_problem.Problem(shape), options.peers)
        cells.append(one_cell(shape, calls, take_turns, options))
    return cells


def measure(library, take_turns, options):
    copy = measure_copy(options)
    print(f"float8: a copy moves {copy * 1e-9:.0f} GB/s")
    found = {
        "copy_bandwidth": copy,
        "quantize": time_quantize(library, take_turns, options, copy),
        "attention": time_attention(library, take_turns, options),
        "thin": time_codes(library, take_turns, options, THIN),
        "published": time_codes(library, take_turns, options, PUBLISHED),
    }
    for part in ("attention", "thin", "published"):
        ratios = [cell["over_fa3"] for cell in found[part] if "over_fa3" in cell]
        if ratios:
            found[f"{part}_over_fa3"] = statistics.geometric_mean(ratios)
            found[f"{part}_worst_over_fa3"] = min(ratios)
            print(f"float8, {part}: {found[f'{part}_over_fa3']:.3f} of fa3, at least {min(ratios):.3f}")
    return found
