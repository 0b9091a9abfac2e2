"""The backward kernels: row sums, then gradients of keys and values, then those of queries; no atomics.

Each gradient is summed by one program in one order, so results repeat bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinrun_attention.tiles import (
    LOG2E,
    fetch,
    in_base_two,
    key_range,
    query_range,
    row_of,
    sequence,
    slope_of,
    store_tile,
    sums_of,
    through_cap,
    tile,
    visible,
)


@triton.jit
def row_sums(
    out, grad, delta, starts_q, g_batch, g_row, g_head, heads, rows_q, max_q, D: tl.constexpr,
    COLS: tl.constexpr, BLOCK_M: tl.constexpr, VARLEN: tl.constexpr
):  # fmt: skip
    """Write the sum of output times gradient of each row."""
    blocks = tl.cdiv(max_q, BLOCK_M)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = pair // heads, pair % heads
    start, length = sequence(starts_q, batch, max_q, VARLEN)
    first = block * BLOCK_M
    if first >= length:
        return
    out += row_of(start, batch, max_q, VARLEN) * heads * D + head * D
    grad += (
        tl.cast(batch, tl.int64) * g_batch + tl.cast(head, tl.int64) * g_head + tl.cast(start, tl.int64) *
        g_row
    ) * 8  # fmt: skip
    o = tile(out, first, length - first, heads * (D // 8), D, BLOCK_M, COLS, True).to(tl.float32)
    g = tile(grad, first, length - first, g_row, D, BLOCK_M, COLS, True).to(tl.float32)
    at = first + tl.arange(0, BLOCK_M)
    place = delta + sums_of(start, batch, head, heads, rows_q, VARLEN) + at
    tl.store(place, tl.sum(o * g, 1), mask=at < length)


@triton.jit
def into_keys(
    dk, dv, k, v, q, grad, lse, delta, low, high, batch, head, cols, shift, len_q, len_k, q_row, g_row, slope,
    scale, cap, left, right, D: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Take queries `low` to `high` into the gradients of keys and values; products stand transposed."""
    PLAIN: tl.constexpr = not (HAS_SLOPES or CAPPED)
    for first in tl.range(low, high, BLOCK_M):
        at = first + tl.arange(0, BLOCK_M)
        rows = at + shift
        queries = fetch(q, batch, head, first, len_q - first, q_row, D, BLOCK_M, COLS, True, DESCRIBED)
        # Rows after the last have an infinite sum, so that they weigh nothing.
        sums = tl.load(lse + at, mask=at < len_q, other=float("inf")) * LOG2E
        s = tl.dot(k, queries.T)
        if not PLAIN:
            s = in_base_two(s, rows[None, :], cols[:, None], slope, scale, cap, HAS_SLOPES, CAPPED)
        p = tl.math.exp2(s * (scale * LOG2E if PLAIN else 1.0) - sums[None, :])
        if MASKED:
            seen = visible(rows[None, :], cols[:, None], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(seen, p, 0.0)
        grads = fetch(grad, batch, head, first, len_q - first, g_row, D, BLOCK_M, COLS, True, DESCRIBED)
        dv = tl.dot(p.to(grads.dtype), grads, dv)
        dp = tl.dot(v, grads.T)
        ds = p * (dp - tl.load(delta + at, mask=at < len_q, other=0.0)[None, :])
        if CAPPED:
            ds = through_cap(s, ds, rows[None, :], cols[:, None], slope, cap, HAS_SLOPES)
            if MASKED:
                ds = tl.where(seen, ds, 0.0)
        dk = tl.dot(ds.to(queries.dtype), queries, dk)
    return dk, dv


@triton.jit
def backward_keys(
    q, k, v, grad, lse, delta, dk, dv, slopes, starts_q, starts_k, q_batch, q_row, q_head, k_batch, k_row,
    k_head, v_batch, v_row, v_head, g_batch, g_row, g_head, slope_batch, heads, rows_q, max_q, max_k, scale,
    cap, left, right, GROUP: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, END: tl.constexpr,
    HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr, VARLEN: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """Write a block of the gradients of keys and values, summed over the query heads that share them."""
    blocks, kv_heads = tl.cdiv(max_k, BLOCK_N), heads // GROUP
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, kv_head = pair // kv_heads, pair % kv_heads
    start_q, len_q = sequence(starts_q, batch, max_q, VARLEN)
    start_k, len_k = sequence(starts_k, batch, max_k, VARLEN)
    first = block * BLOCK_N
    if first >= len_k:
        return
    shift = len_k - len_q if END else 0
    wide, wide_head = tl.cast(batch, tl.int64), tl.cast(kv_head, tl.int64)
    k += (wide * k_batch + wide_head * k_head + tl.cast(start_k, tl.int64) * k_row) * 8
    v += (wide * v_batch + wide_head * v_head + tl.cast(start_k, tl.int64) * v_row) * 8
    keys = tile(k, first, len_k - first, k_row, D, BLOCK_N, COLS, True)
    values = tile(v, first, len_k - first, v_row, D, BLOCK_N, COLS, True)
    cols = first + tl.arange(0, BLOCK_N)
    sum_k, sum_v = tl.zeros([BLOCK_N, COLS], dtype=tl.float32), tl.zeros([BLOCK_N, COLS], dtype=tl.float32)
    last = tl.minimum(first + BLOCK_N, len_k) - 1
    low, full_low, full_high, high = query_range(
        first, last, len_q, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )  # fmt: skip
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = slope_of(slopes, batch, head, slope_batch, HAS_SLOPES)
        sums = sums_of(start_q, batch, head, heads, rows_q, VARLEN)
        one_q, one_g = q, grad
        if not DESCRIBED:
            one_q = q + (
                wide * q_batch + tl.cast(head, tl.int64) * q_head + tl.cast(start_q, tl.int64) * q_row
            ) * 8  # fmt: skip
            one_g = grad + (
                wide * g_batch + tl.cast(head, tl.int64) * g_head + tl.cast(start_q, tl.int64) * g_row
            ) * 8  # fmt: skip
        if HAS_RIGHT:
            sum_k, sum_v = into_keys(
                sum_k, sum_v, keys, values, one_q, one_g, lse + sums, delta + sums, low, full_low, batch,
                head, cols, shift, len_q, len_k, q_row, g_row, slope, scale, cap, left, right, D, COLS,
                BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED, True, DESCRIBED
            )  # fmt: skip
        sum_k, sum_v = into_keys(
            sum_k, sum_v, keys, values, one_q, one_g, lse + sums, delta + sums, full_low, full_high, batch,
            head, cols, shift, len_q, len_k, q_row, g_row, slope, scale, cap, left, right, D, COLS, BLOCK_M,
            HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED, False, DESCRIBED
        )  # fmt: skip
        if HAS_LEFT:
            sum_k, sum_v = into_keys(
                sum_k, sum_v, keys, values, one_q, one_g, lse + sums, delta + sums, full_high, high, batch,
                head, cols, shift, len_q, len_k, q_row, g_row, slope, scale, cap, left, right, D, COLS,
                BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED, True, DESCRIBED
            )  # fmt: skip
    place = row_of(start_k, batch, max_k, VARLEN) * kv_heads * D + kv_head * D
    store_tile(dk + place, first, len_k - first, kv_heads * D, sum_k * scale, D, BLOCK_N, COLS)
    store_tile(dv + place, first, len_k - first, kv_heads * D, sum_v, D, BLOCK_N, COLS)


@triton.jit
def into_queries(
    dq, q, grads, k, v, sums, delta, low, high, batch, head, rows, len_k, k_row, v_row, slope, scale, cap,
    left, right, D: tl.constexpr, COLS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    DESCRIBED: tl.constexpr
):  # fmt: skip
    """Take keys `low` to `high` into the gradient of queries."""
    PLAIN: tl.constexpr = not (HAS_SLOPES or CAPPED)
    for first in tl.range(low, high, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        keys = fetch(k, batch, head, first, len_k - first, k_row, D, BLOCK_N, COLS, MASKED, DESCRIBED)
        values = fetch(v, batch, head, first, len_k - first, v_row, D, BLOCK_N, COLS, MASKED, DESCRIBED)
        s = tl.dot(q, keys.T)
        if not PLAIN:
            s = in_base_two(s, rows[:, None], cols[None, :], slope, scale, cap, HAS_SLOPES, CAPPED)
        p = tl.math.exp2(s * (scale * LOG2E if PLAIN else 1.0) - sums[:, None])
        if MASKED:
            seen = visible(rows[:, None], cols[None, :], len_k, left, right, HAS_LEFT, HAS_RIGHT)
            p = tl.where(seen, p, 0.0)
        ds = p * (tl.dot(grads, values.T) - delta[:, None])
        if CAPPED:
            ds = through_cap(s, ds, rows[:, None], cols[None, :], slope, cap, HAS_SLOPES)
            if MASKED:
                ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(keys.dtype), keys, dq)
    return dq


@triton.jit
def backward_queries(
    q, k, v, grad, lse, delta, dq, slopes, starts_q, starts_k, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, g_batch, g_row, g_head, slope_batch, heads, rows_q, max_q, max_k, scale, cap,
    left, right, GROUP: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, END: tl.constexpr,
    HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr, VARLEN: tl.constexpr, EVEN: tl.constexpr,
    DESCRIBED: tl.constexpr
):  # fmt: skip
    """Write a block of the gradient of queries."""
    blocks = tl.cdiv(max_q, BLOCK_M)
    block, pair = blocks - 1 - tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = pair // heads, pair % heads
    kv_head = head // GROUP
    start_q, len_q = sequence(starts_q, batch, max_q, VARLEN)
    start_k, len_k = sequence(starts_k, batch, max_k, VARLEN)
    first = block * BLOCK_M
    if first >= len_q:
        return
    shift = len_k - len_q if END else 0
    slope = slope_of(slopes, batch, head, slope_batch, HAS_SLOPES)
    wide, wide_head, wide_kv = tl.cast(batch, tl.int64), tl.cast(head, tl.int64), tl.cast(kv_head, tl.int64)
    q += (wide * q_batch + wide_head * q_head + tl.cast(start_q, tl.int64) * q_row) * 8
    grad += (wide * g_batch + wide_head * g_head + tl.cast(start_q, tl.int64) * g_row) * 8
    if not DESCRIBED:
        k += (wide * k_batch + wide_kv * k_head + tl.cast(start_k, tl.int64) * k_row) * 8
        v += (wide * v_batch + wide_kv * v_head + tl.cast(start_k, tl.int64) * v_row) * 8
    queries = tile(q, first, len_q - first, q_row, D, BLOCK_M, COLS, True)
    grads = tile(grad, first, len_q - first, g_row, D, BLOCK_M, COLS, True)
    at = first + tl.arange(0, BLOCK_M)
    rows, place = at + shift, sums_of(start_q, batch, head, heads, rows_q, VARLEN) + at
    sums = tl.load(lse + place, mask=at < len_q, other=float("inf")) * LOG2E
    own_delta = tl.load(delta + place, mask=at < len_q, other=0.0)
    last = tl.minimum(first + BLOCK_M, len_q) - 1
    low, full_low, full_high, high = key_range(
        first, last, len_k, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, COLS], dtype=tl.float32)
    if HAS_LEFT:
        acc = into_queries(
            acc, queries, grads, k, v, sums, own_delta, low, full_low, batch, kv_head, rows, len_k, k_row,
            v_row, slope, scale, cap, left, right, D, COLS, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED,
            True, DESCRIBED
        )  # fmt: skip
    acc = into_queries(
        acc, queries, grads, k, v, sums, own_delta, full_low, full_high, batch, kv_head, rows, len_k, k_row,
        v_row, slope, scale, cap, left, right, D, COLS, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED,
        False, DESCRIBED
    )  # fmt: skip
    if HAS_RIGHT or not EVEN:
        masked_low = tl.maximum(full_low, full_high)
        acc = into_queries(
            acc, queries, grads, k, v, sums, own_delta, masked_low, high, batch, kv_head, rows, len_k, k_row,
            v_row, slope, scale, cap, left, right, D, COLS, BLOCK_N, HAS_LEFT, HAS_RIGHT, HAS_SLOPES, CAPPED,
            True, DESCRIBED
        )  # fmt: skip
    dq += row_of(start_q, batch, max_q, VARLEN) * heads * D + head * D
    store_tile(dq, first, len_q - first, heads * D, acc * scale, D, BLOCK_M, COLS)
