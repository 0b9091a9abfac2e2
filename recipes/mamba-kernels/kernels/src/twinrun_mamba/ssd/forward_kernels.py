"""The forward kernels: sums of decays, states of chunks, states passed on, products of C and B, outputs.

Within a chunk the scan is a product of matrices; between chunks it is a recurrence over their states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from twinrun_mamba.ssd.tiles import (
    by_chunk,
    by_head,
    by_time,
    decays,
    from_before,
    product_tile,
    softplus,
    store_tile,
    through,
    tile,
    to_after,
)


@triton.jit
def chunk_sums(
    dt, a, bias, steps, sums, dt_batch, dt_row, dt_head, heads, length, chunks, low, high, Q: tl.constexpr,
    HEADS: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr
):  # fmt: skip
    """Write step sizes, and sums of their products with A from the start of each chunk."""
    blocks = tl.cdiv(heads, HEADS)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, chunk = pair // chunks, pair % chunks
    head, time = block * HEADS + tl.arange(0, HEADS)[None, :], tl.arange(0, Q)[:, None]
    valid = (head < heads) & (chunk * Q + time < length)
    source = by_time(dt, batch, chunk, head, dt_batch, dt_row, dt_head, Q) + tl.cast(time, tl.int64) * dt_row
    step = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(bias + head, mask=head < heads, other=0.0).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    # Comparisons leave a NaN as it is, which minimum and maximum do not.
    step = tl.where(step < low, low, step)
    step = tl.where(valid, tl.where(step > high, high, step), 0.0)
    decay = tl.load(a + head, mask=head < heads, other=0.0).to(tl.float32)
    place = by_head(batch, chunk, head, heads, chunks) * Q + time
    tl.store(steps + place, step, mask=head < heads)
    tl.store(sums + place, tl.cumsum(tl.where(valid, step * decay, 0.0), 0), mask=head < heads)


@triton.jit
def chunk_states(
    x, b, steps, sums, index, states, x_batch, x_row, x_head, b_batch, b_row, b_group, heads, length,
    chunks, GROUP: tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_INDEX: tl.constexpr, FORWARD: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Write what a chunk adds to its last state, from x and B.

    Backward: what it adds to the gradient of its first state, from the output's gradient and C.
    """
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, pair = pair % heads, pair // heads
    batch, chunk = pair // chunks, pair % chunks
    left = length - chunk * Q
    x = by_time(x, batch, chunk, head, x_batch, x_row, x_head, Q)
    b = by_time(b, batch, chunk, head // GROUP, b_batch, b_row, b_group, Q)
    steps += by_head(batch, chunk, head, heads, chunks) * Q
    sums += by_head(batch, chunk, head, heads, chunks) * Q
    acc = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for first in range(0, Q, BLOCK_K):
        rows = first + tl.arange(0, BLOCK_K)
        sums_rows = tl.load(sums + rows)
        if FORWARD:
            scale = to_after(sums, sums_rows, rows, index, batch, chunk, length, Q, HAS_INDEX)
            scale *= tl.load(steps + rows)
        else:
            scale = from_before(sums_rows, rows, index, batch, chunk, length, Q, HAS_INDEX)
        values = tile(x, first, left, x_row, P, 0, BLOCK_K, BLOCK_P)
        keys = tile(b, first, left, b_row, N, block * BLOCK_N, BLOCK_K, BLOCK_N)
        keys = (keys.to(tl.float32) * scale[:, None]).to(values.dtype)
        acc = tl.dot(values.T, keys, acc, input_precision=PRECISION)
    states += by_chunk(batch, chunk, head, heads, chunks) * (P * N)
    store_tile(states, 0, P, N, acc, N, block * BLOCK_N, BLOCK_P, BLOCK_N)


@triton.jit
def pass_states(
    states, sums, index, initial, kept, final, heads, length, chunks, SIZE: tl.constexpr, Q: tl.constexpr,
    BLOCK: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_INITIAL: tl.constexpr
):  # fmt: skip
    """Write the first state of each chunk, and the state after the last one."""
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = pair // heads, pair % heads
    at = block * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_INITIAL:
        state = tl.load(initial + tl.cast(pair, tl.int64) * SIZE + at, mask=at < SIZE, other=0.0).to(
            tl.float32
        )
    for chunk in range(chunks):
        place = by_chunk(batch, chunk, head, heads, chunks) * SIZE + at
        tl.store(kept + place, state.to(kept.dtype.element_ty), mask=at < SIZE)
        own = sums + by_head(batch, chunk, head, heads, chunks) * Q
        decay = through(own, index, batch, chunk, length, Q, HAS_INDEX)
        state = state * decay + tl.load(states + place, mask=at < SIZE, other=0.0)
    tl.store(final + tl.cast(pair, tl.int64) * SIZE + at, state, mask=at < SIZE)


@triton.jit
def chunk_products(
    c, b, products, c_batch, c_row, c_group, b_batch, b_row, b_group, groups, length, chunks, N:
    tl.constexpr, Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Write products of rows of C and of B of a chunk, on and below the diagonal."""
    wide: tl.constexpr = Q // BLOCK_K
    blocks: tl.constexpr = (Q // BLOCK_M) * wide
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    group, pair = pair % groups, pair // groups
    batch, chunk = pair // chunks, pair % chunks
    row, col = block // wide * BLOCK_M, block % wide * BLOCK_K
    if col >= row + BLOCK_M:
        return
    left = length - chunk * Q
    c = by_time(c, batch, chunk, group, c_batch, c_row, c_group, Q)
    b = by_time(b, batch, chunk, group, b_batch, b_row, b_group, Q)
    acc = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for at in range(0, N, BLOCK_N):
        queries = tile(c, row, left, c_row, N, at, BLOCK_M, BLOCK_N)
        keys = tile(b, col, left, b_row, N, at, BLOCK_K, BLOCK_N)
        acc = tl.dot(queries, keys.T, acc, input_precision=PRECISION)
    products += by_chunk(batch, chunk, group, groups, chunks) * (Q * Q)
    store_tile(products, row, Q, Q, acc, Q, col, BLOCK_M, BLOCK_K)


@triton.jit
def chunk_outputs(
    products, x, z, c, kept, steps, sums, index, d, out, ungated, x_batch, x_row, x_head, z_batch, z_row,
    z_head, c_batch, c_row, c_group, d_head, d_size, heads, length, chunks, GROUP: tl.constexpr, P:
    tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Write a block of rows of the output: from the chunk's first state, from its own rows, from D and z."""
    head, pair = tl.program_id(0) % heads, tl.program_id(0) // heads
    first, pair = pair % (Q // BLOCK_M) * BLOCK_M, pair // (Q // BLOCK_M)
    batch, chunk = pair // chunks, pair % chunks
    left = length - chunk * Q
    if first >= left:
        return
    x = by_time(x, batch, chunk, head, x_batch, x_row, x_head, Q)
    c = by_time(c, batch, chunk, head // GROUP, c_batch, c_row, c_group, Q)
    kept += by_chunk(batch, chunk, head, heads, chunks) * (P * N)
    products += by_chunk(batch, chunk, head // GROUP, heads // GROUP, chunks) * (Q * Q)
    steps += by_head(batch, chunk, head, heads, chunks) * Q
    sums += by_head(batch, chunk, head, heads, chunks) * Q
    rows = first + tl.arange(0, BLOCK_M)
    sums_rows = tl.load(sums + rows)
    acc = tl.zeros([BLOCK_M, BLOCK_P], dtype=tl.float32)
    for at in range(0, N, BLOCK_N):
        queries = tile(c, first, left, c_row, N, at, BLOCK_M, BLOCK_N)
        state = tile(kept, 0, P, N, N, at, BLOCK_P, BLOCK_N)
        acc = tl.dot(queries.to(state.dtype), state.T, acc, input_precision=PRECISION)
    acc *= from_before(sums_rows, rows, index, batch, chunk, length, Q, HAS_INDEX)[:, None]
    for col in range(0, first + BLOCK_M, BLOCK_K):
        cols = col + tl.arange(0, BLOCK_K)
        decay, seen = decays(
            sums_rows, tl.load(sums + cols), rows, cols, index, batch, chunk, length, Q, HAS_INDEX
        )  # fmt: skip
        weights = (
            product_tile(products, first, col, Q, BLOCK_M, BLOCK_K) * decay * tl.load(steps + cols)[None, :]
        )
        values = tile(x, col, left, x_row, P, 0, BLOCK_K, BLOCK_P)
        acc = tl.dot(tl.where(seen, weights, 0.0).to(values.dtype), values, acc, input_precision=PRECISION)
    if HAS_D:
        size = tl.arange(0, BLOCK_P)
        skip = tl.load(d + head * d_head + size * d_size, mask=size < P, other=0.0).to(tl.float32)
        acc += tile(x, first, left, x_row, P, 0, BLOCK_M, BLOCK_P).to(tl.float32) * skip[None, :]
    place = by_time(0, batch, chunk, head, tl.cast(length, tl.int64) * heads * P, heads * P, P, Q)
    if HAS_Z:
        store_tile(ungated + place, first, left, heads * P, acc, P, 0, BLOCK_M, BLOCK_P)
        z = by_time(z, batch, chunk, head, z_batch, z_row, z_head, Q)
        gate = tile(z, first, left, z_row, P, 0, BLOCK_M, BLOCK_P).to(tl.float32)
        acc *= gate * tl.sigmoid(gate)
    store_tile(out + place, first, left, heads * P, acc, P, 0, BLOCK_M, BLOCK_P)
