"""The official FlashAttention-3's functions of a cache of keys and values, on PyTorch tensors."""

import torch
from torch import Tensor

from fa3 import _core
from fa3.chunks import attention_in_chunks
from fa3.flash_attention import refuse
from fa3.operators import (
    contiguous,
    is_plain,
    names_of,
    need_tensors,
    operator,
    rows_contiguous,
    written,
)
from fa3.options import options_of, sequences


# What is written has no default: PyTorch 2.11 looks for it among the arguments that were given.
APPEND = (
    "(Tensor new_key, Tensor new_value, Tensor(a!) key, Tensor(b!) value, Tensor(c!)? key_scale, "
    "Tensor(d!)? value_scale, Tensor? query=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? positions=None, Tensor? cu_seqlens_q=None, "
    "Tensor? seqused_k=None, Tensor? cache_batch_index=None, Tensor? page_table=None, "
    "SymInt key_scale_rows=0, SymInt value_scale_rows=0, SymInt max_seqlen_q=0, SymInt flags=0) "
    "-> Tensor"
)


WRITTEN = ("key", "value", "key_scale", "value_scale")


def append_kernel(*arguments):
    """Writes new rows into the cache, behind those that it has. Returns the queries, rotated as the
    keys are; an empty tensor where there are none."""
    named = dict(zip(append_names, arguments))
    query = named.get("query")
    rotated_query = None if query is None else torch.empty_like(query)
    _core.append(rotated_query=rotated_query, **named)
    written(*(named.get(name) for name in WRITTEN))
    return named["new_key"].new_empty(0) if rotated_query is None else rotated_query


append_operator = operator("fa3::append", append_kernel, APPEND, WRITTEN)
append_names = names_of(append_operator)


@append_operator.register_fake
def fake_append(new_key, new_value, key, value, key_scale, value_scale, query=None, *options):
    return new_key.new_empty(0) if query is None else torch.empty_like(query)


def chosen(table, index, name, otherwise):
    """The table's rows of these numbers. One that is not there is an error on the CPU; a GPU's are
    not looked at, and it is `otherwise` there, as in fa3.h."""
    there = (index >= 0) & (index < table.shape[0])
    if index.device.type == "cpu" and not torch.compiler.is_compiling() and not there.all():
        raise ValueError(f"{name} has a row that is not there: expected 0 to {table.shape[0] - 1}")
    rows = table[torch.where(there, index, 0).long()]
    return rows.masked_fill(~there[..., None], otherwise)


def rotate(tensor, cos, sin, positions, interleaved):
    """Rotary embedding of (..., heads, head_dim) rows at `positions` (...), in float32."""
    width = 2 * cos.shape[-1]
    if cos.dim() != 2 or sin.shape != cos.shape or not cos.shape[0] or width > tensor.shape[-1]:
        raise ValueError(
            f"rotary_cos and rotary_sin have the shapes {tuple(cos.shape)} and {tuple(sin.shape)}: "
            f"expected (positions, half of at most {tensor.shape[-1]})"
        )
    cos, sin = (
        chosen(table.float(), positions, "rotary_cos", float("nan"))[..., None, :]
        for table in (cos, sin)
    )
    whole = tensor.float()
    turned, rest = whole[..., :width], whole[..., width:]
    if interleaved:
        x, y = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((x * cos - y * sin, x * sin + y * cos), -1).flatten(-2)
    else:
        x, y = turned.chunk(2, -1)
        turned = torch.cat((x * cos - y * sin, x * sin + y * cos), -1)
    if tensor.dtype is torch.float8_e4m3fn:
        turned = turned.clamp(-448, 448)  # the largest code
    return torch.cat((turned, rest), -1).to(tensor.dtype)


def positions_of(rows, first, cu_seqlens, advance):
    """The positions of tensors' rows: (batch, seqlen), or (total) with cu_seqlens; from first[b],
    or all there if they don't advance."""
    if cu_seqlens is None:
        steps = torch.arange(rows.shape[1], dtype=torch.int32, device=rows.device)
        return first[:, None] + (steps if advance else torch.zeros_like(steps))
    total = rows.shape[0]
    lengths = cu_seqlens.diff()
    at = (first - cu_seqlens[:-1] if advance else first).repeat_interleave(
        lengths, output_size=total
    )
    steps = torch.arange(total, dtype=torch.int32, device=rows.device)
    return (at + steps if advance else at).to(torch.int32)


def append(
    q, k_cache, v_cache, k, v, options, cu_seqlens_new, rotary, rotary_seqlens, interleaved, advance
):
    """Appends k and v behind the first options["seqused_k"] rows. Returns q, rotated where that is
    asked for: each row by its own position, or, without `advance`, all by the first new row's."""
    lengths = options["seqused_k"]
    cu_seqlens_q = options["cu_seqlens_q"]
    cos, sin = rotary
    # Rows that are codes go in as they are, under the cache's scales; they are turned here.
    codes = k.dtype is torch.float8_e4m3fn
    # The queries are turned by the same call where they are the new rows' own.
    together = (
        cos is not None
        and advance
        and not codes
        and q.shape[:2] == k.shape[:2]
        and cu_seqlens_q is None
        and cu_seqlens_new is None
    )
    first = lengths if rotary_seqlens is None else rotary_seqlens
    positions = None
    if cos is not None and (codes or rotary_seqlens is not None):
        positions = positions_of(k, first, cu_seqlens_new, True)
    if cos is not None and not together:
        q = rotate(q, cos, sin, positions_of(q, first, cu_seqlens_q, advance), interleaved)
    if cos is not None and codes:
        k = rotate(k, cos, sin, positions, interleaved)
        cos = sin = positions = None
    arguments = (
        k,
        v,
        k_cache,
        v_cache,
        None if codes else options.get("key_scale"),
        None if codes else options.get("value_scale"),
        q if together else None,
        cos,
        sin,
        positions,
        cu_seqlens_new,
        lengths,
        options.get("cache_batch_index"),
        options.get("page_table"),
        0 if codes else options.get("key_scale_rows", 0),
        0 if codes else options.get("value_scale_rows", 0),
        0 if cu_seqlens_new is None else k.shape[0],
        _core.ROTARY_INTERLEAVED if interleaved and cos is not None else 0,
    )
    call = append_kernel if is_plain(q, k, k_cache) else torch.ops.fa3.append
    rotated = call(*arguments)
    return rotated if together else q


def scales_of_pages(scale, cache, page_table, lengths):
    """A scale for each page, (pages, heads), of one for each sequence's head."""
    pages, page_size = cache.shape[:2]
    if lengths is not None:
        # Entries of the table past a sequence's length may be anything.
        first_row = torch.arange(page_table.shape[1], device=cache.device) * page_size
        page_table = page_table.masked_fill(first_row >= lengths[:, None], pages)
    of_pages = scale.new_ones(pages + 1, scale.shape[1])
    # What is no page goes into the row that is left out; the call says that it is none.
    of_pages[page_table.long().clamp(-1, pages)] = scale[:, None]
    return of_pages[:pages]


def place_scales(options, k_cache, v_cache, lengths):
    """The scales of FP8 caches as fa3.h has them: (batch, heads_k) as the official function's, or
    (entries or pages, heads_k, blocks), where a block of an entry's or a page's rows has one."""
    for name, cache in (("key_scale", k_cache), ("value_scale", v_cache)):
        scale = options.get(name)
        if scale is not None and scale.dim() == 3:
            rows, rest = divmod(cache.shape[1], max(scale.shape[2], 1))
            if rest or not rows:
                raise ValueError(
                    f"{name} has {scale.shape[2]} blocks: expected a divisor of the {cache.shape[1]} "
                    "rows of a cache's entry or page"
                )
            options[f"{name}_rows"] = rows
        elif scale is not None and scale.dim() == 2 and "page_table" in options:
            options[name] = scales_of_pages(scale, cache, options["page_table"], lengths)
        elif scale is not None and scale.dim() == 2 and "cache_batch_index" in options:
            # What is no entry goes into the row that is left out; the call says that it is none.
            index, entries = options["cache_batch_index"].long(), cache.shape[0]
            of_entries = scale.new_ones(entries + 1, scale.shape[1])
            of_entries[index.masked_fill((index < 0) | (index > entries), entries)] = scale
            options[name] = of_entries[:entries]


def forward(
    q,
    k,
    v,
    k_new=None,
    v_new=None,
    qv=None,
    out_=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    cu_seqlens_k_new=None,
    seqused_q=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    kv_batch_idx=None,
    leftpad_k=None,
    rotary_cos=None,
    rotary_sin=None,
    seqlens_rotary=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size_left=-1,
    window_size_right=-1,
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=1,
    pack_gqa=None,
    sm_margin=0,
    *,
    s_aux=None,
):
    """All that a forward call can do, with the names and defaults of the official package's private
    `_flash_attn_forward`. Returns (output, lse, empty, empty), where that has its partial results."""
    refuse(qv=qv)
    window, scales = (window_size_left, window_size_right), (q_descale, k_descale, v_descale)
    options = options_of(q, softmax_scale, causal, window, softcap, sm_margin, num_splits, *scales)
    starts = contiguous(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    options |= sequences(**starts, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    if page_table is not None:
        # A cache in pages has no entries but the table's rows.
        if kv_batch_idx is not None:
            page_table = chosen(page_table, kv_batch_idx, "kv_batch_idx", -1)
        options |= contiguous(page_table=page_table)
    elif kv_batch_idx is not None:
        options |= contiguous(cache_batch_index=kv_batch_idx)
    if leftpad_k is not None:
        options |= contiguous(leftpad_k=leftpad_k)
    if k_new is None and (v_new is not None or rotary_cos is not None):
        raise ValueError("v or rotary_cos is given: k, the new rows, is needed too")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin: expected both or neither")
    rotary = contiguous(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    with torch.no_grad():
        lengths = starts["seqused_k"]
        if k_new is not None:
            if v_new is None or lengths is None:
                raise ValueError("k, new rows, is given: v and cache_seqlens are needed too")
            lengths = lengths + (
                k_new.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
            )
        place_scales(options, k, v, lengths)
        if k_new is not None:
            q = append(
                q,
                k,
                v,
                k_new,
                v_new,
                options,
                contiguous(cu_seqlens_k_new=cu_seqlens_k_new)["cu_seqlens_k_new"],
                tuple(rotary.values()),
                seqlens_rotary,
                rotary_interleaved,
                # Without a mask all queries are at the first new row's position.
                bool(options["flags"] & (_core.CAUSAL | _core.WINDOW) or attention_chunk),
            )
            options["seqused_k"] = lengths
    output, lse = attention_in_chunks(
        q, k, v, s_aux, options, attention_chunk, output=out_, cache=True
    )
    return output, lse, lse.new_empty(0), lse.new_empty(0)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
    *,
    s_aux=None,
    out=None,
):
    """Attention of a few new queries with a cache of keys and values; no gradient.

    q is (batch, seqlen_q, heads, head_dim), or (total_q, heads, head_dim) with cu_seqlens_q and
    max_seqlen_q; k_cache and v_cache are (batch_cache, seqlen_cache, heads_k, ...). cache_seqlens,
    an int or int32 (batch), says how many rows of the cache count; cache_batch_idx, int32 (batch),
    which entry of the cache each sequence has; cache_leftpad, int32 (batch), the first row that
    counts. With page_table, int32 (batch, pages of a sequence), the caches are (pages, page_size,
    heads_k, ...), and row r of a sequence is in its page r / page_size.

    With k and v, (batch, seqlen_new, heads_k, ...), or (total_new, heads_k, ...) with
    cu_seqlens_k_new, these rows are first written into the cache behind cache_seqlens' ones. With
    rotary_cos and rotary_sin, (positions, rotary_dim / 2), they are rotated by their positions,
    which begin at rotary_seqlens or else at cache_seqlens; and so are the queries, row by row with a
    causal mask or a window, all at the first position without.

    The caches may be float8_e4m3fn under queries of 16 bits, or of their own dtype. k_descale and
    v_descale, float32, are what their codes are multiplied with: (batch, heads_k), or, one for
    each block of an entry's or a page's rows, (entries or pages, heads_k, blocks). New rows of 16
    bits become codes under these scales; where each row has one, it is computed and written.

    Returns the output; with return_softmax_lse (output, lse, empty, empty), where the official
    function has its partial results."""
    need_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if k_cache.dim() and v_cache.dim() and (k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1):
        raise ValueError("k_cache and v_cache must be contiguous in their last dimension")
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full(
            (batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device
        )
    with torch.no_grad():
        results = forward(
            q,
            k_cache,
            v_cache,
            k,
            v,
            qv,
            out,
            cu_seqlens_q,
            None,
            cu_seqlens_k_new,
            None,
            cache_seqlens,
            max_seqlen_q,
            None,
            page_table,
            cache_batch_idx,
            cache_leftpad,
            rotary_cos,
            rotary_sin,
            rotary_seqlens,
            q_descale,
            k_descale,
            v_descale,
            softmax_scale,
            causal,
            *window_size,
            attention_chunk,
            softcap,
            rotary_interleaved,
            scheduler_metadata,
            num_splits,
            pack_gqa,
            sm_margin,
            s_aux=s_aux,
        )
    return results if return_softmax_lse else results[0]


def combine_results(out_partial, out_dtype):
    """New tensors for the output and the lse of flash_attn_combine."""
    batch, seqlen, heads, head_dim = out_partial.shape[1:]
    out = out_partial.new_empty(
        (batch, seqlen, heads, head_dim), dtype=out_dtype or out_partial.dtype
    )
    return out, out_partial.new_empty((batch, heads, seqlen), dtype=torch.float32).transpose(1, 2)


def combine_kernel(out_partial, lse_partial, out_dtype=None, out=None):
    found, lse = combine_results(out_partial, out_dtype)
    if out is not None:
        need_tensors(out=out)
        found = out
    _core.combine(
        partial_output=rows_contiguous(out_partial).flatten(0, 1),
        partial_lse=lse_partial.transpose(-1, -2).contiguous().flatten(0, 1),
        output=found,
        lse=lse.transpose(1, 2),
    )
    written(out)
    return found, lse


combine_operator = operator(
    "fa3::combine",
    combine_kernel,
    "(Tensor out_partial, Tensor lse_partial, ScalarType? out_dtype=None) -> (Tensor, Tensor)",
)


@combine_operator.register_fake
def fake_combine(out_partial, lse_partial, out_dtype=None):
    return combine_results(out_partial, out_dtype)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Attention to several sets of keys -> attention to all of them.

    out_partial is float32, (sets, batch, seqlen, heads, head_dim), lse_partial (sets, batch, seqlen,
    heads). Returns the output, (batch, seqlen, heads, head_dim) in out_dtype (float32), and its lse,
    (batch, seqlen, heads)."""
    need_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() != 5 or lse_partial.dim() != 4:
        raise ValueError(
            f"out_partial and lse_partial have {out_partial.dim()} and {lse_partial.dim()} dimensions: "
            "expected 5 and 4"
        )
    if is_plain(out_partial, lse_partial, lse_partial):
        return combine_kernel(out_partial, lse_partial, out_dtype, out)
    found, lse = torch.ops.fa3.combine(out_partial, lse_partial, out_dtype)
    return (found if out is None else out.copy_(found)), lse


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    cache_leftpad=None,
    page_size=None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """What the official function plans ahead for flash_attn_with_kvcache's scheduler_metadata. A
    call plans for itself here, so the plan is an empty tensor."""
    return cache_seqlens.new_empty(0)
