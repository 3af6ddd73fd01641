#!/usr/bin/env python3
"""Trains a GPT of GPT-2's size on sequences of 8192 tokens, once with each kind of attention, from the
same weights on the same text: tokens per second and loss curves.

    python3 examples/train_gpt.py --out train-gpt.json     needs PyTorch, the package fa3, a GPU
    python3 examples/train_gpt.py --tiny                   on the CPU, in seconds

The text is what every machine has: Python's own library. A token is a pair of bytes."""

import argparse
import collections
import contextlib
import datetime
import functools
import json
import pathlib
import statistics
import sysconfig
import time

import fa3
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def heads_first(q, k, v):
    output = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True
    )
    return output.transpose(1, 2)


# Attention of (batch, seqlen, heads, head_dim) tensors, and how PyTorch is told which one.
ATTENTION = {
    "libfa3": (functools.partial(fa3.flash_attn_func, causal=True), None),
    "cuDNN": (heads_first, SDPBackend.CUDNN_ATTENTION),
    "PyTorch's math": (heads_first, SDPBackend.MATH),
}


class Block(nn.Module):
    def __init__(self, width, heads, attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1))
            for t in self.query_key_value(self.before_attention(x)).chunk(3, -1)
        )
        x = x + self.projection(self.attention(q, k, v).flatten(-2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, seqlen, layers, width, heads, attention):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(seqlen, width)
        self.blocks = nn.ModuleList(Block(width, heads, attention) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, positions=None):
        """`positions` are the tokens' where they are not the first ones in order."""
        where = slice(tokens.shape[-1]) if positions is None else positions
        x = self.tokens(tokens) + self.positions.weight[where]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.last(x), self.tokens.weight)


def read_text(count, vocabulary):
    """The first `count` tokens of Python's library: byte pairs, the most frequent one first."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: 2 * count]
    pairs = [text[i : i + 2] for i in range(0, len(text) - 1, 2)]
    ranks = {pair: rank for rank, (pair, _) in enumerate(collections.Counter(pairs).most_common())}
    return torch.tensor([min(ranks[pair], vocabulary - 1) for pair in pairs])


def train(name, sizes, steps, batch, text, device):
    attention, backend = ATTENTION[name]
    torch.manual_seed(1)
    model = GPT(**sizes, attention=attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(2)
    seqlen = sizes["seqlen"]
    losses, seconds = [], []
    with sdpa_kernel(backend) if backend else contextlib.nullcontext():
        for step in range(steps):
            starts = torch.randint(len(text) - seqlen - 1, (batch,), generator=generator)
            rows = torch.stack([text[start : start + seqlen + 1] for start in starts]).to(device)
            for group in optimizer.param_groups:
                group["lr"] = 6e-4 * min(1, (step + 1) / 20)
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.autocast(device, torch.bfloat16):
                logits = model(rows[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # waits for the step
            seconds.append(time.perf_counter() - start)
    measured = seconds[len(seconds) // 4 :]  # without the first quarter, in which things warm up
    return {
        "attention": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens per second": round(batch * seqlen / statistics.median(measured)),
        "milliseconds per step": round(1e3 * statistics.median(measured), 2),
        "losses": [round(loss, 4) for loss in losses],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU trains in seconds")
    parser.add_argument("--steps", type=int, help="of each kind of attention")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the results")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a GPU; --tiny trains on the CPU")
    sizes = {"vocabulary": 50304, "seqlen": 8192, "layers": 12, "width": 768, "heads": 12}
    kinds = list(ATTENTION)
    steps = options.steps or 100
    if options.tiny:
        sizes = {"vocabulary": 256, "seqlen": 128, "layers": 2, "width": 64, "heads": 2}
        kinds = ["libfa3", "PyTorch's math"]
        steps = options.steps or 10
    # PyTorch's math attention in bf16: in float32, its default, the scores would not fit the GPU.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    text = read_text(1 << 20, sizes["vocabulary"])
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "fa3": fa3.__version__,
        **sizes,
        "runs": [],
    }
    for kind in kinds:
        run = train(kind, sizes, steps, 1, text, device)
        print(
            f"{kind:16} {run['tokens per second']:9} tokens/s, loss {run['losses'][0]:.3f} -> "
            f"{run['losses'][-1]:.3f}",
            flush=True,
        )
        result["runs"].append(run)
        if device == "cuda":
            torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
