"""What the kernels of SSD share: tiles of memory, places in chunked tensors, and sequences in a row.

Tensors by time are (batch, length, head or group, column) with any strides but the last, which is one. Those
by chunk are contiguous: steps and sums are (batch, head, chunk, Q), states (batch, chunk, head, P, N), and
products of C and B (batch, chunk, group, Q, Q).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile(
    base, first, rows_left, stride, COLS: tl.constexpr, at, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Load rows from `first` and columns from `at` on; zeros after `rows_left` rows and COLS columns."""
    rows, cols = first + tl.arange(0, BLOCK_ROWS)[:, None], at + tl.arange(0, BLOCK)[None, :]
    places = base + tl.cast(rows, tl.int64) * stride + cols
    return tl.load(places, mask=(rows < rows_left) & (cols < COLS), other=0.0)


@triton.jit
def store_tile(
    base, first, rows_left, stride, value, COLS: tl.constexpr, at, BLOCK_ROWS: tl.constexpr, BLOCK:
    tl.constexpr
):  # fmt: skip
    """FolderStore rows from `first` and columns from `at` on, in the type of the target."""
    rows, cols = first + tl.arange(0, BLOCK_ROWS)[:, None], at + tl.arange(0, BLOCK)[None, :]
    places = base + tl.cast(rows, tl.int64) * stride + cols
    tl.store(places, value.to(base.dtype.element_ty), mask=(rows < rows_left) & (cols < COLS))


@triton.jit
def product_tile(base, row, col, Q: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Load a tile of a chunk's products; what is above the diagonal holds anything."""
    rows, cols = row + tl.arange(0, BLOCK_ROWS)[:, None], col + tl.arange(0, BLOCK_COLS)[None, :]
    return tl.load(base + rows * Q + cols)


@triton.jit
def by_time(base, batch, chunk, unit, batch_stride, row_stride, unit_stride, Q: tl.constexpr):
    """Return where the rows of a chunk begin in a tensor by time, `unit` being a head or a group."""
    row = tl.cast(chunk, tl.int64) * Q
    return (
        base
        + tl.cast(batch, tl.int64) * batch_stride
        + row * row_stride
        + tl.cast(unit, tl.int64) * unit_stride
    )


@triton.jit
def by_chunk(batch, chunk, unit, units, chunks):
    """Return the number of a (batch, chunk, unit) in that order."""
    return (tl.cast(batch, tl.int64) * chunks + chunk) * units + unit


@triton.jit
def by_head(batch, chunk, head, heads, chunks):
    """Return the number of a (batch, head, chunk) in that order."""
    return (tl.cast(batch, tl.int64) * heads + head) * chunks + chunk


@triton.jit
def sequence_before(index, batch, chunk, length, Q: tl.constexpr):
    """Return the sequence that a chunk's first state belongs to; in the first chunk, the row's first one."""
    return tl.load(index + tl.cast(batch, tl.int64) * length + tl.maximum(chunk * Q - 1, 0))


@triton.jit
def sequence_after(index, batch, chunk, length, Q: tl.constexpr):
    """Return the sequence that a chunk's last state belongs to."""
    return tl.load(index + tl.cast(batch, tl.int64) * length + tl.minimum(chunk * Q + Q, length) - 1)


@triton.jit
def sequences(index, batch, chunk, rows, length, Q: tl.constexpr):
    """Return the sequences of rows of a chunk."""
    at = chunk * Q + rows
    return tl.load(index + tl.cast(batch, tl.int64) * length + at, mask=at < length, other=-1)


@triton.jit
def decays(
    sums_rows, sums_cols, rows, cols, index, batch, chunk, length, Q: tl.constexpr, HAS_INDEX: tl.constexpr
):  # fmt: skip
    """Return decays from columns to rows, and which pairs have one: those of a sequence, in order."""
    seen = rows[:, None] >= cols[None, :]
    if HAS_INDEX:
        of_rows = sequences(index, batch, chunk, rows, length, Q)
        of_cols = sequences(index, batch, chunk, cols, length, Q)
        seen = seen & (of_rows[:, None] == of_cols[None, :])
    return tl.exp(tl.where(seen, sums_rows[:, None] - sums_cols[None, :], 0.0)), seen


@triton.jit
def from_before(sums_rows, rows, index, batch, chunk, length, Q: tl.constexpr, HAS_INDEX: tl.constexpr):
    """Return decays from a chunk's first state to its rows."""
    found = tl.exp(sums_rows)
    if HAS_INDEX:
        same = sequences(index, batch, chunk, rows, length, Q) == sequence_before(
            index, batch, chunk, length, Q
        )
        found = tl.where(same, found, 0.0)
    return found


@triton.jit
def to_after(sums, sums_rows, rows, index, batch, chunk, length, Q: tl.constexpr, HAS_INDEX: tl.constexpr):
    """Return decays from a chunk's rows to its last state."""
    found = tl.exp(tl.load(sums + Q - 1) - sums_rows)
    if HAS_INDEX:
        same = sequences(index, batch, chunk, rows, length, Q) == sequence_after(
            index, batch, chunk, length, Q
        )
        found = tl.where(same, found, 0.0)
    return found


@triton.jit
def through(sums, index, batch, chunk, length, Q: tl.constexpr, HAS_INDEX: tl.constexpr):
    """Return the decay from a chunk's first state to its last."""
    found = tl.exp(tl.load(sums + Q - 1))
    if HAS_INDEX:
        before = sequence_before(index, batch, chunk, length, Q)
        found = tl.where(before == sequence_after(index, batch, chunk, length, Q), found, 0.0)
    return found


@triton.jit
def softplus(value):
    """Return log(1 + exp(value)) without losing what is small beside 1."""
    power = tl.exp(tl.minimum(value, 20.0))
    above = power + 1.0
    # log(above) misses what rounding took from `power`; the quotient puts it back.
    small = above == 1.0
    exact = tl.where(small, power, tl.log(above) * (power / tl.where(small, 1.0, above - 1.0)))
    return tl.where(value > 20.0, value, exact)
