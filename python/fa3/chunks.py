"""Attention in chunks (attention_chunk, as Llama 4 has it): a sequence's keys are counted off in chunks,
and a query sees only those of the chunk that its own position is in.

The library has no such mask. What it has gives the same: each chunk as a sequence of a packed batch;
or, beside a cache that can't be cut like this, each query as a sequence with keys of its own."""

import torch

from fa3 import _core
from fa3.operators import attention, need_tensors
from fa3.options import integer

MASKS = _core.CAUSAL | _core.WINDOW


def need_chunkable(query, key, value, options, chunk, output, cache) -> bool:
    """Raises for what can be seen of attention_in_chunks' arguments without the library. Returns
    whether each query becomes a sequence."""
    need_tensors(q=query, k=key, v=value)
    if output is not None:
        need_tensors(out=output)
        shape = (*query.shape[:-1], *value.shape[-1:])
        if output.shape != shape:
            raise ValueError(f"out has the shape {tuple(output.shape)}: expected {shape}")
    if not chunk:
        return False
    if integer("attention_chunk", chunk) < 0:
        raise ValueError(f"attention_chunk is {chunk}: expected 0 or more")
    dims = (3 if options.get("cu_seqlens_q") is not None else 4), key.dim()
    if query.dim() != dims[0] or dims[1] not in (3, 4) or value.dim() != dims[1]:
        raise ValueError(
            f"q, k and v have {query.dim()}, {key.dim()} and {value.dim()} dimensions: expected 4, or "
            "3 where they are packed"
        )
    whole = any(name in options for name in ("page_table", "cache_batch_index", "leftpad_k"))
    each_query = whole or (cache and query.dim() == 4 and query.shape[1] == 1)
    blocks = ("query",) if each_query else ("query", "key", "value")
    if any(f"{name}_scale_rows" in options for name in blocks):
        raise NotImplementedError("attention_chunk with scales of blocks of rows is not supported")
    if each_query and options.get("cu_seqlens_k") is not None:
        raise ValueError("attention_chunk with padding: expected a cache, but cu_seqlens_k is given")
    return each_query


def attention_in_chunks(
    query, key, value, sink, options, chunk, *, output=None, with_lse=True, cache=False
):
    """fa3.operators.attention, in chunks of so many keys where `chunk` is not 0. `cache` says that
    there is no gradient, and that keys should stay where they are."""
    if not chunk:
        return attention(query, key, value, sink, options, output=output, with_lse=with_lse)
    each_query = need_chunkable(query, key, value, options, chunk, output, cache)
    starts, dense, options = options.get("cu_seqlens_q"), query.dim() == 4, dict(options)
    if each_query:
        rows = cut_queries(query, key, options, chunk)
    else:
        rows, key, value = cut_chunks(query, key, value, options, chunk)
    # Where each query is a sequence, those behind the last one's are too, and would be written.
    behind = output is not None and each_query and starts is not None
    place = None
    if output is not None:
        place = output.clone() if behind else output.contiguous()
        place = place.view(*rows.shape[:-1], output.shape[-1])
    found, lse = attention(rows, key, value, sink, options, output=place, with_lse=with_lse)
    if output is None:
        output = found.reshape(*query.shape[:-1], found.shape[-1])
    elif behind:
        row = torch.arange(output.shape[0], dtype=torch.int32, device=output.device)
        output.copy_(torch.where((row < starts[-1])[:, None, None], place[:, 0], output))
    elif not output.is_contiguous():
        output.copy_(place.view(output.shape))
    if lse is not None and each_query:
        lse = lse[..., 0].T
    if lse is not None and dense:
        lse = lse.unflatten(1, query.shape[:2]).transpose(0, 1)
    return output, lse if lse is None else lse.contiguous()


def sequences_of(tensor, starts, used):
    """Of each sequence the first row, how many it has, and how many of these count."""
    if starts is None:
        batch, rows = tensor.shape[:2]
        first = torch.arange(batch, dtype=torch.int32, device=tensor.device) * rows
        rows = torch.full_like(first, rows)
    else:
        first, rows = starts[:-1], starts.diff()
    return first, rows, rows if used is None else used


def cut_chunks(query, key, value, options, chunk):
    """Query, key and value as packed sequences, the chunks, which `options` then are for."""
    starts = [options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    used = [options.pop(name, None) for name in ("seqused_q", "seqused_k")]
    (first_q, rows_q, used_q), (first_k, rows_k, used_k) = (
        sequences_of(*side) for side in zip((query, key), starts, used)
    )
    if first_q.shape != first_k.shape:
        raise ValueError(f"q has {len(first_q)} sequences and k {len(first_k)}: expected as many")
    most_q, most_k = (
        tensor.shape[1] if start is None else options.get(name) or tensor.shape[0]
        for tensor, start, name in zip((query, key), starts, ("max_seqlen_q", "max_seqlen_k"))
    )
    chunk = min(chunk, max(most_k, 1))
    ends = torch.arange(-(-most_k // chunk) + 1, dtype=torch.int32, device=key.device) * chunk
    # First come queries before all keys. The query at position p is row p - (used_k - used_q).
    ends_q = torch.minimum((ends - (used_k - used_q)[:, None]).clamp(min=0), used_q[:, None])
    ends_k = torch.minimum(ends, used_k[:, None])
    all_count = used[0] is None and used[1] is None
    if not all_count:
        ends_q = torch.cat((ends_q, rows_q[:, None]), 1)
        ends_k = torch.cat((ends_k, rows_k[:, None]), 1)
    for side, first, inner in (("q", first_q, ends_q), ("k", first_k, ends_k)):
        starts_of_chunks = torch.nn.functional.pad((first[:, None] + inner).flatten(), (1, 0))
        options[f"cu_seqlens_{side}"] = starts_of_chunks
        if not all_count:
            used_of_chunks = torch.nn.functional.pad(inner.diff(dim=1)[:, :-1], (0, 1))
            options[f"seqused_{side}"] = torch.cat((inner[:, :1], used_of_chunks), 1).flatten()
    # No queries before all keys.
    none_before = all_count and query.dim() == key.dim() == 4 and most_q <= most_k
    options["max_seqlen_q"] = min(chunk, most_q) if none_before else most_q
    options["max_seqlen_k"] = chunk if used[1] is None else most_k
    for name in ("query_scale", "key_scale", "value_scale"):
        scale = options.get(name)
        if scale is not None and scale.dim() == 2:
            options[name] = scale.repeat_interleave(ends_q.shape[1], 0)
    return tuple(t if t.dim() == 3 else t.flatten(0, 1) for t in (query, key, value))


def cut_queries(query, key, options, chunk):
    """Each query as a sequence of one, (rows, 1, heads, head_dim), which `options` then are for: its
    mask becomes the first and the last key that counts."""
    starts, used = options.pop("cu_seqlens_q", None), options.pop("seqused_q", None)
    options.pop("cu_seqlens_k", None)
    options.pop("max_seqlen_q", None)
    first, rows, used = sequences_of(query, starts, used)
    flat = query if starts is not None else query.flatten(0, 1)
    row = torch.arange(flat.shape[0], dtype=torch.int32, device=query.device)
    # Rows behind the last sequence's become rows of that which don't count.
    sequence = torch.searchsorted(first + rows, row, right=True).clamp(max=len(first) - 1)
    row = row - first[sequence]

    table, padding = options.get("page_table"), options.get("leftpad_k")
    pages = 1 if table is None else table.shape[1]
    lengths = options.get("seqused_k")
    if lengths is None:
        lengths = torch.full_like(first, pages * key.shape[1])
    padding = torch.zeros_like(first) if padding is None else padding
    length = (lengths - padding)[sequence]
    position = row + length - used[sequence]

    left, right = options.pop("window_left", -1), options.pop("window_right", -1)
    if options["flags"] & _core.CAUSAL:
        right = 0
    options["flags"] &= ~MASKS
    chunk = min(chunk, max(pages * key.shape[1], 1))
    begin = position.div(chunk, rounding_mode="floor") * chunk
    end = torch.minimum(begin + chunk, length)
    if left >= 0:
        begin = torch.maximum(begin, position - left)
    if right >= 0:
        end = torch.minimum(end, position + right + 1)
    begin = begin.clamp(min=0)
    end = torch.where(row < used[sequence], torch.maximum(begin, end), begin)
    begin, end = (torch.minimum(t, length) for t in (begin, end))
    options["leftpad_k"] = (padding[sequence] + begin).int()
    options["seqused_k"] = (padding[sequence] + end).int()

    if table is not None:
        options["page_table"] = table[sequence]
    elif starts is not None or query.shape[1] != 1 or "cache_batch_index" in options:
        index = options.get("cache_batch_index")
        options["cache_batch_index"] = sequence.int() if index is None else index[sequence]
    scale = options.get("query_scale")
    if scale is not None and scale.dim() == 2:
        options["query_scale"] = scale[sequence]
    return flat[:, None]
