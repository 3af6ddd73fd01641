"""libfa3: FlashAttention-3 from a C library, for NVIDIA Hopper GPUs and CPUs.

`flash_attn_func` and its kin are the official FlashAttention-3's functions on PyTorch tensors,
there where PyTorch is installed; `attention` takes NumPy arrays and whatever else has DLPack."""

import importlib.util
from typing import TYPE_CHECKING

from fa3 import _core
from fa3.arrays import attention

__version__ = _core.version()
__all__ = ["attention"]

if TYPE_CHECKING or importlib.util.find_spec("torch"):
    from fa3.cache import flash_attn_combine, flash_attn_with_kvcache, get_scheduler_metadata
    from fa3.flash_attention import (
        flash_attn_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
    )
    from fa3.quantize import quantize

    __all__ += [
        "flash_attn_combine",
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
        "get_scheduler_metadata",
        "quantize",
    ]
else:

    def __getattr__(name):
        raise AttributeError(
            f"module 'fa3' has no attribute {name!r}: PyTorch, which all but fa3.attention needs, "
            "is not installed"
        )
