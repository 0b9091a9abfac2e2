"""FlashAttention-2 in Triton: one kernel source for AMD and NVIDIA GPUs, deterministic both ways."""

from twinrun_attention.api import (
    UnsupportedError,
    alibi_slopes,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)

__version__ = "0.1.0"

__all__ = [
    "UnsupportedError",
    "alibi_slopes",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]
