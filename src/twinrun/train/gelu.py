"""Exact GELU for compiled graphs, where the library's error function is slower than memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# Inductor writes to memory what two kernels read and is longer than 30 operations. The derivative of
# shared_gelu was written in fp32, and its sum, the gradient of a bias, read that: 0.43 ms in place of 0.12
# for a block of MPT-7B (H200, PyTorch 2.11). Regions that hold shared_gelu are compiled with this.
INDUCTOR_OPTIONS = {"realize_opcount_threshold": 200}


class SharedGelu(torch.autograd.Function):
    """Exact GELU, x times the normal distribution function, to 4e-7; for compiled graphs.

    Value and derivative share one exponential: Abramowitz and Stegun 7.1.26 writes the error
    function as a polynomial times the density. With the two library calls of gelu the kernels of
    a compiled block are bound by arithmetic instead of memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = x.float()
        return (wide * normal_distribution(wide)[0]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wide = x.float()
        below, density = normal_distribution(wide)
        return (grad.float() * (below + wide * density)).to(x.dtype)


def shared_gelu(x: Tensor) -> Tensor:
    """Apply SharedGelu; dynamo follows it only through a function."""
    y: Tensor = SharedGelu.apply(x)
    return y


def normal_distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return distribution function, to 7.5e-8, and density of the standard normal, in fp32."""
    kernel = torch.exp(-0.5 * x * x)
    t = 1 / (1 + 0.3275911 / math.sqrt(2) * x.abs())
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    tail = 0.5 * kernel * t * (0.254829592 + t * (-0.284496736 + t * series))
    return torch.where(x < 0, tail, 1 - tail), kernel / math.sqrt(2 * math.pi)
