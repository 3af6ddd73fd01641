"""New rows for a cache of keys and values: fa3_append as the operator fa3::append, and what the official
flash_attn_with_kvcache asks of it."""

import torch

from fa3 import _core
from fa3.operators import is_plain, names_of, operator, written
from fa3.options import schema

WRITTEN = ("key", "value", "key_scale", "value_scale")


def call_append(query=None, **arguments):
    """Writes new rows into the cache, behind those that it has. Returns the queries, rotated as the
    keys are; an empty tensor where there are none."""
    rotated_query = None if query is None else torch.empty_like(query)
    _core.append(query=query, rotated_query=rotated_query, **arguments)
    written(*(arguments.get(name) for name in WRITTEN))
    return arguments["new_key"].new_empty(0) if rotated_query is None else rotated_query


def append_kernel(*arguments):
    return call_append(**dict(zip(append_names, arguments)))


append_operator = operator("fa3::append", append_kernel, schema("append", 1, WRITTEN), WRITTEN)
append_names = names_of(append_operator)


@append_operator.register_fake
def fake_append(*arguments):
    named = dict(zip(append_names, arguments))
    query = named.get("query")
    return named["new_key"].new_empty(0) if query is None else torch.empty_like(query)


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
    arguments = {"new_key": k, "new_value": v, "key": k_cache, "value": v_cache}
    arguments |= {"key_scale": None, "value_scale": None, "seqused_k": lengths}
    for name in ("key_scale", "value_scale", "key_scale_rows", "value_scale_rows"):
        if name in options and not codes:
            arguments[name] = options[name]
    for name in ("cache_batch_index", "page_table"):
        arguments[name] = options.get(name)
    arguments |= {"rotary_cos": cos, "rotary_sin": sin, "positions": positions}
    if interleaved and cos is not None:
        arguments["flags"] = _core.ROTARY_INTERLEAVED
    if cu_seqlens_new is not None:
        arguments |= {"cu_seqlens_q": cu_seqlens_new, "max_seqlen_q": k.shape[0]}
    call = call_append if is_plain(q, k, k_cache) else torch.ops.fa3.append
    rotated = call(query=q if together else None, **arguments)
    return rotated if together else q
