"""The official FlashAttention-3's module of this name."""

from flash_attn_3.flash_attn_interface import *  # noqa: F403
from flash_attn_3.flash_attn_interface import _flash_attn_backward, _flash_attn_forward  # noqa: F401
