"""Upstream's compiled kernels, called as its own Python does, where they are installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from operation import Function
from torch import Tensor

# By operation: the extension module, and the package that it comes with.
MODULES = {
    "scan": ("selective_scan_cuda", "mamba_ssm"),
    "conv": ("causal_conv1d_cuda", "causal_conv1d"),
    "update": ("causal_conv1d_cuda", "causal_conv1d"),
    "ssd": ("mamba_ssm.ops.triton.ssd_combined", "mamba_ssm"),
}


def function(operation: str) -> Function:
    """Return upstream's implementation of an operation; ImportError says why there is none."""
    module = importlib.import_module(MODULES[operation][0])
    if operation == "ssd":
        return partial(module.mamba_chunk_scan_combined, dt_softplus=True)
    applied = {"scan": SelectiveScan.apply, "conv": CausalConv.apply, "update": conv_update}[operation]
    return lambda **tensors: applied(module, *tensors.values())


def implementation(operation: str) -> str:
    """Return the name of upstream's package for an operation."""
    return MODULES[operation][1]


def package_version(operation: str) -> str:
    """Return the version of the package, as installed, else as its source says."""
    package = implementation(operation)
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    # Built in place it has no metadata, and importing it would need all that it requires.
    spec = importlib.util.find_spec(package)
    text = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    return text.partition("__version__ = ")[2].partition("\n")[0].strip("\"' ") or "unknown"


class SelectiveScan(torch.autograd.Function):
    """Upstream's scan as its own function calls it; the module comes first."""

    @staticmethod
    def forward(ctx: Any, module: ModuleType, *tensors: Tensor) -> Tensor:
        ctx.module = module
        out, x, out_z = module.fwd(*tensors, True)
        ctx.save_for_backward(*tensors, x, out)
        return out_z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, x, out = ctx.saved_tensors
        return (None, *_in_order(ctx.module.bwd(*tensors, gradient, x, out, None, True, False)))


def _in_order(gradients: list[Tensor]) -> tuple[Tensor, ...]:
    """Return gradients of u, delta, A, B, C, D, z, delta_bias; upstream has that of z last."""
    *first, delta_bias, z = gradients[:8]
    return (*first, z, delta_bias)


class CausalConv(torch.autograd.Function):
    """Upstream's convolution as its own function calls it; the module comes first."""

    @staticmethod
    def forward(ctx: Any, module: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, weight, bias)
        return conv_forward(module, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *conv_backward(ctx.module, *ctx.saved_tensors, gradient))


def conv_forward(module: ModuleType, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the output of the bare kernel."""
    out = torch.empty_like(x)
    module.causal_conv1d_fwd(x, weight, bias, None, None, out, None, True)
    return out


def conv_backward(
    module: ModuleType, x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias from the bare kernel, which adds to the last two."""
    found = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias)
    module.causal_conv1d_bwd(x, weight, bias, gradient, None, None, None, *found, None, True)
    return found


def conv_update(module: ModuleType, x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the output of the bare kernel for one step, and move the state on in place."""
    out = torch.empty_like(x).unsqueeze(-1)
    module.causal_conv1d_update(x.unsqueeze(-1), conv_state, weight, bias, out, True, None, None)
    return out.squeeze(-1)
