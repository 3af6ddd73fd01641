"""Random models from Transformers, with attn_implementation="flash_attention_3": small ones, and two
layers of Llama 3 8B's and gpt-oss 20B's sizes."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Each token has all experts: which ones it has must not depend on a rounding.
SIZES = {
    "llama": SMALL,
    "gpt-oss": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 32},
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "gpt-oss-20b": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
}


def model_of(name, attention):
    common = {
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "attn_implementation": attention,
    }
    if name.startswith("gpt-oss"):
        config = transformers.GptOssConfig(**SIZES[name], **common)
        kind = transformers.GptOssForCausalLM
        # Transformers lists kernels of its hub for this model, and would download one of them.
        transformers.models.gpt_oss.modeling_gpt_oss.GptOssPreTrainedModel._compatible_flash_implementations = None
    else:
        config = transformers.LlamaConfig(**SIZES[name], **common)
        kind = transformers.LlamaForCausalLM
    torch.manual_seed(3)
    with torch.device("cuda"):
        model = kind(config).to(torch.bfloat16).eval()
    spread = 0.8 / config.hidden_size**0.5
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=spread) if parameter.dim() > 1 else None
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "sinks"):
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model


@pytest.mark.parametrize("name", SIZES)
def test_model(name):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    eager, ours = (model_of(name, attention) for attention in ("eager", "flash_attention_3"))
    assert ours.config._attn_implementation == "flash_attention_3"
    ours.load_state_dict(eager.state_dict())
    exact = model_of(name, "eager").float()
    exact.load_state_dict(eager.state_dict())
    tokens = torch.randint(0, 512, (2, 1000 if eager.config.hidden_size > 1000 else 130), device="cuda")
    with torch.no_grad():
        wanted = exact(tokens).logits
        error = (ours(tokens).logits - wanted).abs().max()
        allowed = (eager(tokens).logits - wanted).abs().max()
    assert error <= 2 * allowed, f"logits: error {error}, eager's {allowed}"

    # A batch with padding on the left goes through the varlen function.
    mask = torch.ones_like(tokens)
    mask[0, :50] = 0
    with torch.no_grad():
        wanted = exact(tokens, attention_mask=mask).logits[mask.bool()]
        error = (ours(tokens, attention_mask=mask).logits[mask.bool()] - wanted).abs().max()
        allowed = (eager(tokens, attention_mask=mask).logits[mask.bool()] - wanted).abs().max()
    assert error <= 2 * allowed, f"padded logits: error {error}, eager's {allowed}"


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_text(name, cache):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    eager, ours = (model_of(name, attention) for attention in ("eager", "flash_attention_3"))
    ours.load_state_dict(eager.state_dict())
    tokens = torch.randint(0, 512, (1, 40), device="cuda")
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": cache, "disable_compile": True}
    with torch.no_grad():
        wanted = eager.generate(tokens, **options)
        found = ours.generate(tokens, **options)
    same = (wanted == found).cumprod(-1).sum().item()
    if same == wanted.numel():
        return
    # Where two logits differ by less than bf16's error either may be the larger one, and the text may
    # part. Ours may err twice as much as eager attention's, as in test_model.
    exact = model_of(name, "eager").float()
    exact.load_state_dict(eager.state_dict())
    with torch.no_grad():
        logits = exact(wanted[:, :same]).logits
        error = (eager(wanted[:, :same]).logits - logits).abs().max()
    gap = (logits[0, -1, wanted[0, same]] - logits[0, -1, found[0, same]]).abs()
    assert gap <= 4 * error, f"at {same}: {gap}, eager's error {error}"


def test_training_step():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    eager, ours = (model_of("llama", attention) for attention in ("eager", "flash_attention_3"))
    ours.load_state_dict(eager.state_dict())
    losses = []
    for model in (eager, ours):
        torch.manual_seed(5)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for _ in range(200):
            tokens = torch.randint(0, 16, (4, 128), device="cuda").cumsum(-1) % 512
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.detach())
        losses.append(torch.stack(curve).float().cpu())
    assert losses[0][-1] < losses[0][0]
    assert (losses[0] - losses[1]).abs().max() <= 0.05 * losses[0][0]
