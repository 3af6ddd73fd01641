"""Queries, keys and values in FP8, on PyTorch tensors."""

import torch
from torch import Tensor

from fa3 import _core
from fa3.operators import contiguous, is_plain, need_tensors, operator, rows_contiguous
from fa3.options import integer

SCHEMA = (
    "(Tensor x, SymInt? scale_rows=0, SymInt flags=0, SymInt seed=0, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? positions=None, Tensor? cu_seqlens=None, "
    "SymInt max_seqlen=0, Tensor? seqused=None) -> (Tensor, Tensor)"
)


def results(x, scale_rows, cu_seqlens):
    """New tensors for the codes, as bytes, and for the scales."""
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
    return x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(shape, dtype=torch.float32)


def kernel(
    x,
    scale_rows=0,
    flags=0,
    seed=0,
    rotary_cos=None,
    rotary_sin=None,
    positions=None,
    cu_seqlens=None,
    max_seqlen=0,
    seqused=None,
):
    codes, scale = results(x, scale_rows, cu_seqlens)
    if cu_seqlens is not None or seqused is not None or not x.numel():  # what no row writes
        codes.zero_()
        scale.fill_(1)
    codes = codes.view(torch.float8_e4m3fn)
    _core.quantize(
        input=rows_contiguous(x.detach()),
        codes=codes,
        codes_scale=scale,
        codes_scale_rows=scale_rows or 0,
        flags=flags,
        seed=seed,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        positions=positions,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=max_seqlen,
        seqused_q=seqused,
    )
    return codes, scale


quantize_operator = operator("fa3::quantize", kernel, SCHEMA)


@quantize_operator.register_fake
def fake_quantize(x, scale_rows=0, flags=0, seed=0, cos=None, sin=None, at=None, starts=None, *_):
    codes, scale = results(x, scale_rows, starts)
    return codes.view(torch.float8_e4m3fn), scale


def quantize(
    x: Tensor,
    scale_rows: int | None = 0,
    *,
    rotate: bool = False,
    seed: int = 0,
    subtract_mean: bool = False,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    positions: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    seqused: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x as float8_e4m3fn codes, and the float32 scales that they are multiplied with.

    x is (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens; of float32,
    float16 or bfloat16. One scale, the largest magnitude divided by 448, is that of a head of a
    sequence, (batch, heads), which flash_attn_func takes as q_descale, k_descale or v_descale; with
    scale_rows above 0 of so many rows of it, (batch, heads, blocks), or (heads, total // scale_rows
    + batch) with cu_seqlens; with scale_rows None of all of x, (1,).

    rotate spreads outliers over a head by random signs and a Hadamard transform: for queries and
    keys alike, with one seed, as their scores do not change then. subtract_mean takes each head's
    mean off, for keys: softmax does not see it, but the lse, a softcap and a sink do. rotary_cos
    and rotary_sin, (positions, rotary_dim / 2), turn rows first, at their index or at `positions`;
    with rotate what is turned is rounded to x's dtype.

    max_seqlen is the longest of packed sequences, 0 if that is not known. Rows past seqused are 0,
    and so are codes of no sequence; scales of no row are 1. No gradient."""
    need_tensors(x=x)
    tensors = contiguous(
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        positions=positions,
        cu_seqlens=cu_seqlens,
        seqused=seqused,
    )
    packed = cu_seqlens is not None
    if x.dim() != (3 if packed else 4) or (packed and cu_seqlens.dim() != 1):
        raise ValueError(
            f"x has {x.dim()} dimensions: expected 4, or 3 with cu_seqlens, which has one"
        )
    if packed and not cu_seqlens.shape[0]:
        raise ValueError("cu_seqlens is empty: expected batch + 1 numbers")
    if scale_rows is not None and not isinstance(scale_rows, int):
        raise TypeError(f"scale_rows is {scale_rows!r}: expected an integer or None")
    seed = integer("seed", seed)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}: expected 0 to 2**64 - 1")
    flags = _core.ROTATE if rotate else 0
    flags |= _core.SUBTRACT_MEAN if subtract_mean else 0
    flags |= _core.ROTARY_INTERLEAVED if rotary_interleaved else 0
    call = kernel if is_plain(x, x, x) else torch.ops.fa3.quantize
    return call(
        x,
        scale_rows,
        flags,
        seed - 2**64 if seed >= 2**63 else seed,  # the same bits
        max_seqlen=max_seqlen or (x.shape[0] if packed else 0),
        **tensors,
    )
