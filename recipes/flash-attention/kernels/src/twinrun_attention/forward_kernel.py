"""The forward kernel: a block of queries against its keys, one pass, online softmax in base two."""

from __future__ import annotations

import triton
import triton.language as tl

from twinrun_attention.tiles import (
    LOG2E,
    fetch,
    in_base_two,
    key_range,
    row_of,
    sequence,
    slope_of,
    store_tile,
    sums_of,
    tile,
    visible,
)


@triton.jit
def attend(
    acc, total, top, q, k, v, low, high, batch, head, rows, len_k, k_stride, v_stride, slope, scale, cap,
    left, right, D: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr
):  # fmt: skip
    """Take keys `low` to `high` into the running sums."""
    PLAIN: tl.constexpr = not (HAS_SLOPES or CAPPED)
    for first in tl.range(low, high, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        keys = fetch(k, batch, head, first, len_k - first, k_stride, D, BLOCK_N, COLS, MASKED, DESCRIBED)
        s = tl.dot(q, keys.T)
        if not PLAIN:
            s = in_base_two(s, rows[:, None], cols[None, :], slope, scale, cap, HAS_SLOPES, CAPPED)
        if MASKED:
            seen = visible(rows[:, None], cols[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            s = tl.where(seen, s, float("-inf"))
        factor = scale * LOG2E if PLAIN else 1.0
        higher = tl.maximum(top, tl.max(s, 1) * factor)
        # A row that has seen nothing yet has no maximum to subtract.
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        p = tl.math.exp2(s * factor - base[:, None])
        decay = tl.math.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        values = fetch(v, batch, head, first, len_k - first, v_stride, D, BLOCK_N, COLS, MASKED, DESCRIBED)
        acc = tl.dot(p.to(values.dtype), values, acc)
        top = higher
    return acc, total, top


@triton.jit
def forward(
    q, k, v, out, lse, slopes, starts_q, starts_k, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch,
    v_row, v_head, slope_batch, heads, rows_q, max_q, max_k, scale, cap, left, right, GROUP: tl.constexpr,
    D: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, END: tl.constexpr, HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr,
    VARLEN: tl.constexpr, EVEN: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Write a block of `out` (batch, row, head, column) and of the logarithms of the sums."""
    blocks = tl.cdiv(max_q, BLOCK_M)
    # The longest rows of a causal head start first.
    block, pair = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = pair // heads, pair % heads
    start_q, len_q = sequence(starts_q, batch, max_q, VARLEN)
    start_k, len_k = sequence(starts_k, batch, max_k, VARLEN)
    first = block * BLOCK_M
    if first >= len_q:
        return
    shift = len_k - len_q if END else 0
    slope = slope_of(slopes, batch, head, slope_batch, HAS_SLOPES)
    wide = tl.cast(batch, tl.int64) * 8
    q += wide * q_batch + tl.cast(head, tl.int64) * q_head * 8 + tl.cast(start_q, tl.int64) * q_row * 8
    queries = tile(q, first, len_q - first, q_row, D, BLOCK_M, COLS, True)
    rows = first + tl.arange(0, BLOCK_M) + shift
    kv_head = head // GROUP
    if not DESCRIBED:
        k += wide * k_batch + tl.cast(kv_head, tl.int64) * k_head * 8 + tl.cast(start_k, tl.int64) * k_row * 8
        v += wide * v_batch + tl.cast(kv_head, tl.int64) * v_head * 8 + tl.cast(start_k, tl.int64) * v_row * 8
    acc = tl.zeros([BLOCK_M, COLS], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    last = tl.minimum(first + BLOCK_M, len_q) - 1
    low, full_low, full_high, high = key_range(
        first, last, len_k, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )  # fmt: skip
    if HAS_LEFT:
        acc, total, top = attend(
            acc, total, top, queries, k, v, low, full_low, batch, kv_head, rows, len_k, k_row, v_row, slope,
            scale, cap, left, right, D, COLS, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED, True,
            DESCRIBED
        )  # fmt: skip
    acc, total, top = attend(
        acc, total, top, queries, k, v, full_low, full_high, batch, kv_head, rows, len_k, k_row, v_row, slope,
        scale, cap, left, right, D, COLS, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED, False, DESCRIBED
    )  # fmt: skip
    if HAS_RIGHT or not EVEN:
        masked_low = tl.maximum(full_low, full_high)
        acc, total, top = attend(
            acc, total, top, queries, k, v, masked_low, high, batch, kv_head, rows, len_k, k_row, v_row,
            slope, scale, cap, left, right, D, COLS, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED, True,
            DESCRIBED
        )  # fmt: skip
    # A row with nothing to attend gives zeros, and an infinite sum makes its gradients zeros.
    empty = (top == float("-inf")) & (total == 0)
    logs = tl.where(empty, float("inf"), (top + tl.math.log2(total)) / LOG2E)
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    out += row_of(start_q, batch, max_q, VARLEN) * heads * D + head * D
    store_tile(out, first, len_q - first, heads * D, acc, D, BLOCK_M, COLS)
    at = first + tl.arange(0, BLOCK_M)
    tl.store(lse + sums_of(start_q, batch, head, heads, rows_q, VARLEN) + at, logs, mask=at < len_q)
