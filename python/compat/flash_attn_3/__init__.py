"""The official FlashAttention-3's package, on libfa3."""

__version__ = "3.0.0"
