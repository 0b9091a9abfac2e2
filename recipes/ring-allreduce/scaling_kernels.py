"""Kernels of eight bits a value under one scale a block, for GPUs: each value is read and written once.

Triton compiles them for both vendors. Floats of eight bits are made of integers, for GPUs that have no
instructions for e4m3 (MI250, A100).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Blocks of a program: enough for each thread of its warps to move 16 bytes at once, several times.
ROWS = 8


def encode(
    digits_NB: Tensor,
    scales_N: Tensor,
    values: Tensor,
    *,
    plus: tuple[Tensor, Tensor] | None,
    lost: Tensor | None,
    most: float,
    least: float,
) -> None:
    """Write digits and scale of each block of a sum.

    Args:
        digits_NB: int8, or floats of eight bits; `values` end within the last block.
        plus: digits and scales of a summand.
        lost: the last summand, in fp32; replaced by what the digits lose of the sum.
        most: the largest digit.
        least: the smallest scale.
    """
    digits_NB = _as_integers(digits_NB)
    plus_NB, plus_scales_N = (digits_NB, scales_N) if plus is None else (_as_integers(plus[0]), plus[1])
    with torch.cuda.device_of(values):
        _encode[(triton.cdiv(len(scales_N), ROWS),)](
            digits_NB,
            scales_N,
            values,
            plus_NB,
            plus_scales_N,
            values if lost is None else lost,
            values.numel(),
            most,
            least,
            PLUS=plus is not None,
            LOST=lost is not None,
            ROWS=ROWS,
            BLOCK=digits_NB.shape[1],
        )


def decode(target: Tensor, digits_NB: Tensor, scales_N: Tensor) -> None:
    """Write the values of digits and scales, as many as `target` has."""
    digits_NB = _as_integers(digits_NB)
    with torch.cuda.device_of(target):
        _decode[(triton.cdiv(len(scales_N), ROWS),)](
            target, digits_NB, scales_N, target.numel(), ROWS=ROWS, BLOCK=digits_NB.shape[1]
        )


def _as_integers(digits_NB: Tensor) -> Tensor:
    """Return floats as the bytes that they are: the type tells the kernels which digits these are."""
    return digits_NB.view(torch.uint8) if digits_NB.dtype.is_floating_point else digits_NB


@triton.jit
def _encode(
    digits,
    scales,
    values,
    plus_digits,
    plus_scales,
    lost,
    count,
    most,
    least,
    PLUS: tl.constexpr,
    LOST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows, places = _places(ROWS, BLOCK)
    inside = places < count
    wanted = tl.load(values + places, mask=inside, other=0.0).to(tl.float32)
    if PLUS:
        wanted += tl.where(inside, _values(plus_digits, plus_scales, rows, places, count, BLOCK), 0.0)
    if LOST:
        wanted += tl.load(lost + places, mask=inside, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(wanted), axis=1) / most, least)
    # The largest of some numbers is a number, although one of them is not.
    scale = tl.where(tl.max((wanted != wanted).to(tl.int32), axis=1) > 0, float("nan"), scale)
    scaled = wanted / scale[:, None]
    found = _to_int8(scaled) if digits.dtype.element_ty == tl.int8 else _to_e4m3(scaled)
    used = rows * BLOCK < count
    tl.store(digits + places, found, mask=used[:, None])
    tl.store(scales + rows, scale, mask=used)
    if LOST:
        tl.store(lost + places, wanted - _to_float(found) * scale[:, None], mask=inside)


@triton.jit
def _decode(target, digits, scales, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows, places = _places(ROWS, BLOCK)
    tl.store(target + places, _values(digits, scales, rows, places, count, BLOCK), mask=places < count)


@triton.jit
def _places(ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the blocks of this program, and the places of their values."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return rows, rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _values(digits, scales, rows, places, count, BLOCK: tl.constexpr):
    used = rows * BLOCK < count
    found = tl.load(digits + places, mask=used[:, None], other=0)
    return _to_float(found) * tl.load(scales + rows, mask=used, other=0.0)[:, None]


@triton.jit
def _to_float(digits):
    if digits.dtype == tl.int8:
        found = digits.to(tl.float32)
    else:
        # e4m3: four bits of exponent with bias 7, three of mantissa; below 2^-6 multiples of 2^-9.
        code = digits.to(tl.int32)
        normal = (((code & 0x7F) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        size = tl.where((code & 0x78) == 0, (code & 7).to(tl.float32) * 0.001953125, normal)
        found = tl.where(code >= 0x80, -size, size)
    return found


@triton.jit
def _to_int8(values):
    return _rounded(values).to(tl.int8)


@triton.jit
def _to_e4m3(values):
    size = tl.abs(values)
    code = size.to(tl.int32, bitcast=True)
    # To the nearest of three bits of mantissa, of two as near to the even one.
    normal = ((code + 0x7FFFF + ((code >> 20) & 1)) >> 20) - (120 << 3)
    found = tl.where(size < 0.015625, _rounded(size * 512.0).to(tl.int32), normal)
    return (tl.where(values < 0, 0x80, 0) | (found & 0x7F)).to(tl.uint8)


@triton.jit
def _rounded(values):
    """Round to the nearest integer, of two as near to the even one; below 2^22."""
    # At 1.5 x 2^23 neighbours are one apart.
    return (values + 12582912.0) - 12582912.0
