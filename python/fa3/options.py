"""What a call takes beside its main tensors, by the names of fa3.h's argument structs."""

from fa3 import _core


def schema(fields, results, written=()) -> str:
    """A PyTorch operator's, for calls with these fields, by their names in fa3.h: first the tensors
    that it needs, then those that it writes of its own arguments, then what has a default. Other
    outputs are its results. What is written has no default: PyTorch 2.11 looks for it among the
    arguments that were given."""
    needed, changed, others = [], [], []
    for name, kind in fields:
        if name in written:
            mark = "?" if kind.startswith("OPTIONAL") else ""
            changed.append(f"Tensor({chr(ord('a') + len(changed))}!){mark} {name}")
        elif kind == "INPUT":
            needed.append(f"Tensor {name}")
        elif kind == "OPTIONAL_INPUT":
            others.append(f"Tensor? {name}=None")
        elif kind in ("INTEGER", "FLOAT"):
            others.append(f"{'SymInt' if kind == 'INTEGER' else 'float'} {name}=0")
    returned = ", ".join(["Tensor"] * results)
    return f"({', '.join(needed + changed + others)}) -> ({returned})"


def optional_inputs(phase) -> set[str]:
    """The tensors that a call may have."""
    return {name for name, kind in _core.arguments(phase) if kind == "OPTIONAL_INPUT"}


# What says where sequences lie. Scales are not among these: blocks of rows need more than a tensor.
SEQUENCES = optional_inputs("forward") - {"sink", "query_scale", "key_scale", "value_scale"}


def integer(name, number) -> int:
    """Of what may be a tensor of one element. A number with a fraction is refused, not cut."""
    try:
        if not isinstance(number, float) and int(number) == number:
            return int(number)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} is {number!r}: expected an integer")


def window_of(window_size) -> tuple[int, int]:
    try:
        left, right = window_size
        return integer("left", left), integer("right", right)
    except (TypeError, ValueError) as error:
        raise TypeError(f"the window is {window_size!r}: expected two integers") from error


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
    *,
    scale_rows=0,
) -> dict:
    """The options that every function takes."""
    flags = _core.CAUSAL if causal else 0
    options = {}
    if softmax_scale is not None:
        flags |= _core.SCALE
        try:
            options["softmax_scale"] = float(softmax_scale)
        except (TypeError, ValueError) as error:
            raise TypeError(f"softmax_scale is {softmax_scale!r}: expected a number") from error
    left, right = window_of(window_size)
    if left >= 0 or right >= 0:
        flags |= _core.WINDOW
        options["window_left"] = max(left, -1)
        options["window_right"] = max(right, -1)
    options["flags"] = flags
    if softcap:
        options["softcap"] = softcap
    sm_margin = integer("sm_margin", sm_margin)
    if sm_margin < 0 or (sm_margin and query.is_cuda):  # the CPU has none to leave free
        options["reserved_multiprocessors"] = sm_margin
    if num_splits:
        options["num_splits"] = num_splits
    if query_scale is not None or key_scale is not None or value_scale is not None:
        scales = {"query_scale": query_scale, "key_scale": key_scale, "value_scale": value_scale}
        options |= scales
        rows = rows_of_scales(scale_rows, *scales.values())
        for (name, scale), count in zip(scales.items(), rows):
            if scale is not None and count:
                options[f"{name}_rows"] = count
    elif scale_rows != 0:
        rows_of_scales(scale_rows, None, None, None)
    return options


def rows_of_scales(scale_rows, *scales):
    """How many rows a scale of each tensor's is for: three numbers of one, which is for all tensors
    that have scales. Raises for a number that no scale is for."""
    if not isinstance(scale_rows, (tuple, list)):
        if scale_rows and all(scale is None for scale in scales):
            raise ValueError(
                f"scale_rows is {scale_rows}: expected q_descale, k_descale or v_descale with it"
            )
        return (scale_rows,) * 3
    if len(scale_rows) != 3:
        raise ValueError(f"scale_rows is {scale_rows}: expected an integer or three, with their scales")
    for name, scale, count in zip("qkv", scales, scale_rows):
        if count and scale is None:
            raise ValueError(
                f"scale_rows is {scale_rows}: expected {name}_descale with it, or 0 for {name}"
            )
    return scale_rows


def sequences(max_seqlen_q, max_seqlen_k, **tensors) -> dict:
    """The options that say where sequences lie: tensors, or None, by their names in fa3.h. The bounds
    of packed ones' lengths are ints or tensors of one; without them the CPU engine looks."""
    for name in tensors:
        if name not in SEQUENCES:
            raise TypeError(f"attention has no argument {name!r}")
    options = dict(tensors)
    if tensors.get("cu_seqlens_q") is not None and max_seqlen_q is not None:
        options["max_seqlen_q"] = integer("max_seqlen_q", max_seqlen_q)
    if tensors.get("cu_seqlens_k") is not None and max_seqlen_k is not None:
        options["max_seqlen_k"] = integer("max_seqlen_k", max_seqlen_k)
    return options


def lse_shape(query) -> tuple[int, ...]:
    """Of the lse: (batch, heads, seqlen_q), or (heads, total_q) for packed queries."""
    shape = query.shape
    if len(shape) == 4:
        return shape[0], shape[2], shape[1]
    return shape[-2::-1]
