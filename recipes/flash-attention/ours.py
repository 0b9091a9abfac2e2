"""Our kernels by what a device has: compiled, in Triton's interpreter on a processor, or their reference."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

import torch
from attention import AttentionCase, Function

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton
    import twinrun_attention


def backend(device: torch.device) -> str:
    """Return what runs here: `native`, `interpreted`, or without Triton `reference`."""
    if not HAS_TRITON:
        print("the kernels are not run, only their reference: Triton is not installed")
        return "reference"
    return "interpreted" if device.type == "cpu" else "native"


def function(one: AttentionCase, backend: str) -> Function:
    """Return our implementation of a case."""
    if backend == "reference":
        return one.reference
    slopes, sides = one.slopes, (one.left, 0 if one.causal else -1)
    name = "flash_attn_with_kvcache" if "decode" in one.phases else "flash_attn_func"
    return partial(getattr(twinrun_attention, name), window_size=sides, alibi_slopes=slopes)


def name(backend: str) -> str:
    """Return the name in records: package, backend and Triton."""
    return f"twinrun-attention {backend}" + (f" triton {triton.__version__}" if HAS_TRITON else "")


def version() -> str:
    """Return the version of the package."""
    return str(twinrun_attention.__version__) if HAS_TRITON else "reference"
