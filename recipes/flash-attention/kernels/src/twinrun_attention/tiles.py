"""What every kernel of attention shares: tiles of memory, scores in base two, and the band of visible keys.

Key `j` is visible to query `i` where `-left <= j - (i + shift) <= right`; causal is `right = 0`. The shift is
`len_k - len_q` where the last query and the last key stand beside each other, and 0 where the first do.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Strides come in units of so many elements, by which the compiler knows that 16 bytes can be loaded at once.
STRIDE_UNIT = tl.constexpr(8)


@triton.jit
def tile(
    base, first, rows_left, stride, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHECKED: tl.constexpr
):  # fmt: skip
    """Load rows from `first` on; zeros where columns end at D and, if checked, after `rows_left` rows."""
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    step = stride * STRIDE_UNIT
    places = base + tl.cast(first, tl.int64) * step + rows * step + cols
    if CHECKED and D < COLS:
        found = tl.load(places, mask=(rows < rows_left) & (cols < D), other=0.0)
    elif CHECKED:
        found = tl.load(places, mask=rows < rows_left, other=0.0)
    elif D < COLS:
        found = tl.load(places, mask=(cols < D) & (rows >= 0), other=0.0)
    else:
        found = tl.load(places)
    return found


@triton.jit
def fetch(
    source, batch, head, first, rows_left, stride, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    CHECKED: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Load rows through a descriptor of (batch, head, row, column), or from the pointer of this head."""
    if DESCRIBED:
        found = source.load([batch, head, first, 0]).reshape(ROWS, COLS)
    else:
        found = tile(source, first, rows_left, stride, D, ROWS, COLS, CHECKED)
    return found


@triton.jit
def store_tile(base, first, rows_left, step, value, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """FolderStore rows from `first` on, in the type of the target."""
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    places = base + tl.cast(first, tl.int64) * step + rows * step + cols
    tl.store(places, value.to(base.dtype.element_ty), mask=(rows < rows_left) & (cols < D))


@triton.jit
def sequence(starts, batch, length, VARLEN: tl.constexpr):
    """Return where a sequence begins in a packed tensor, and its length."""
    if VARLEN:
        first = tl.load(starts + batch)
        found = tl.load(starts + batch + 1) - first
    else:
        first, found = 0, length
    return first, found


@triton.jit
def row_of(start, batch, length, VARLEN: tl.constexpr):
    """Return the first row of a sequence in a contiguous tensor."""
    return tl.cast(start, tl.int64) if VARLEN else tl.cast(batch, tl.int64) * length


@triton.jit
def sums_of(start, batch, head, heads, rows, VARLEN: tl.constexpr):
    """Return where the row sums of a head begin: (batch, head, row), packed (head, row)."""
    if VARLEN:
        found = tl.cast(head, tl.int64) * rows + start
    else:
        found = (tl.cast(batch, tl.int64) * heads + head) * rows
    return found


@triton.jit
def slope_of(slopes, batch, head, stride, HAS_SLOPES: tl.constexpr):
    """Return the slope of a head for scores in base two."""
    return tl.load(slopes + batch * stride + head) * LOG2E if HAS_SLOPES else 0.0


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent, within 1e-7."""
    return 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1)


@triton.jit
def in_base_two(s, rows, cols, slope, scale, cap, HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr):
    """Return products of queries and keys as exponents of two; `rows` have the shift in them."""
    s = tanh(s * (scale / cap)) * (cap * LOG2E) if CAPPED else s * (scale * LOG2E)
    if HAS_SLOPES:
        s -= slope * tl.abs(rows - cols).to(tl.float32)
    return s


@triton.jit
def through_cap(s, ds, rows, cols, slope, cap, HAS_SLOPES: tl.constexpr):
    """Return the gradient before the cap, of that after it and the exponents of two."""
    if HAS_SLOPES:
        s += slope * tl.abs(rows - cols).to(tl.float32)
    capped = s / (cap * LOG2E)
    return ds * (1 - capped * capped)


@triton.jit
def visible(rows, cols, len_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Say which keys are in the band of which queries; `rows` have the shift in them."""
    seen = (cols < len_k) & (rows == rows)  # noqa: PLR0124 - to the shape of both
    if HAS_RIGHT:
        seen = seen & (cols - rows <= right)
    if HAS_LEFT:
        seen = seen & (rows - cols <= left)
    return seen


@triton.jit
def key_range(
    first, last, len_k, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Return for queries `first` to `last`: first key, end of keys, and the range of blocks seen by all."""
    low, full_low, high, full_high = 0, 0, len_k, len_k
    if HAS_LEFT:
        low = tl.maximum(first + shift - left, 0) // BLOCK * BLOCK
        full_low = (tl.maximum(last + shift - left, 0) + BLOCK - 1) // BLOCK * BLOCK
    if HAS_RIGHT:
        high = tl.maximum(tl.minimum(len_k, last + shift + right + 1), 0)
        full_high = tl.maximum(tl.minimum(len_k, first + shift + right + 1), 0)
    full_high = tl.maximum(full_high // BLOCK * BLOCK, low)
    return low, tl.minimum(full_low, high), full_high, high


@triton.jit
def query_range(
    first, last, len_q, shift, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Return for keys `first` to `last`: first query, end of queries, and the range of blocks seeing all."""
    low, full_low, high, full_high = 0, 0, len_q, len_q
    if HAS_RIGHT:
        low = tl.maximum(first - shift - right, 0) // BLOCK * BLOCK
        full_low = (tl.maximum(last - shift - right, 0) + BLOCK - 1) // BLOCK * BLOCK
    if HAS_LEFT:
        high = tl.maximum(tl.minimum(len_q, last - shift + left + 1), 0)
        full_high = tl.maximum(first - shift + left + 1, 0) // BLOCK * BLOCK
    full_low = tl.minimum(full_low, high)
    return low, full_low, tl.minimum(tl.maximum(full_high, full_low), high), high
