"""The problems that bench/gpu.py times beside the paper's grid."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem. `lengths`, where given, are those of a packed batch's sequences; `queries`
    and `keys` are then the longest."""

    batch: int
    queries: int
    keys: int
    heads: int
    heads_k: int
    head_dim: int
    causal: bool
    window: int = 0  # keys to the left that a query sees, causal then; 0: all
    lengths: tuple = ()

    def rows(self):
        """(queries, keys) of each sequence."""
        if self.lengths:
            return [(length, length) for length in self.lengths]
        return [(self.queries, self.keys)] * self.batch

    def pairs(self):
        """Query-key pairs that the mask lets through, of one head."""
        total = 0
        for queries, keys in self.rows():
            if not self.causal:
                total += queries * keys
                continue
            seen = range(keys - queries + 1, keys + 1)
            limit = self.window + 1 if self.window else keys
            total += sum(min(max(count, 0), limit) for count in seen)
        return total

    def flops(self, phase):
        """Of the forward pass 4 a pair and column, of the backward pass 10."""
        return (4 if phase == "forward" else 10) * self.pairs() * self.heads * self.head_dim

    def name(self):
        mask = f"window {self.window}" if self.window else "causal" if self.causal else "full"
        sizes = f"{self.batch}, {self.queries} x {self.keys}"
        if self.lengths:
            sizes = f"packed {len(self.lengths)}, {sum(self.lengths)} in all"
        return f"{sizes}, {self.heads}/{self.heads_k}, {self.head_dim}, {mask}"


def grid(head_dims, seqlens, tokens=16384, hidden=2048):
    """The FlashAttention-3 paper's setting."""
    return [
        Shape(tokens // n, n, n, hidden // d, hidden // d, d, causal)
        for d in head_dims
        for causal in (False, True)
        for n in seqlens
    ]


def square(batch, seqlen, heads, heads_k, head_dim, causal=True, window=0):
    return Shape(batch, seqlen, seqlen, heads, heads_k, head_dim, causal, window)


def packed(lengths, heads, heads_k, head_dim):
    longest = max(lengths)
    return Shape(len(lengths), longest, longest, heads, heads_k, head_dim, True, 0, tuple(lengths))


# Smaller or thinner than the grid, as people train: shards of large models, cross-attention, odd
# lengths, windows, packed batches.
THIN = [
    square(1, 4096, 8, 1, 128),
    square(1, 8192, 8, 1, 128),
    square(4, 2048, 8, 1, 128),
    square(1, 2048, 8, 1, 256),
    square(2, 4096, 16, 1, 128),
    square(1, 2048, 32, 8, 128),
    square(1, 4096, 32, 8, 128),
    square(1, 2048, 16, 16, 128, causal=False),
    square(1, 2048, 16, 16, 128),
    square(1, 2048, 12, 12, 64),
    square(8, 1024, 12, 12, 64),
    square(16, 512, 12, 12, 64, causal=False),
    Shape(2, 4096, 77, 8, 8, 64, False),
    Shape(2, 1024, 256, 16, 16, 64, False),
    square(2, 4096, 10, 10, 64, causal=False),
    Shape(1, 512, 8192, 32, 8, 128, True),
    Shape(1, 2048, 32768, 8, 1, 128, True),
    square(2, 4096, 48, 6, 128),
    square(1, 65536, 4, 4, 128),
    square(1, 1024, 1, 1, 128, causal=False),
    square(1, 1024, 8, 8, 128),
    square(1, 16384, 1, 1, 128),
    square(1, 16384, 2, 2, 64, causal=False),
    square(1, 32768, 8, 1, 128),
    square(2, 1000, 16, 4, 128),
    square(3, 3333, 6, 6, 64),
    square(1, 5000, 20, 5, 128, causal=False),
    square(1, 777, 32, 32, 64),
    square(64, 197, 12, 12, 64, causal=False),
    square(32, 77, 16, 16, 64),
    square(64, 128, 8, 8, 128, causal=False),
    square(8, 1024, 16, 2, 256),
    square(2, 2048, 8, 8, 256),
    square(1, 4096, 4, 1, 256, causal=False),
    square(1, 8192, 16, 1, 64),
    square(4, 4096, 14, 2, 64),
    square(1, 16384, 8, 2, 128, window=1024),
    square(2, 8192, 16, 16, 64, window=511),
    square(1, 4096, 16, 4, 256, window=2048),
    Shape(4, 128, 4096, 16, 16, 128, False),
    Shape(1, 8192, 1024, 16, 16, 128, False),
    packed([128, 3000, 512, 1024, 77, 2048, 4096, 1500, 3999], 16, 16, 128),
    packed([1024] * 8, 32, 8, 128),
    packed([200, 7000, 33, 900], 8, 1, 128),
    packed([512, 77, 2048, 300, 1100, 60, 4000], 12, 12, 64),
]
