"""New rows for a cache of keys and values, and attention with them: fa3_append_forward and fa3_append
as the operators fa3::append_forward and fa3::append, and what the official flash_attn_with_kvcache asks
of them."""

import torch

from fa3 import _core
from fa3.operators import (
    clear_unused,
    contiguous,
    is_plain,
    is_watched,
    names_of,
    need_tensors,
    new_output,
    new_results,
    operator,
    rows_contiguous,
    written,
)
from fa3.options import lse_shape, schema

WRITTEN = ("key", "value", "key_scale", "value_scale")
# What a forward call has too that reads what was appended.
SHARED = (*WRITTEN, "key_scale_rows", "value_scale_rows", "page_table", "cache_batch_index")


def rotated_like(query):
    return None if query is None else torch.empty_like(query)


def call_append(query=None, **arguments):
    """Writes new rows into the cache, behind those that it has. Returns the queries, rotated as the
    keys are; an empty tensor where there are none."""
    rotated_query = rotated_like(query)
    _core.append(query=query, rotated_query=rotated_query, **arguments)
    written(*(arguments.get(name) for name in WRITTEN))
    return arguments["new_key"].new_empty(0) if rotated_query is None else rotated_query


def shared(forward, new_key):
    """Of a forward call's arguments those that the append before it has too. Rows that are codes go
    into the cache as they are, under its scales."""
    codes = new_key.dtype is torch.float8_e4m3fn
    return {
        name: forward[name] for name in SHARED if name in forward and not (codes and "scale" in name)
    }


def call_append_forward(rows, query, key, value, sink, options, *, output=None, with_lse=True):
    """Writes new rows, as rows_to_append has them, into the cache `key` and `value`, and attends.
    Returns (output, lse)."""
    given = output
    output, lse = new_results(query, key, value, output, with_lse, options.get("seqused_q"))
    forward = {**options, "key": key, "value": value, "output": output, "lse": lse, "sink": sink}
    append = {**rows, **shared(forward, rows["new_key"])}
    # As the official call, which promises no order between sequences.
    append["flags"] = (rows.get("flags") or 0) | _core.SEPARATE_SEQUENCES
    forward["query"] = rows_contiguous(query)
    if rows.get("query") is not None:
        append["rotated_query"] = forward["query"] = rotated_like(rows["query"])
    _core.append_forward(append, forward)
    clear_unused(given, options)
    written(*(forward.get(name) for name in WRITTEN))
    return output, lse


def append_kernel(*arguments):
    return call_append(**dict(zip(append_names, arguments)))


append_operator = operator(
    "fa3::append", append_kernel, schema(_core.arguments("append"), 1, WRITTEN), WRITTEN
)
append_names = names_of(append_operator)


@append_operator.register_fake
def fake_append(*arguments):
    named = dict(zip(append_names, arguments))
    query = named.get("query")
    return named["new_key"].new_empty(0) if query is None else torch.empty_like(query)


def append_forward_kernel(*arguments):
    options = dict(zip(append_forward_names, arguments))
    main = [options.pop(name) for name in ("query", "key", "value", "sink")]
    output = options.pop("output")
    mine = [name for name in options if name.startswith("append_")]
    rows = {name.removeprefix("append_"): options.pop(name) for name in mine}
    found, lse = call_append_forward(rows, *main, options, output=output)
    # An operator's results are none of its arguments: an empty one stands for what was given.
    return found if output is None else found.new_empty(0), lse


# A forward call's arguments, and, as append_..., those that only the append has.
OF_APPEND = [
    (f"append_{name}", kind) for name, kind in _core.arguments("append") if name not in SHARED
]
OF_FORWARD = [
    (name, "OPTIONAL_OUTPUT" if name == "output" else kind)
    for name, kind in _core.arguments("forward")
]
append_forward_operator = operator(
    "fa3::append_forward",
    append_forward_kernel,
    schema(OF_APPEND + OF_FORWARD, 2, (*WRITTEN, "output")),
    (*WRITTEN, "output"),
)
append_forward_names = names_of(append_forward_operator)


@append_forward_operator.register_fake
def fake_append_forward(*arguments):
    named = dict(zip(append_forward_names, arguments))
    query, output = named["query"], named["output"]
    return (
        new_output(query, named["value"]) if output is None else output.new_empty(0),
        query.new_empty(lse_shape(query), dtype=torch.float32),
    )


def chosen(table, index, name, otherwise):
    """The table's rows of these numbers. One that is not there is an error on the CPU; a GPU's are
    not looked at, and it is `otherwise` there, as in fa3.h."""
    there = (index >= 0) & (index < table.shape[0])
    if index.device.type == "cpu" and not is_watched() and not there.all():
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
    steps = torch.arange(rows.shape[0], dtype=cu_seqlens.dtype, device=rows.device)
    sequence = torch.searchsorted(cu_seqlens[1:], steps, right=True)
    at = first - cu_seqlens[:-1] if advance else first
    # Rows behind the last sequence's are nobody's; position 0 is one that is there.
    at = torch.nn.functional.pad(at, (0, 1))[sequence]
    steps = steps.masked_fill(sequence == first.shape[0], 0)
    return (at + steps if advance else at).to(torch.int32)


def rows_to_append(
    q,
    k,
    v,
    lengths,
    cu_seqlens_q,
    max_seqlen_q,
    cu_seqlens_new,
    rotary,
    rotary_seqlens,
    interleaved,
    advance,
):
    """What an append of k and v behind `lengths` rows takes beside the cache, by the names of fa3.h, and
    q, where it is not that call which rotates it: each row by its own position, or, without
    `advance`, all by the first new row's."""
    cos, sin = rotary
    k, v = rows_contiguous(k), rows_contiguous(v)
    arguments = {"new_key": k, "new_value": v, "seqused_k": lengths}
    if cu_seqlens_new is not None:
        # A GPU has a block for each row that the longest sequence may have, of every sequence.
        longest = max_seqlen_q if cu_seqlens_new is cu_seqlens_q else None
        arguments |= {"cu_seqlens_q": cu_seqlens_new, "max_seqlen_q": longest or k.shape[0]}
    if cos is None:
        return q, arguments
    # Rows that are codes go in as they are, under the cache's scales; they are turned here.
    codes = k.dtype is torch.float8_e4m3fn
    # The queries are turned by the same call where they are the new rows' own.
    dense = cu_seqlens_q is None
    together = (
        not codes
        and cu_seqlens_q is cu_seqlens_new
        and q.shape[:2 if dense else 1] == k.shape[:2 if dense else 1]
        and (advance or (dense and q.shape[1] == 1))
    )
    first = lengths if rotary_seqlens is None else rotary_seqlens
    positions = None
    if codes or rotary_seqlens is not None:
        positions = positions_of(k, first, cu_seqlens_new, True)
    if not together:
        q = rotate(q, cos, sin, positions_of(q, first, cu_seqlens_q, advance), interleaved)
    if codes:
        arguments["new_key"] = rotate(k, cos, sin, positions, interleaved)
        return q, arguments
    arguments |= {"rotary_cos": cos, "rotary_sin": sin, "positions": positions}
    if together:
        arguments["query"] = rows_contiguous(q)
    if interleaved:
        arguments["flags"] = _core.ROTARY_INTERLEAVED
    return q, arguments


def are_plain(rows, query, key, value) -> bool:
    return is_plain(query, key, value) and is_plain(query, rows["new_key"], rows["new_value"])


def append(rows, query, key, value, options):
    """Appends what rows_to_append has told. Returns the queries, rotated where that is asked for."""
    arguments = {"key_scale": None, "value_scale": None, **rows, "key": key, "value": value}
    arguments |= shared(options, rows["new_key"])
    call = call_append if are_plain(rows, query, key, value) else torch.ops.fa3.append
    rotated = call(**arguments)
    return rotated if "query" in rows else query


def append_forward(rows, query, key, value, sink, options, *, output=None, with_lse=True):
    """Appends, and attends, as `attention` does: (output, lse), without a gradient."""
    if sink is not None:
        sink = contiguous(s_aux=sink)["s_aux"]
    if output is not None:
        need_tensors(out=output)
    if are_plain(rows, query, key, value):
        found = call_append_forward(
            rows, query, key, value, sink, options, output=output, with_lse=with_lse
        )
        written(output)
        return found
    arguments = {"key_scale": None, "value_scale": None, **options}
    arguments |= {f"append_{name}": argument for name, argument in rows.items()}
    found, lse = torch.ops.fa3.append_forward(
        query=query, key=key, value=value, output=output, sink=sink, **arguments
    )
    return (found if output is None else output), lse
