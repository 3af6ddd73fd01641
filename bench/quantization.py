#!/usr/bin/env python3
"""What each way of quantising costs in error, on the CPU.

    cmake --preset release && cmake --build --preset release
    build/venv/bin/python bench/quantization.py [--results bench/results/NAME.json] [--table]

Query, key and value are quantised by fa3_quantize, and fa3_forward computes attention of the codes
in float32 ("exact P"): what is off then is off because of the inputs' codes alone. A kernel for FP8
matrix products also rounds the probabilities: in "P in E4M3" NumPy does so, in blocks of 128 keys,
with the largest that a row has seen so far at 256. The error is the root mean square of the
difference from attention of the unquantised inputs in float64, over all output elements.

Ways of quantising, E4M3 with a scale of its own for

    tensor      each tensor
    block       each 128 rows of a head (value: in all that follow)
    rotate      the same, after random signs and a Hadamard transform of query and key
    mean        the same as block, after taking the mean off the keys
    all         rotate and mean

and, in NumPy alone, after SageAttention (arXiv 2410.02367, 2411.10958): int8 for query (blocks of
128 rows) and key (blocks of 64 rows, mean off), E4M3 with a scale for each channel for value.
"int8 rotate" also rotates. "V by channel" and "V by block" change the scales of value alone.

Inputs: 256 queries against 4096 keys, 4 heads, from N(0, 1), with outliers as in the
FlashAttention-3 paper, N(0, 1) + N(0, 100) Bernoulli(0.001), and with channels of value 30 times as
large, one in 32, whose errors count a 30th as much; and query, key and value of all layers of trained models (bench/models.py): the one of
examples/generate, or with --models the others too, which takes bench/models.txt.
"""

import argparse
import ctypes
import json
import pathlib
import platform
import sys

import ml_dtypes
import numpy as np
import models
from header import read_header

ROOT = pathlib.Path(__file__).resolve().parent.parent
TYPES, CONSTANTS = read_header()
E4M3 = ml_dtypes.float8_e4m3fn
DTYPES = {
    np.dtype(np.float32): CONSTANTS["FA3_FLOAT32"],
    np.dtype(E4M3): CONSTANTS["FA3_FLOAT8_E4M3"],
}
ROTATE, MEAN = CONSTANTS["FA3_ROTATE"], CONSTANTS["FA3_SUBTRACT_MEAN"]
CAUSAL, WINDOW = CONSTANTS["FA3_CAUSAL"], CONSTANTS["FA3_WINDOW"]
ROWS = 128  # that share a scale
INPUTS = "query", "key", "value"

# Rows of a scale, or none for one of the tensor; flags of query and key.
WAYS = {
    "tensor": (None, 0, 0),
    "block": (ROWS, 0, 0),
    "rotate": (ROWS, ROTATE, ROTATE),
    "mean": (ROWS, 0, MEAN),
    "all": (ROWS, ROTATE, ROTATE | MEAN),
}
# In NumPy alone.
SIMULATED = "rotate, V by channel", "int8", "int8 rotate", "int8 rotate, V by block"


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.fa3_last_error.restype = ctypes.c_char_p

    def call(self, name, args, *more):
        if getattr(self.lib, name)(ctypes.byref(args), *more):
            raise RuntimeError(self.lib.fa3_last_error().decode())

    def quantize(self, array, rows, flags=0, seed=0):
        """(batch, seqlen, heads, head_dim) in float32: codes and scales."""
        batch, seqlen, heads, _ = array.shape
        codes = np.zeros(array.shape, E4M3)
        scale = np.zeros((batch, heads, -(-seqlen // rows)) if rows else (1,), np.float32)
        args = TYPES["fa3_quantize_args"](flags=flags, seed=seed if flags & ROTATE else 0)
        args.struct_size, args.codes_scale_rows = ctypes.sizeof(args), rows or 0
        describe(args.input, array)
        describe(args.codes, codes)
        describe(args.codes_scale, scale)
        self.call("fa3_quantize", args)
        return codes, scale

    def forward(self, tensors, rows, window):
        """The output of codes and their scales by name, in float32; `window` as in attention."""
        query, value = tensors["query"], tensors["value"]
        output = np.zeros((*query.shape[:3], value.shape[3]), np.float32)
        args = TYPES["fa3_forward_args"]()
        args.struct_size = ctypes.sizeof(args)
        if window:
            args.flags, args.window_left = CAUSAL | WINDOW, window - 1
        for name, tensor in (tensors | {"output": output}).items():
            describe(getattr(args, name), tensor)
        args.query_scale_rows = args.key_scale_rows = args.value_scale_rows = rows or 0
        size = ctypes.c_size_t()
        self.call("fa3_forward_workspace", args, ctypes.byref(size))
        workspace = ctypes.create_string_buffer(max(size.value, 1))
        args.workspace, args.workspace_size = ctypes.addressof(workspace), size.value
        self.call("fa3_forward", args)
        return output


def describe(field, array):
    field.data, field.dtype, field.rank = array.ctypes.data, DTYPES[array.dtype], array.ndim
    field.shape[: array.ndim] = array.shape
    field.strides[: array.ndim] = [stride // array.itemsize for stride in array.strides]


def spread(scale, rows, seqlen):
    """A scale for every row: (batch, seqlen, heads, 1), or one number."""
    if not rows:
        return scale
    return np.repeat(scale, rows, axis=2)[..., :seqlen].swapaxes(1, 2)[..., None]


def attention(query, key, value, window=0, probabilities=lambda p: p, dtype=np.float64):
    """Head by head; `probabilities` changes those of a head, the largest of each row at 1. With a
    window a row sees itself and window - 1 rows before it."""
    output = np.empty((*query.shape[:3], value.shape[3]), dtype)
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            q, k, v = (array[b, :, h].astype(dtype) for array in (query, key, value))
            scores = q @ k.T / dtype(query.shape[3] ** 0.5)
            if window:
                seen = np.tri(len(q), len(k)) - np.tri(len(q), len(k), -window)
                scores[seen == 0] = -np.inf
            scores -= scores.max(1, keepdims=True)
            weights = np.exp(scores)
            output[b, :, h] = probabilities(weights) @ v / weights.sum(1, keepdims=True)
    return output


def round_probabilities(weights):
    """To E4M3, in blocks of keys, as an online softmax has them: the largest so far at 256."""
    rounded = np.empty_like(weights)
    so_far = np.maximum.accumulate(weights, 1)
    for first in range(0, weights.shape[1], ROWS):
        block = weights[:, first : first + ROWS]
        factor = 256 / np.maximum(so_far[:, first : first + ROWS].max(1, keepdims=True), 1e-30)
        codes = (block * factor).astype(E4M3)
        rounded[:, first : first + ROWS] = codes.astype(weights.dtype) / factor
    return rounded


def int8(array, rows):
    """Codes times scales: the nearest of 127 steps either way, of blocks of rows of a head."""
    batch, seqlen, heads, _ = array.shape
    largest = np.abs(array).max(3).swapaxes(1, 2)
    scale = np.maximum.reduceat(largest, np.arange(0, seqlen, rows), axis=2) / 127
    steps = spread(np.maximum(scale, 1e-30), rows, seqlen)
    return np.rint(array / steps) * steps


def channels(array):
    """In E4M3, a scale for each."""
    scale = np.maximum(np.abs(array).max(1, keepdims=True) / np.float32(448), np.float32(1e-30))
    return (array / scale).astype(E4M3).astype(np.float32) * scale


def hadamard(array, seed):
    """Signs and a transform for what fa3_quantize does not make; the head dim is a power of two."""
    size = array.shape[3]
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.random.default_rng(seed).choice([-1, 1], size)
    return (array * signs) @ (matrix / size**0.5)


def rms(output, exact, unit=1):
    return float(np.sqrt(np.mean(((output.astype(np.float64) - exact) / unit) ** 2)))


def errors(library, tensors, window, exact, unit, seed):
    """By way of quantising, in units of each channel: of exact probabilities and of those in E4M3."""
    found, decoded = {}, {}
    for way, (rows, of_query, of_key) in WAYS.items():
        flags = {"query": of_query, "key": of_key, "value": 0}
        coded, values = {}, []
        for name in INPUTS:
            codes, scale = library.quantize(tensors[name], rows, flags[name], seed)
            coded |= {name: codes, name + "_scale": scale}
            values.append(codes.astype(np.float32) * spread(scale, rows, codes.shape[1]))
        decoded[way] = values
        found[way] = {
            "exact P": rms(library.forward(coded, rows, window), exact, unit),
            "P in E4M3": rms(attention(*values, window, round_probabilities, np.float32), exact, unit),
        }
    by_block, by_channel = decoded["block"][2], channels(tensors["value"])
    for way in SIMULATED:
        query, key = tensors["query"], tensors["key"] - tensors["key"].mean(1, keepdims=True)
        if "int8 rotate" in way:
            query, key = hadamard(query, seed), hadamard(key, seed)
        query, key = int8(query, 128), int8(key, 64)
        if "int8" not in way:
            query, key = decoded["rotate"][:2]
        values = query, key, by_block if "block" in way else by_channel
        found[way] = {
            "exact P": rms(attention(*values, window, dtype=np.float32), exact, unit),
            "P in E4M3": rms(attention(*values, window, round_probabilities, np.float32), exact, unit),
        }
    return found


def random_inputs(kind, head_dim, seed):
    generator = np.random.default_rng(seed)

    def draw(rows):
        shape = 1, rows, 4, head_dim
        array = generator.standard_normal(shape)
        if kind == "outliers":
            array += 10 * generator.standard_normal(shape) * (generator.random(shape) < 0.001)
        return array.astype(np.float32)

    tensors = {"query": draw(256), "key": draw(4096), "value": draw(4096)}
    if kind == "channels":
        tensors["value"][..., ::32] *= 30
    return tensors, 0


def print_table(results):
    """Of each of the random inputs; of each model all layers, over the size of their outputs."""
    rows = {}
    for entry in results:
        name, _, layer = entry["inputs"].partition(", layer ")
        size = entry["output_rms"] if layer else 1
        for kind in "exact P", "P in E4M3":
            row = [entry["rms_error"][way][kind] / size for way in (*WAYS, *SIMULATED)]
            rows.setdefault((name, kind), []).append(row)
    print("| inputs | P |", " | ".join([*WAYS, *SIMULATED]), "|")
    print("|---" * (len(WAYS) + len(SIMULATED) + 2) + "|")
    for (name, kind), layers in rows.items():
        figures = (f"{x:.1e}".replace("e-0", "e-") for x in np.sqrt(np.mean(np.square(layers), 0)))
        print(f"| {name} | {kind.replace(' P', '').replace('P in ', '')} |", " | ".join(figures), "|")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--head-dims", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--models", action="store_true", help="all of bench/models.py")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=pathlib.Path, help="also write them there, as JSON")
    parser.add_argument("--table", type=pathlib.Path, help="print that file's figures, no more")
    options = parser.parse_args()
    if options.table:
        print_table(json.loads(options.table.read_text())["results"])
        return
    library = Library(options.build / "libfa3.so")
    inputs = {
        f"{kind}, d={head_dim}": random_inputs(kind, head_dim, options.seed)
        for kind in ("outliers", "normal", "channels")
        for head_dim in options.head_dims
    }
    for model in (models.jargon, models.minilm, models.antiberty) if options.models else (models.jargon,):
        inputs |= model()
    results = []
    for name, (tensors, window) in inputs.items():
        exact = attention(*(tensors[part] for part in INPUTS), window)
        unit = np.ones(exact.shape[3])
        unit[::32] = 30 if name.startswith("channels") else 1
        found = errors(library, tensors, window, exact, unit, options.seed)
        results.append({"inputs": name, "output_rms": rms(exact, 0, unit), "rms_error": found})
        print(f"{name} done", file=sys.stderr)
    print_table(results)
    if options.results:
        record = {
            "command": "bench/quantization.py " + " ".join(sys.argv[1:]),
            "processor": platform.processor() or platform.machine(),
            "numpy": np.__version__,
            "seed": options.seed,
            "results": results,
        }
        options.results.write_text(json.dumps(record, indent=1) + "\n")


main()
