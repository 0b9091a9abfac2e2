"""Numbers of all lanes of a wavefront at once, by the types of AMD's pseudocode.

A value is an array with one element a lane; `Bits` are a register's words before a suffix says what they
hold. Signalling NaNs are quiet here: NumPy keeps no difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class UnknownError(ValueError):
    """The text is prose, or has what is not known here."""


class Bits:
    """Words of 32 bits, each an array of lanes."""

    def __init__(self, words: Any) -> None:
        self.words = words

    @classmethod
    def of(cls, value: Any, count: int) -> Bits:
        """Return a number, or an array, as so many words."""
        if isinstance(value, Bits):
            return value
        whole = raw(value)
        return cls(
            [((whole >> np.uint64(32 * i)) & np.uint64(0xFFFFFFFF)).astype(np.uint32) for i in range(count)]
        )

    def whole(self) -> Any:
        """Return the first 64 bits as one number."""
        low = self.words[0].astype(np.uint64)
        return low if len(self.words) == 1 else low | self.words[1].astype(np.uint64) << np.uint64(32)


def raw(value: Any) -> Any:
    """Return the bits of a value as unsigned 64-bit numbers."""
    if isinstance(value, Bits):
        return value.whole()
    array = np.atleast_1d(np.asarray(value))
    if array.dtype.kind == "f":
        array = array.view(f"u{array.dtype.itemsize}")
    elif array.dtype == object:
        array = np.array([int(x) & (1 << 64) - 1 for x in array], np.uint64)
    return array.astype(np.int64).astype(np.uint64) if array.dtype.kind == "i" else array.astype(np.uint64)


def truth(value: Any) -> Any:
    """Return whether each lane's number is not zero."""
    return (value.whole() if isinstance(value, Bits) else np.asarray(value)) != 0


def typed(value: Any, kind: str, width: int) -> Any:
    """Return bits as numbers of a type: `u` and `b` are unsigned, `i` signed, `f` floats."""
    array = None if isinstance(value, Bits) else np.asarray(value)
    if array is not None and array.dtype.kind == "f" and kind == "f":
        return array.astype(f"f{width // 8}")
    bits = raw(value)
    if kind == "f":
        return bits.astype(f"u{width // 8}").view(f"f{width // 8}")
    size = 8 if width > 32 else 4 if width > 16 else 2 if width > 8 else 1
    shift = np.uint64(64 - width)
    if kind == "i":
        return ((bits << shift).astype(np.int64) >> np.int64(64 - width)).astype(f"i{size}")
    return (bits << shift >> shift).astype(f"u{size}")


def cast(value: Any, kind: str, width: int) -> Any:
    """Return numbers as another type, as `64'U(x)` does: the value stays, not the bits."""
    array = np.atleast_1d(value.whole() if isinstance(value, Bits) else np.asarray(value))
    if width > 64:
        return array.astype(object)
    if kind == "F":
        return array.astype(f"f{width // 8}")
    return typed(array, "i" if kind == "I" else "u", width)


def sliced(value: Any, high: Any, low: Any) -> Any:
    """Return some bits, reversed where the first is the lower one."""
    if isinstance(value, Bits) and np.ndim(low) == 0 and (high - low) % 32 == 31 and low % 32 == 0:
        return Bits(value.words[int(low) // 32 : int(high) // 32 + 1])
    if np.ndim(low) == 0 and high < low:
        bits = raw(value)
        return sum(((bits >> np.uint64(i)) & np.uint64(1)) << np.uint64(low - i) for i in range(low + 1))
    bits = raw(value) >> raw(low)
    count = int(np.max(raw(high) - raw(low))) + 1
    return typed(bits, "u", count)


def fused(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of float32, rounded once: in float64, where the product is exact, rounded to odd."""
    product, c = a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    odd = np.where(np.isfinite(total) & (lost != 0) & even, np.nextafter(total, towards), total)
    return odd.astype(np.float32)


def _unsigned(x: Any) -> Any:
    inside = np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(np.float64)), 0, 2**32 - 1))
    return inside.astype(np.uint32)


def _from_bit(x: Any, count: Any) -> Any:
    away = np.uint64(64) - raw(count)
    return np.where(
        away == 64, 0, (raw(x) << (away & np.uint64(63))).astype(np.int64) >> away.astype(np.int64) % 64
    )


def _exponent(x: Any) -> Any:
    return (raw(x) >> np.uint64(23) & np.uint64(255)).astype(np.int64)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fma": fused,
    "abs": np.abs,
    "trunc": np.trunc,
    "pow": lambda base, x: np.power(float(base), x.astype(np.float64)).astype(np.float32),
    "log2": lambda x: np.log2(x.astype(np.float64)).astype(np.float32),
    "f32_to_f16": lambda x: x.astype(np.float16),
    "f16_to_f32": lambda x: x.astype(np.float32),
    "u32_to_f32": lambda x: x.astype(np.float32),
    "f32_to_u32": _unsigned,
    "signext": lambda x: x.astype(np.int64),
    "signext_from_bit": _from_bit,
    "isNAN": np.isnan,
    "isSignalNAN": lambda x: np.zeros(np.shape(x), bool),
    "isQuietNAN": np.isnan,
    "cvtToQuietNAN": lambda x: x,
    "exponent": _exponent,
    "sign": np.signbit,
    "s_ff1_i32_b64": lambda x: np.array([(int(v) & -int(v)).bit_length() - 1 for v in raw(x)]),
    "nop": lambda: None,
}
CONSTANTS = {"INF": np.float64(np.inf), "NAN": np.float64(np.nan)}
