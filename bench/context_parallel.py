#!/usr/bin/env python3
"""A sequence dealt out over GPUs, by PyTorch's context parallelism with each attention under
scaled_dot_product_attention, and by this package with all keys gathered.

    torchrun --nproc-per-node 2 bench/context_parallel.py --out context-parallel.json

First what each computes is compared with one GPU and with float64, then a GPT's losses and gradients
with those of one GPU, then attention is timed. Efficiency is one GPU's time divided by the number of
GPUs and by their time."""

import argparse
import contextlib
import datetime
import functools
import json
import os
import pathlib
import random
import statistics
import sys
import time

import fa3
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    context_parallel_unshard,
    set_rotate_method,
)
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))
import train_gpt  # noqa: E402

# The switch puts libfa3 where PyTorch's own flash attention was.
BACKENDS = {"libfa3": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
HEAD_DIM = 128


class Gather(torch.autograd.Function):
    """The tensors of all processes, one after the other along the first dimension."""

    @staticmethod
    def forward(ctx, mine):
        whole = mine.new_empty(dist.get_world_size() * mine.shape[0], *mine.shape[1:])
        dist.all_gather_into_tensor(whole, mine.contiguous())
        return whole

    @staticmethod
    def backward(ctx, gradient):
        mine = gradient.new_empty(len(gradient) // dist.get_world_size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.contiguous())
        return mine


def gathered(q, k, v):
    """Causal attention of (batch, heads, rows, head_dim) tensors that context_parallel has dealt out:
    of twice as many pieces as processes the first and the last, the second and the last but one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    rows = q.shape[1] // 2
    both = Gather.apply(torch.stack((k, v))).unflatten(0, (world, 2)).split(rows, 3)
    pieces = [*both[0], *both[1].flip(0)]
    outputs = []
    for part, last in zip(q.split(rows, 1), (rank, 2 * world - 1 - rank)):
        keys, values = torch.cat(pieces[: last + 1], 2)
        outputs.append(fa3.flash_attn_func(part, keys, values, causal=True))
    return torch.cat(outputs, 1).transpose(1, 2)


def by_pytorch(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def make(heads, seqlen):
    torch.manual_seed(7)
    return [
        torch.randn(1, heads, seqlen, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]


def with_gradients(attention, q, k, v, grad_output):
    leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    output = attention(*leaves)
    output.backward(grad_output)
    return [output.detach(), *(t.grad for t in leaves)]


def exact(q, k, v):
    """Attention as the formula is, for float64."""
    scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
    seen = torch.ones(scores.shape[-2:], device=q.device, dtype=torch.bool).tril()
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def check(mesh, ways):
    """Largest errors of output, dQ, dK and dV on one GPU and on all, for each way."""
    tensors = make(2, 2048)
    wanted = with_gradients(exact, *(t.double() for t in tensors))
    errors = {}
    for name, (attention, context, alone) in ways.items():
        with context():
            one = with_gradients(alone, *tensors)
            dealt = [t.clone() for t in tensors]
            with context_parallel(mesh, buffers=dealt, buffer_seq_dims=[2] * 4):
                many = with_gradients(attention, *dealt)
                many = context_parallel_unshard(mesh, many, [2] * 4)
        errors[name] = {
            number: [(a.double() - b).abs().max().item() for a, b in zip(found, wanted)]
            for number, found in (("one", one), ("all", many))
        }
        # Each process's part is rounded, and their sum.
        roundings = dist.get_world_size() + 1
        for of_one, of_all in zip(errors[name]["one"], errors[name]["all"]):
            assert of_all <= roundings * of_one + 1e-5, f"{name}: {errors[name]}"
    return errors


def gpt(mesh, ways):
    """Ten steps of the GPT of train_gpt.py, on one GPU and on all: the losses, and how far the first
    step's gradients are apart, of each parameter's norm."""
    seqlen, steps = 8192, 10
    sizes = {"vocabulary": 8192, "seqlen": seqlen, "layers": 4, "width": 768, "heads": 6}
    text = train_gpt.read_text(1 << 17, sizes["vocabulary"])

    def run(parallel, context):
        torch.manual_seed(1)
        model = train_gpt.GPT(**sizes, attention=train_gpt.heads_first).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
        losses, gradients = [], None
        for step in range(steps):
            row = text[step * seqlen : (step + 1) * seqlen + 1].to("cuda")[None]
            tokens, labels = row[:, :-1].clone(), row[:, 1:].clone()
            positions = torch.arange(seqlen, device="cuda")
            buffers = [tokens, labels, positions]
            dealt = contextlib.nullcontext()
            if parallel:
                dealt = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0])
            with context(), dealt, torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens, positions)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                loss.backward()
            loss = loss.detach()
            if parallel:
                for tensor in (loss, *(p.grad for p in model.parameters())):
                    dist.all_reduce(tensor, dist.ReduceOp.AVG)
            if gradients is None:
                gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, gradients

    def apart(a, b):
        return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b))

    result = {"losses": {}, "gradients apart": {}}
    runs = {}
    for name in BACKENDS:
        for number, parallel in (("one", False), ("all", True)):
            runs[name, number] = run(parallel, ways[name][1])
            result["losses"][f"{name}, {number}"] = runs[name, number][0]
    pairs = [(("libfa3", "all"), ("libfa3", "one")), (("cuDNN", "all"), ("cuDNN", "one"))]
    pairs.append((("libfa3", "one"), ("cuDNN", "one")))
    for a, b in pairs:
        label = f"{', '.join(a)} - {', '.join(b)}"
        result["gradients apart"][label] = apart(runs[a][1], runs[b][1])
    return result


def milliseconds(function, dealt):
    """Of one call, from a start in common to the end of the last process."""
    torch.cuda.synchronize()
    if dealt:
        dist.barrier()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    taken = torch.tensor(time.perf_counter() - start, device="cuda")
    if dealt:
        dist.all_reduce(taken, dist.ReduceOp.MAX)
    return 1e3 * taken.item()


def timings(mesh, ways, heads, seqlen, rounds):
    """Milliseconds of forward, and of forward and backward: on one GPU and on all."""
    tensors = make(heads, seqlen)
    dealt = [t.clone() for t in tensors]
    with context_parallel(mesh, buffers=dealt, buffer_seq_dims=[2] * 4):
        dealt = [t.clone() for t in dealt]
    calls = {}
    for name, (attention, context, alone) in ways.items():
        for number, function, own in (("one", alone, tensors), ("all", attention, dealt)):

            def call(backward, function=function, own=own, context=context, number=number):
                inner = contextlib.nullcontext()
                if number == "all":  # all that it has to deal out is dealt out already
                    nothing = torch.zeros(1, 2 * dist.get_world_size(), device="cuda")
                    inner = context_parallel(mesh, buffers=[nothing], buffer_seq_dims=[1])

                def run():
                    leaves = [t.detach().requires_grad_(backward) for t in own[:3]]
                    output = function(*leaves)
                    if backward:
                        output.backward(own[3])

                with context(), inner:
                    run()
                    return milliseconds(run, number == "all")

            calls[name, number] = call
    found = {}
    order = random.Random(3)
    for backward in (False, True):
        times = {key: [] for key in calls}
        for _ in range(rounds):
            for key in order.sample(list(calls), len(calls)):
                times[key].append(calls[key](backward))
        for name in ways:
            one, many = (statistics.median(times[name, number]) for number in ("one", "all"))
            found.setdefault(name, {})["both" if backward else "forward"] = {
                "one": rounded(one),
                "all": rounded(many),
                "efficiency": rounded(one / many / dist.get_world_size()),
            }
    return {"heads": heads, "seqlen": seqlen, "milliseconds": found}


def rounded(number):
    return float(f"{number:.4g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[16384, 32768, 65536, 131072])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the results")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    activate_flash_attention_impl("FA3")

    def chosen(name, rotate):
        set_rotate_method(rotate)
        return sdpa_kernel(BACKENDS[name])

    ways = {
        name: (by_pytorch, functools.partial(chosen, name, "alltoall"), by_pytorch)
        for name in BACKENDS
    }
    ways["libfa3, keys gathered"] = (gathered, ways["libfa3"][1], by_pytorch)
    first = dist.get_rank() == 0
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "devices": [torch.cuda.get_device_name(i) for i in range(dist.get_world_size())],
        "torch": torch.__version__,
        "fa3": fa3.__version__,
        "head_dim": HEAD_DIM,
    }

    def keep(name, value):
        result[name] = value
        if first:
            print(name, json.dumps(value, indent=1), flush=True)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    keep("errors", check(mesh, ways))
    keep("gpt", gpt(mesh, ways))
    keep("attention", [])
    for seqlen in options.seqlens:
        keep(
            "attention",
            [*result["attention"], timings(mesh, ways, options.heads, seqlen, options.rounds)],
        )
    dist.destroy_process_group()


main()
