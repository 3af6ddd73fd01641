#!/usr/bin/env python3
"""Times forward and backward of one decoder layer of Transformers at the sizes of Llama 3 8B and
gpt-oss 20B, random weights, with each kind of attention.

    python3 bench/transformers_layer.py --out transformers-layer.json

Needs a GPU and the packages transformers, fa3 and flash-attn-3 (python/compat). Outputs and gradients
are compared with eager attention's first."""

import argparse
import datetime
import json
import pathlib
import random
import statistics

import fa3
import torch
import transformers

COMMON = {"num_hidden_layers": 1, "vocab_size": 256, "max_position_embeddings": 32768}
MODELS = {
    "Llama 3 8B": (
        transformers.LlamaConfig,
        transformers.LlamaModel,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128},
    ),
    "gpt-oss 20B": (
        transformers.GptOssConfig,
        transformers.GptOssModel,
        {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
        | {"num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 4}
        # All four experts: which ones a token has must not depend on a rounding.
        | {"num_experts_per_tok": 4, "sliding_window": 128, "layer_types": ["sliding_attention"]},
    ),
}
KINDS = ("eager", "sdpa", "flash_attention_3")


def build(name, kind):
    make_config, make_model, sizes = MODELS[name]
    # Transformers lists kernels of its hub for gpt-oss, and would download one of them.
    make_model._compatible_flash_implementations = None
    torch.manual_seed(3)
    with torch.device("cuda"):
        model = make_model(make_config(**COMMON, **sizes, attn_implementation=kind))
    return model.to(torch.bfloat16)


def step(model, x, gradient):
    x = x.detach().requires_grad_()
    output = model(inputs_embeds=x, use_cache=False).last_hidden_state
    output.backward(gradient)
    model.zero_grad()
    return output.detach(), x.grad


def milliseconds(model, x, gradient):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    step(model, x, gradient)
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file for the results")
    options = parser.parse_args()
    result = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "fa3": fa3.__version__,
        "layers": [],
    }
    order = random.Random(3)
    for name in MODELS:
        models = {}
        for kind in KINDS:
            try:
                models[kind] = build(name, kind)
            except ValueError as error:  # Transformers has no such kind for this model
                print(f"{name}: {kind}: {str(error).splitlines()[0]}")
        for seqlen in options.seqlens:
            sizes = 1, seqlen, models["eager"].config.hidden_size
            x, gradient = (
                torch.randn(sizes, device="cuda", dtype=torch.bfloat16) for _ in range(2)
            )
            wanted = step(models["eager"], x, gradient)
            apart = {}
            for kind, model in models.items():
                found = step(model, x, gradient)
                apart[kind] = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted)]
                assert max(apart[kind]) < 0.02, f"{name}, {kind}: {apart[kind]}"
            times = {kind: [] for kind in models}
            for _ in range(options.rounds):
                for kind in order.sample(list(models), len(models)):
                    times[kind].append(milliseconds(models[kind], x, gradient))
            row = {
                "model": name,
                "seqlen": seqlen,
                "milliseconds": {k: round(statistics.median(t), 3) for k, t in times.items()},
                "apart from eager": apart,
            }
            print(json.dumps(row), flush=True)
            result["layers"].append(row)
            if options.out:
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        del models, wanted, found
        torch.cuda.empty_cache()


main()
