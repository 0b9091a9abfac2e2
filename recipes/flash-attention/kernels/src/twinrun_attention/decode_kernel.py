"""Decoding: a few new queries against a long cache of keys and values, which programs share out (split-K)."""

from __future__ import annotations

import triton
import triton.language as tl

from twinrun_attention.tiles import LOG2E, in_base_two, tile, visible


@triton.jit
def decode(
    q, k, v, partial, sums, slopes, lengths, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row,
    v_head, slope_batch, heads, len_q, splits, per_split, scale, cap, left, right, GROUP: tl.constexpr,
    D: tl.constexpr, COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SLOPES: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """Write what one part of the keys gives the queries of all heads that share them, in fp32."""
    part, pair = tl.program_id(0), tl.program_id(1)
    kv_heads = heads // GROUP
    batch, kv_head = pair // kv_heads, pair % kv_heads
    len_k = tl.load(lengths + batch)
    one = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head, mine = one // GROUP, kv_head * GROUP + one % GROUP, one < len_q * GROUP
    cols_d = tl.arange(0, COLS)
    places = q + tl.cast(batch, tl.int64) * q_batch * 8 + (row * q_row * 8 + head * q_head * 8)[:, None]
    queries = tl.load(places + cols_d[None, :], mask=mine[:, None] & (cols_d < D)[None, :], other=0.0)
    rows = row + len_k - len_q
    slope = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + batch * slope_batch + head, mask=mine, other=0.0) * LOG2E
    k += (tl.cast(batch, tl.int64) * k_batch + tl.cast(kv_head, tl.int64) * k_head) * 8
    v += (tl.cast(batch, tl.int64) * v_batch + tl.cast(kv_head, tl.int64) * v_head) * 8
    low, high = part * per_split, tl.minimum(len_k, (part + 1) * per_split)
    if HAS_LEFT:
        low = tl.maximum(low, tl.maximum(len_k - len_q - left, 0) // BLOCK_N * BLOCK_N)
    acc = tl.zeros([BLOCK_M, COLS], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    for first in tl.range(low, high, BLOCK_N):
        cols = first + tl.arange(0, BLOCK_N)
        keys = tile(k, first, high - first, k_row, D, BLOCK_N, COLS, True)
        values = tile(v, first, high - first, v_row, D, BLOCK_N, COLS, True)
        s = in_base_two(
            tl.dot(queries, keys.T), rows[:, None], cols[None, :], slope[:, None], scale, cap, HAS_SLOPES,
            CAPPED
        )  # fmt: skip
        s = tl.where(
            visible(rows[:, None], cols[None, :], high, left, right, HAS_LEFT, HAS_RIGHT), s, float("-inf")
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, decay = tl.math.exp2(s - base[:, None]), tl.math.exp2(top - base)
        total = total * decay + tl.sum(p, 1)
        # Weights in two parts: memory bounds this loop, and rounded once they err more than the output does.
        rounded = p.to(values.dtype)
        acc = tl.dot(rounded, values, acc * decay[:, None])
        acc = tl.dot((p - rounded.to(tl.float32)).to(values.dtype), values, acc)
        top = higher
    empty = (top == float("-inf")) & (total == 0)
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    logs = tl.where(empty, float("-inf"), top + tl.math.log2(total))
    place = ((tl.cast(batch, tl.int64) * len_q + row) * heads + head) * splits + part
    tl.store(sums + place, logs, mask=mine)
    tl.store(partial + place[:, None] * D + cols_d[None, :], acc, mask=mine[:, None] & (cols_d < D)[None, :])


@triton.jit
def combine(partial, sums, out, lse, splits, D: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr):
    """Write a row from its parts, weighed by their sums."""
    row = tl.cast(tl.program_id(0), tl.int64)
    part, cols = tl.arange(0, PARTS), tl.arange(0, COLS)
    logs = tl.load(sums + row * splits + part, mask=part < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    weights = tl.math.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    empty = (top == float("-inf")) & (total == 0)
    mask = (part < splits)[:, None] & (cols < D)[None, :]
    parts = tl.load(partial + (row * splits + part)[:, None] * D + cols[None, :], mask=mask, other=0.0)
    found = tl.sum(parts * weights[:, None], 0) / tl.where(empty, 1.0, total)
    tl.store(out + row * D + cols, found.to(out.dtype.element_ty), mask=cols < D)
    tl.store(lse + row, tl.where(empty, float("inf"), (top + tl.math.log2(total)) / LOG2E))
