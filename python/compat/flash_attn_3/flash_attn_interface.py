"""The official FlashAttention-3's functions, and the private ones that TransformerEngine and others
import."""

from fa3 import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from fa3.cache import forward as _flash_attn_forward

# With it come torch.ops.flash_attn_3.
from flash_attn_3.operators import backward as _flash_attn_backward

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
