"""RMSNorm in Triton: a program normalises one row, in registers."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Triton reads it when it is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _rms_norm(x, weight, out, columns, epsilon, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        place = tl.arange(0, BLOCK)
        inside = place < columns
        values = tl.load(x + row * columns + place, inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(values * values) / columns + epsilon)
        factors = tl.load(weight + place, inside, other=0.0).to(tl.float32)
        tl.store(out + row * columns + place, (values * scale * factors).to(out.dtype.element_ty), inside)


def rms_norm(x_RC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """Normalise each row of contiguous `x_RC` by its mean square, computed in fp32."""
    rows, columns = x_RC.shape
    out_RC = torch.empty_like(x_RC)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 1024, 4), 16)
    _rms_norm[(rows,)](x_RC, weight_C, out_RC, columns, epsilon, BLOCK=block, num_warps=warps)
    return out_RC


def reference(x_RC: Tensor, weight_C: Tensor, epsilon: float) -> Tensor:
    """Return the same in plain torch, in the type of the inputs."""
    return x_RC * (x_RC.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight_C


def backend(device: torch.device) -> str:
    """Return what runs here: `native`, `interpreted`, or without Triton `reference`."""
    if not HAS_TRITON:
        return "reference"
    return "interpreted" if device.type == "cpu" else "native"
