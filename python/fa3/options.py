"""What a call takes beside its main tensors, by the names of fa3.h's argument structs."""

from fa3 import _core


def options_of(
    query,
    softmax_scale,
    causal,
    window_size,
    softcap,
    sm_margin=0,
    num_splits=0,
    query_scale=None,
    key_scale=None,
    value_scale=None,
) -> dict:
    """The options that every function takes."""
    flags = _core.CAUSAL if causal else 0
    options = {}
    if softmax_scale is not None:
        flags |= _core.SCALE
        options["softmax_scale"] = float(softmax_scale)
    left, right = window_size
    left, right = int(left), int(right)
    if left >= 0 or right >= 0:
        flags |= _core.WINDOW
        options["window_left"] = max(left, -1)
        options["window_right"] = max(right, -1)
    options["flags"] = flags
    if softcap:
        options["softcap"] = softcap
    if sm_margin < 0 or (sm_margin and query.is_cuda):  # the CPU has none to leave free
        options["reserved_multiprocessors"] = sm_margin
    if num_splits:
        options["num_splits"] = num_splits
    if query_scale is not None or key_scale is not None or value_scale is not None:
        scales = {"query_scale": query_scale, "key_scale": key_scale, "value_scale": value_scale}
        options |= scales
    return options


def sequences(
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q=None, max_seqlen_k=None
) -> dict:
    """The options that say where sequences lie. The bounds of packed ones' lengths are ints or
    tensors of one; without them the CPU engine looks."""
    options = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    if cu_seqlens_q is not None and max_seqlen_q is not None:
        options["max_seqlen_q"] = int(max_seqlen_q)
    if cu_seqlens_k is not None and max_seqlen_k is not None:
        options["max_seqlen_k"] = int(max_seqlen_k)
    return options


def lse_shape(query) -> tuple[int, ...]:
    """Of the lse: (batch, heads, seqlen_q), or (heads, total_q) for packed queries."""
    shape = query.shape
    if len(shape) == 4:
        return shape[0], shape[2], shape[1]
    return shape[-2::-1]
