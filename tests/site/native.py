"""The toys' C functions (docs/site/toys/toys.h), compiled like the library."""

import ctypes
import os
import struct

os.environ["FA3_CPU_LEVEL"] = "plain"  # what the pages run

ROW = ("maximum", "rescale", "sum", "output", "result", "lse")  # struct softmax_row
PLACE = struct.Struct("4i2d")  # struct scheduled_tile and struct span


def float32(number):
    return ctypes.c_float(number).value


class Native:
    def __init__(self, library):
        self.library = ctypes.CDLL(library)
        self.library.toy_heads.restype = ctypes.c_char_p

    def softmax(self, scores, values, width):
        """What is known after each tile, and each key's exponential as its tile had it."""
        count = len(scores)
        rows = (ctypes.c_float * (len(ROW) * count))()
        exponentials = (ctypes.c_float * count)()
        floats = ctypes.c_float * count
        steps = self.library.toy_softmax(
            count, floats(*scores), floats(*values), width, rows, exponentials
        )
        cut = [rows[i * len(ROW) : (i + 1) * len(ROW)] for i in range(steps)]
        return [dict(zip(ROW, row)) for row in cut], list(exponentials)

    def naive_softmax(self, scores, values):
        floats = ctypes.c_float * len(scores)
        result = (ctypes.c_float * 3)()
        self.library.toy_naive_softmax(len(scores), floats(*scores), floats(*values), result)
        return list(result)

    def tile_kinds(self, problem):
        """`problem` has the fields of struct tile_problem, in their order."""
        queries, keys, _, _, _, tile_q, tile_k = problem
        count = -(-queries // tile_q) * -(-keys // tile_k)
        kinds = ctypes.create_string_buffer(count)
        self.library.toy_tile_kinds(struct.pack("7i", *problem), kinds)
        return list(kinds.raw)

    def schedule(self, problem, schedule):
        """`schedule` as struct schedule; returns (block, head, batch, multiprocessor, begin, end)."""
        rows = -(-problem[0] // problem[5])
        tiles = ctypes.create_string_buffer(PLACE.size * rows * schedule[0] * schedule[1])
        count = self.library.toy_schedule(
            struct.pack("7i", *problem), struct.pack("5i4x2d", *schedule), tiles
        )
        return list(PLACE.iter_unpack(tiles.raw[: PLACE.size * count]))

    def timeline(self, timeline):
        """`timeline` as struct timeline; returns (lane, kind, tile, warpgroup, begin, end)."""
        most = 2000
        spans = ctypes.create_string_buffer(PLACE.size * most)
        count = self.library.toy_timeline(struct.pack("4i5d", *timeline), spans, most)
        return list(PLACE.iter_unpack(spans.raw[: PLACE.size * count]))

    def heads(self, tokens, heads, heads_k, head_dim, query, key, value, causal, left):
        """`query`, `key` and `value` are float32's bytes. Functions of head, query and the third."""
        width = -(-tokens // 8) * 8
        weights = (ctypes.c_float * (tokens * heads * width))()
        output = (ctypes.c_float * (tokens * heads * head_dim))()
        lse = (ctypes.c_float * (heads * tokens))()
        wrong = self.library.toy_heads(
            tokens, heads, heads_k, head_dim, query, key, value, causal, left, weights, output, lse
        )
        if wrong:
            raise RuntimeError(wrong.decode())
        return (
            lambda head, i, j: weights[(i * heads + head) * width + j],
            lambda head, i, column: output[(i * heads + head) * head_dim + column],
            lambda head, i: lse[head * tokens + i],
        )

    def read(self, text, parameters, layer):
        """What a layer makes of a text: heads, heads_k, head_dim, and three float32's bytes."""
        sizes = (ctypes.c_int32 * 4)()
        self.library.toy_read_sizes(sizes)
        _, heads, heads_k, head_dim = sizes
        counts = [len(text) * each * head_dim for each in (heads, heads_k, heads_k)]
        results = [(ctypes.c_float * count)() for count in counts]
        self.library.toy_read(text, len(text), parameters, layer, *results)
        return heads, heads_k, head_dim, *map(bytes, results)
