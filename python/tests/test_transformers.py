"""Random models from Transformers, with attn_implementation="flash_attention_3": small ones, and on a
GPU two layers of Llama 3 8B's and gpt-oss 20B's sizes."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def taken_on_the_cpu(device, monkeypatch):
    """Transformers has FlashAttention-3 for GPUs alone, and asks whether there is one."""
    if device == "cpu":
        utilities = transformers.modeling_flash_attention_utils
        monkeypatch.setattr(utilities, "is_flash_attn_3_available", lambda: True)
        matrix = utilities.FLASH_ATTENTION_COMPATIBILITY_MATRIX
        monkeypatch.setitem(matrix[3], "general_availability_check", lambda: True)


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# On a CPU the same models are smaller.
CPU_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
}
# Each token has all experts: which ones it has must not depend on a rounding.
SIZES = {
    "llama": SMALL,
    "gpt-oss": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": 32},
    "mistral": SMALL | {"sliding_window": 24},
    "gemma2": SMALL | {"sliding_window": 24, "attn_logit_softcapping": 5.0},
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


KINDS = {"llama": "Llama", "mistral": "Mistral", "gemma2": "Gemma2", "gpt-oss": "GptOss"}


def model_of(name, attention, device):
    if device == "cpu" and name not in KINDS:
        pytest.skip("sizes for a GPU")
    kind = KINDS[name.removesuffix("-8b").removesuffix("-20b")]
    if kind == "GptOss":
        # Transformers lists kernels of its hub for this model, and would download one of them.
        transformers.models.gpt_oss.modeling_gpt_oss.GptOssPreTrainedModel._compatible_flash_implementations = None
    sizes = SIZES[name] if device == "cuda" else SIZES[name] | CPU_SIZES
    config = getattr(transformers, f"{kind}Config")(
        **sizes,
        vocab_size=512,
        max_position_embeddings=2048,
        attn_implementation=attention,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(3)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    spread = 0.8 / config.hidden_size**0.5
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=spread) if parameter.dim() > 1 else None
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks)
    return model


@pytest.mark.parametrize("name", SIZES)
def test_model(device, name):
    eager, ours = (model_of(name, attention, device) for attention in ("eager", "flash_attention_3"))
    assert ours.config._attn_implementation == "flash_attention_3"
    ours.load_state_dict(eager.state_dict())
    exact = model_of(name, "eager", device).float()
    exact.load_state_dict(eager.state_dict())
    length = 1000 if eager.config.hidden_size > 1000 else 70 if device == "cpu" else 130
    tokens = torch.randint(0, 512, (2, length), device=device)
    # A batch with padding goes through the varlen function.
    for padding in (None, slice(0, 50), slice(-50, None)):
        mask = torch.ones_like(tokens)
        if padding:
            mask[0, padding] = 0
        with torch.no_grad():
            wanted, found, plain = (
                model(tokens, attention_mask=mask).logits[mask.bool()] for model in (exact, ours, eager)
            )
        error, allowed = (found - wanted).abs().max(), (plain - wanted).abs().max()
        assert error <= 2 * allowed, f"padding {padding}: error {error}, eager's {allowed}"
    again = copy.deepcopy(ours)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, ours(tokens).logits)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_text(device, name, cache):
    eager, ours = (model_of(name, attention, device) for attention in ("eager", "flash_attention_3"))
    ours.load_state_dict(eager.state_dict())
    tokens = torch.randint(0, 512, (1, 40), device=device)
    options = {"max_new_tokens": 200 if device == "cuda" else 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": cache, "disable_compile": True}
    with torch.no_grad():
        wanted = eager.generate(tokens, **options)
        found = ours.generate(tokens, **options)
    same = (wanted == found).cumprod(-1).sum().item()
    if same == wanted.numel():
        return
    # Where two logits differ by less than bf16's error either may be the larger one, and the text may
    # part. Ours may err twice as much as eager attention's, as in test_model.
    exact = model_of(name, "eager", device).float()
    exact.load_state_dict(eager.state_dict())
    with torch.no_grad():
        logits = exact(wanted[:, :same]).logits
        error = (eager(wanted[:, :same]).logits - logits).abs().max()
    gap = (logits[0, -1, wanted[0, same]] - logits[0, -1, found[0, same]]).abs()
    assert gap <= 4 * error, f"at {same}: {gap}, eager's error {error}"


def test_training_step(device):
    if device == "cpu":
        pytest.skip("many steps, for a GPU")
    eager, ours = (
        model_of("llama", attention, device) for attention in ("eager", "flash_attention_3")
    )
    ours.load_state_dict(eager.state_dict())
    losses = []
    for model in (eager, ours):
        torch.manual_seed(5)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for _ in range(200):
            tokens = torch.randint(0, 16, (4, 128), device=device).cumsum(-1) % 512
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.detach())
        losses.append(torch.stack(curve).float().cpu())
    assert losses[0][-1] < losses[0][0]
    assert (losses[0] - losses[1]).abs().max() <= 0.05 * losses[0][0]
