"""MXFP4, MXFP8 and NVFP4 by exact quantise-dequantise, in operations that every device of PyTorch has.

A block of numbers shares a scale; each number over the scale is rounded to an element of few bits. The
result is in fp32, in which every value of these formats is exact. Sources: OCP Microscaling Formats (MX)
v1.0; NVIDIA, arXiv:2509.25149.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# Of fp32, whose bits exponents are read from and powers of two are made of: `log2` and `pow` round.
MANTISSA, BIAS, LEAST_SUBNORMAL = 23, 127, -149
LARGEST_E8M0 = 127


@dataclass(frozen=True, kw_only=True)
class Element:
    """A floating-point number of few bits without infinities; what is larger becomes the largest."""

    mantissa: int
    """Bits of the mantissa that are written."""
    least_exponent: int
    """Exponent of the smallest normal number."""
    greatest_exponent: int
    largest: float


E2M1 = Element(mantissa=1, least_exponent=0, greatest_exponent=2, largest=6.0)
E4M3 = Element(mantissa=3, least_exponent=-6, greatest_exponent=8, largest=448.0)


@dataclass(frozen=True, kw_only=True)
class Format:
    """Elements that share scales."""

    element: Element
    scales: Literal["e8m0", "e4m3"]
    """`e8m0`: a power of two a block. `e4m3`: a number of 8 bits a block, and one in fp32 for the tensor."""

    @property
    def product_type(self) -> torch.dtype | None:
        """Type in which factors are exact; None where every type of 16 bits has them."""
        return None if self.scales == "e8m0" else torch.float32


FORMATS = {
    "mxfp4": Format(element=E2M1, scales="e8m0"),
    "mxfp8": Format(element=E4M3, scales="e8m0"),
    "nvfp4": Format(element=E2M1, scales="e4m3"),
}


def quantised(x: Tensor, kind: Format, *, block: int, noise: Tensor | None = None) -> Tensor:
    """Return the values of `x` in a format, in fp32.

    Args:
        x: any shape; blocks lie along the last axis, whose length `block` divides.
        noise: of the shape of `x`, uniform in [0, 1): numbers are rounded up with the probability of their
            distance from the lower neighbour. Without it they are rounded to the nearest, ties to even.
    """
    blocks = x.float().unflatten(-1, (-1, block))
    scale = _power_scale(blocks, kind.element) if kind.scales == "e8m0" else _e4m3_scale(blocks, kind.element)
    spread = None if noise is None else noise.unflatten(-1, (-1, block))
    return (rounded(blocks / scale, kind.element, noise=spread) * scale).flatten(-2)


def rounded(x: Tensor, element: Element, *, noise: Tensor | None = None) -> Tensor:
    """Return the values of `x`, in fp32, as elements."""
    step = power_of_two(exponent_of(x).clamp(min=element.least_exponent) - element.mantissa)
    count = x / step
    whole = count.round() if noise is None else (count + noise).floor()
    return (whole * step).clamp(-element.largest, element.largest)


def exponent_of(x: Tensor) -> Tensor:
    """Return the exponents of numbers in fp32, -127 of zeros and subnormal ones."""
    return (x.view(torch.int32) >> MANTISSA & 0xFF) - BIAS


def power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to integers from -149 to 127, exactly."""
    normal = exponent.clamp(min=1 - BIAS) + BIAS << MANTISSA
    subnormal = 1 << (exponent.clamp(LEAST_SUBNORMAL, -BIAS) - LEAST_SUBNORMAL)
    return torch.where(exponent > -BIAS, normal, subnormal).to(torch.int32).view(torch.float32)


def _power_scale(blocks: Tensor, element: Element) -> Tensor:
    """Return the power of two that gives the largest of a block the greatest exponent."""
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = exponent_of(largest) - element.greatest_exponent
    return power_of_two(exponent.clamp(-LARGEST_E8M0, LARGEST_E8M0))


def _e4m3_scale(blocks: Tensor, element: Element) -> Tensor:
    """Return scales by which the largest of a block becomes the largest element."""
    largest = blocks.abs().amax(-1, keepdim=True)
    whole = largest.amax() / (E4M3.largest * element.largest)
    whole = torch.where(whole > 0, whole, torch.ones_like(whole))
    # Below the smallest normal number a scale would lose its bits.
    share = (largest / element.largest / whole).clamp(2.0**E4M3.least_exponent, E4M3.largest)
    return whole * rounded(share, E4M3)
