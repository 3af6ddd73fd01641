"""fa3.quantize: codes and scales by PyTorch's own conversion, and attention of them."""

import re

import fa3
import pytest
import reference
import torch


def expected(x, largest):
    """PyTorch rounds to the nearest code too; below 448 neither saturates."""
    # By a tensor: PyTorch multiplies with the inverse of a number on a GPU.
    scale = (largest / torch.full_like(largest, 448)).clamp(min=2.0**-126)
    return (x / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, 0, 1, 16])
def test_codes(device, dtype, rows):
    x = torch.randn(2, 37, 3, 48, device=device).to(dtype)
    codes, scale = fa3.quantize(x, rows)
    wide, largest = x.float(), x.float().abs().amax(-1)  # (batch, seqlen, heads)
    if rows is None:
        wanted, wanted_scale = expected(wide, largest.max())
        wanted_scale = wanted_scale[None]
    elif rows == 0:
        wanted, spread = expected(wide, largest.amax(1)[:, None, :, None])
        wanted_scale = spread[:, 0, :, 0]
    else:
        blocks = [part.amax(1, keepdim=True).expand_as(part) for part in largest.split(rows, 1)]
        wanted, spread = expected(wide, torch.cat(blocks, 1)[..., None])
        wanted_scale = spread[:, ::rows, :, 0].transpose(1, 2)
    assert codes.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


def test_engines_give_the_same(device):
    starts = torch.tensor([0, 200, 200, 555], dtype=torch.int32)
    angle = torch.rand(400, 24) * 6
    dtypes = torch.float32, torch.float16, torch.bfloat16
    for dtype, tables in [(dtype, tables) for dtype in dtypes for tables in (dtype, torch.float32)]:
        x = torch.randn(600, 3, 80).to(dtype)
        turn = {"rotary_cos": angle.cos().to(tables), "rotary_sin": angle.sin().to(tables)}
        options = {"cu_seqlens": starts, **turn}
        there = {name: tensor.to(device) for name, tensor in options.items()}
        for rows in None, 0, 1, 64, 300:
            codes, scale = fa3.quantize(x, rows, rotate=True, seed=7, **options)
            other, other_scale = fa3.quantize(x.to(device), rows, rotate=True, seed=7, **there)
            assert torch.equal(codes.view(torch.uint8), other.view(torch.uint8).cpu())
            assert torch.equal(scale, other_scale.cpu())


@pytest.mark.parametrize("packed", [False, True])
def test_attention_with_scales_of_blocks(device, packed):
    """What quantize makes, of other numbers of rows for queries than for keys, attention takes."""
    rows, starts = (16, 32, 0), torch.tensor([0, 50, 130], dtype=torch.int32, device=device)
    tensors = [torch.randn(130, heads, 64, device=device) for heads in (4, 2, 2)]
    tensors = [t * torch.linspace(0.1, 2, 130, device=device)[:, None, None] for t in tensors]
    parts = [slice(0, 50), slice(50, 130)] if packed else [slice(0, 130)]
    if packed:
        lengths = {"cu_seqlens": starts, "max_seqlen": 80}
        (q, k, v), scales = zip(*(fa3.quantize(t, n, **lengths) for t, n in zip(tensors, rows)))
        output = fa3.flash_attn_varlen_func(
            q, k, v, starts, starts, 80, 80, None, None, None, True, None, *scales, scale_rows=rows
        )
    else:
        (q, k, v), scales = zip(*(fa3.quantize(t[None], n) for t, n in zip(tensors, rows)))
        output = fa3.flash_attn_func(q, k, v, None, True, None, *scales, scale_rows=rows)[0]
    for part in parts:
        # Each sequence has blocks of its own, so alone it has the same codes and scales.
        wide = []
        for t, n in zip(tensors, rows):
            codes, scale = fa3.quantize(t[None, part], n)
            length = codes.shape[1]
            spread = scale.repeat_interleave(n, 2) if n else scale[..., None].expand(-1, -1, length)
            wide.append(codes.double() * spread[..., :length].transpose(1, 2)[..., None])
        exact, _ = reference.attention(*wide, causal=True)
        # Probabilities are E4M3 on a GPU; the output is bfloat16.
        bound = (2**-4 if device == "cuda" else 2**-8) * wide[2].abs().max()
        assert (output[part] - exact[0]).abs().max() <= bound


def test_scales_of_blocks_are_refused():
    x = torch.randn(1, 40, 2, 64)
    codes, scale = fa3.quantize(x, 16)
    with pytest.raises(NotImplementedError, match="blocks"):
        fa3.flash_attn_func(codes, codes, codes, attention_chunk=8, q_descale=scale, scale_rows=16)
    with pytest.raises(ValueError, match="query_scale_rows"):
        fa3.flash_attn_func(codes, codes, codes, q_descale=scale, scale_rows=-1)


@pytest.mark.parametrize("given, rows, text", [
    ((), 16, "q_descale, k_descale or v_descale"),
    ((), (0, 0, 16), "v_descale"),
    (("q_descale",), (16, 16, 0), "k_descale"),
    (("q_descale",), (16, 16), "an integer or three"),
    ((), (16, 16), "an integer or three"),
    ((), (), "an integer or three"),
])  # fmt: skip
def test_scale_rows_need_scales(given, rows, text):
    """Rows that no scale is for are not left out silently."""
    codes, scale = fa3.quantize(torch.randn(1, 40, 2, 64), 16)
    scales = dict.fromkeys(given, scale)
    start = re.escape(f"scale_rows is {rows}: expected ")
    with pytest.raises(ValueError, match=f"{start}.*{text}"):
        fa3.flash_attn_func(codes, codes, codes, scale_rows=rows, **scales)


def test_scale_rows_is_a_number():
    with pytest.raises(TypeError, match="scale_rows"):
        fa3.quantize(torch.ones(1, 4, 1, 16), 2.5)


def test_attention(device):
    """Rotated queries and keys give what they gave, with less error than without where there are
    outliers."""
    q, k, v = (torch.randn(1, 200, 4, 64, device=device) for _ in range(3))
    for x in q, k:
        x[torch.rand_like(x) < 0.002] *= 20
    exact, _ = reference.attention(q, k, v)
    errors = []
    for options in {}, {"rotate": True, "seed": 3}:
        query, key = fa3.quantize(q, **options), fa3.quantize(k, **options)
        value = fa3.quantize(v)
        output = fa3.flash_attn_func(
            query[0], key[0], value[0], q_descale=query[1], k_descale=key[1], v_descale=value[1]
        )
        errors.append((output.float() - exact).square().mean().sqrt())
    assert errors[1] < 0.95 * errors[0] < 0.1


def test_mean_of_keys_does_not_count(device):
    k = torch.randn(2, 50, 2, 32, device=device)
    shift = 8 * torch.randn(2, 1, 2, 32, device=device)
    codes, scale = fa3.quantize(k + shift, subtract_mean=True)
    plain, plain_scale = fa3.quantize(k, subtract_mean=True)
    values = codes.float() * scale[:, None, :, None]
    # The mean is rounded, of numbers up to 40: what is near the middle of two codes may be either.
    difference = (values - plain.float() * plain_scale[:, None, :, None]).abs()
    assert (difference <= values.abs() / 8 + 2**-9 * scale.max()).all()
    assert (difference < 1e-4).float().mean() > 0.99


def test_packed_and_rotary(device):
    x = torch.randn(60, 2, 32, device=device)
    starts = torch.tensor([0, 20, 20, 55], dtype=torch.int32, device=device)
    angle = torch.rand(64, 16, device=device) * 6
    rotary = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    codes, scale = fa3.quantize(x, 8, cu_seqlens=starts, max_seqlen=35, **rotary)
    assert scale.shape == (2, 60 // 8 + 3)
    first, first_scale = fa3.quantize(x[None, 20:55], 8, **rotary)
    assert torch.equal(codes[20:55].view(torch.uint8), first[0].view(torch.uint8))
    at = 20 // 8 + 2  # of the third sequence
    assert torch.equal(scale[:, at : at + 5], first_scale[0])
    assert not codes[55:].float().any()


def test_refusals(device):
    x = torch.randn(1, 4, 2, 16, device=device)
    with pytest.raises(ValueError, match="seed is 3"):
        fa3.quantize(x, seed=3)
    with pytest.raises(ValueError, match="seed is -1"):
        fa3.quantize(x, rotate=True, seed=-1)
    with pytest.raises(TypeError, match="seed is 0.5"):
        fa3.quantize(x, rotate=True, seed=0.5)
    with pytest.raises(OverflowError, match=f"codes_scale_rows is {2**70}"):
        fa3.quantize(x, 2**70)
    with pytest.raises(ValueError, match="dimensions"):
        fa3.quantize(x[0])
    with pytest.raises(ValueError, match="cu_seqlens is empty"):
        fa3.quantize(x[0], cu_seqlens=torch.zeros(0, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match="codes_scale_rows is -1"):
        fa3.quantize(x, -1)
    with pytest.raises(TypeError, match="FA3_FLOAT8_E4M3"):
        fa3.quantize(fa3.quantize(x)[0])
    with pytest.raises(TypeError):
        fa3.quantize(x.double())
