"""Queries, keys and values in FP8, on PyTorch tensors."""

import torch

from fa3 import _core


def quantize(
    x,
    scale_rows=0,
    *,
    rotate=False,
    seed=0,
    subtract_mean=False,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=False,
    positions=None,
    cu_seqlens=None,
    max_seqlen=0,
    seqused=None,
):
    """x as float8_e4m3fn codes, and the float32 scales that they are multiplied with.

    x is (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens; of float32,
    float16 or bfloat16. One scale, the largest magnitude divided by 448, is that of a head of a
    sequence, (batch, heads), which flash_attn_func takes as q_descale, k_descale or v_descale; with
    scale_rows above 0 of so many rows of it, (batch, heads, blocks), or (heads, total // scale_rows
    + batch) with cu_seqlens; with scale_rows None of all of x, (1,).

    rotate spreads outliers over a head by random signs and a Hadamard transform: for queries and
    keys alike, with one seed, as their scores do not change then. subtract_mean takes each head's
    mean off, for keys: softmax does not see it, but the lse, a softcap and a sink do. rotary_cos
    and rotary_sin, (positions, rotary_dim / 2), turn rows first, at their index or at `positions`.

    max_seqlen is the longest of packed sequences, 0 if that is not known. Rows past seqused are 0,
    and so are codes of no sequence; scales of no row are 1. No gradient."""
    packed = cu_seqlens is not None
    heads = x.shape[-2]
    batch = cu_seqlens.shape[0] - 1 if packed else x.shape[0]
    rows = x.shape[0 if packed else 1]
    if scale_rows is None:
        shape = (1,)
    elif scale_rows <= 0:
        shape = (batch, heads)
    elif packed:
        shape = (heads, rows // scale_rows + batch)
    else:
        shape = (batch, heads, -(-rows // scale_rows))
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if packed or seqused is not None or not x.numel():  # what no row writes
        codes.zero_()
        scale.fill_(1)
    codes = codes.view(torch.float8_e4m3fn)
    flags = _core.ROTATE if rotate else 0
    flags |= _core.SUBTRACT_MEAN if subtract_mean else 0
    flags |= _core.ROTARY_INTERLEAVED if rotary_interleaved else 0
    _core.quantize(
        input=x.detach(),
        codes=codes,
        codes_scale=scale,
        codes_scale_rows=scale_rows or 0,
        flags=flags,
        seed=seed,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        positions=positions,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=max_seqlen or (rows if packed else 0),
        seqused_q=seqused,
    )
    return codes, scale
