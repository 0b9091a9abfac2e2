"""The backward kernels; every sum is made by one program in one order, or from parts added in one order.

The gradient of a sum of decays is a difference of sums over rows and over columns of the same products. The
diagonal is in neither, so that what cancels there leaves no rounding; what reaches a chunk's last state is
summed forwards.
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
def gate_gradients(
    ungated, z, grad, dz, inner, z_batch, z_row, z_head, g_batch, g_row, g_head, heads, length, P:
    tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Write the gradient of z, and that of the output before it was multiplied by silu of z."""
    head, pair = tl.program_id(0) % heads, tl.program_id(0) // heads
    blocks = tl.cdiv(length, ROWS)
    batch, block = pair // blocks, pair % blocks
    left, step = length - block * ROWS, heads * P
    place = by_time(0, batch, block, head, tl.cast(length, tl.int64) * step, step, P, ROWS)
    z = by_time(z, batch, block, head, z_batch, z_row, z_head, ROWS)
    grad = by_time(grad, batch, block, head, g_batch, g_row, g_head, ROWS)
    value = tile(ungated + place, 0, left, step, P, 0, ROWS, BLOCK_P).to(tl.float32)
    gate = tile(z, 0, left, z_row, P, 0, ROWS, BLOCK_P).to(tl.float32)
    given = tile(grad, 0, left, g_row, P, 0, ROWS, BLOCK_P).to(tl.float32)
    share = tl.sigmoid(gate)
    store_tile(inner + place, 0, left, step, given * gate * share, P, 0, ROWS, BLOCK_P)
    slope = share * (1.0 + gate * (1.0 - share))
    store_tile(dz + place, 0, left, step, given * value * slope, P, 0, ROWS, BLOCK_P)


@triton.jit
def pass_gradients(
    added, kept, sums, index, final, grads, initial, carried, heads, length, chunks, SIZE: tl.constexpr, Q:
    tl.constexpr, BLOCK: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_INITIAL:
    tl.constexpr
):  # fmt: skip
    """Write the gradients of last states and of the initial one, and parts of those of whole decays."""
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, head = pair // heads, pair % heads
    at = block * BLOCK + tl.arange(0, BLOCK)
    grad = tl.zeros([BLOCK], dtype=tl.float32)
    if HAS_FINAL:
        grad = tl.load(final + tl.cast(pair, tl.int64) * SIZE + at, mask=at < SIZE, other=0.0).to(tl.float32)
    for turn in range(chunks):
        chunk = chunks - 1 - turn
        place = by_chunk(batch, chunk, head, heads, chunks) * SIZE + at
        tl.store(grads + place, grad.to(grads.dtype.element_ty), mask=at < SIZE)
        number = by_head(batch, chunk, head, heads, chunks)
        grad *= through(sums + number * Q, index, batch, chunk, length, Q, HAS_INDEX)
        state = tl.load(kept + place, mask=at < SIZE, other=0.0).to(tl.float32)
        tl.store(carried + number * blocks + block, tl.sum(grad * state))
        grad += tl.load(added + place, mask=at < SIZE, other=0.0)
    if HAS_INITIAL:
        tl.store(initial + tl.cast(pair, tl.int64) * SIZE + at, grad, mask=at < SIZE)


@triton.jit
def value_gradients(
    products, x, b, grad, grads, steps, sums, index, d, dx, dsteps, reaching, skipped, x_batch, x_row,
    x_head, b_batch, b_row, b_group, g_batch, g_row, g_head, d_head, d_size, heads, length, chunks, GROUP:
    tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M:
    tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, HAS_INDEX: tl.constexpr, HAS_D: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Write a block of rows of the gradient of x, and a part of that of D.

    `dsteps` gets the gradient of each step size as a factor, `reaching` what the last state adds to it.
    """
    head, pair = tl.program_id(0) % heads, tl.program_id(0) // heads
    block, pair = pair % (Q // BLOCK_K), pair // (Q // BLOCK_K)
    batch, chunk, first = pair // chunks, pair % chunks, block * BLOCK_K
    left = length - chunk * Q
    x = by_time(x, batch, chunk, head, x_batch, x_row, x_head, Q)
    b = by_time(b, batch, chunk, head // GROUP, b_batch, b_row, b_group, Q)
    grad = by_time(grad, batch, chunk, head, g_batch, g_row, g_head, Q)
    grads += by_chunk(batch, chunk, head, heads, chunks) * (P * N)
    products += by_chunk(batch, chunk, head // GROUP, heads // GROUP, chunks) * (Q * Q)
    number = by_head(batch, chunk, head, heads, chunks) * Q
    sums += number
    cols = first + tl.arange(0, BLOCK_K)
    sums_cols = tl.load(sums + cols)
    acc = tl.zeros([BLOCK_K, BLOCK_P], dtype=tl.float32)
    for at in range(0, N, BLOCK_N):
        keys = tile(b, first, left, b_row, N, at, BLOCK_K, BLOCK_N)
        state = tile(grads, 0, P, N, N, at, BLOCK_P, BLOCK_N)
        acc = tl.dot(keys.to(state.dtype), state.T, acc, input_precision=PRECISION)
    acc *= to_after(sums, sums_cols, cols, index, batch, chunk, length, Q, HAS_INDEX)[:, None]
    values = tile(x, first, left, x_row, P, 0, BLOCK_K, BLOCK_P).to(tl.float32)
    tl.store(reaching + number + cols, tl.sum(acc * values, 1))
    for row in range(first // BLOCK_M * BLOCK_M, Q, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        decay, seen = decays(
            tl.load(sums + rows), sums_cols, rows, cols, index, batch, chunk, length, Q, HAS_INDEX
        )  # fmt: skip
        weights = tl.where(seen, product_tile(products, row, first, Q, BLOCK_M, BLOCK_K) * decay, 0.0)
        given = tile(grad, row, left, g_row, P, 0, BLOCK_M, BLOCK_P)
        acc = tl.dot(weights.to(given.dtype).T, given, acc, input_precision=PRECISION)
    tl.store(dsteps + number + cols, tl.sum(acc * values, 1))
    acc *= tl.load(steps + number + cols)[:, None]
    if HAS_D:
        size = tl.arange(0, BLOCK_P)
        own = tile(grad, first, left, g_row, P, 0, BLOCK_K, BLOCK_P).to(tl.float32)
        skip = tl.load(d + head * d_head + size * d_size, mask=size < P, other=0.0)
        acc += own * skip.to(tl.float32)[None, :]
        part = by_chunk(batch, chunk, block, Q // BLOCK_K, chunks) * heads + head
        tl.store(skipped + part * P + size, tl.sum(own * values, 0), mask=size < P)
    place = by_time(0, batch, chunk, head, tl.cast(length, tl.int64) * heads * P, heads * P, P, Q)
    store_tile(dx + place, first, left, heads * P, acc, P, 0, BLOCK_K, BLOCK_P)


@triton.jit
def product_gradients(
    products, x, grad, steps, sums, index, dproducts, over_rows, over_cols, x_batch, x_row, x_head, g_batch,
    g_row, g_head, heads, length, chunks, members, splits, part, GROUP: tl.constexpr, P: tl.constexpr, Q:
    tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HAS_INDEX:
    tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Write the gradient of products of C and B, summed over `members` heads of a group.

    Each head also gets sums over rows and columns of products, decays and the output's gradient together.
    """
    wide: tl.constexpr = Q // BLOCK_K
    tall: tl.constexpr = Q // BLOCK_M
    block, pair = tl.program_id(0) % (wide * tall), tl.program_id(0) // (wide * tall)
    split, pair = pair % splits, pair // splits
    groups = heads // GROUP
    group, pair = pair % groups, pair // groups
    batch, chunk = pair // chunks, pair % chunks
    row, col = block // wide * BLOCK_M, block % wide * BLOCK_K
    if col >= row + BLOCK_M:
        return
    left = length - chunk * Q
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_K)
    place = by_chunk(batch, chunk, group, groups, chunks) * (Q * Q)
    weights = tl.where(
        rows[:, None] > cols[None, :], product_tile(products + place, row, col, Q, BLOCK_M, BLOCK_K), 0.0
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for head in range(
        group * GROUP + split * members, group * GROUP + tl.minimum(split * members + members, GROUP)
    ):
        number = by_head(batch, chunk, head, heads, chunks)
        of_x = by_time(x, batch, chunk, head, x_batch, x_row, x_head, Q)
        of_grad = by_time(grad, batch, chunk, head, g_batch, g_row, g_head, Q)
        given = tile(of_grad, row, left, g_row, P, 0, BLOCK_M, BLOCK_P)
        values = tile(of_x, col, left, x_row, P, 0, BLOCK_K, BLOCK_P)
        own = sums + number * Q
        decay, seen = decays(
            tl.load(own + rows), tl.load(own + cols), rows, cols, index, batch, chunk, length, Q, HAS_INDEX
        )  # fmt: skip
        found = tl.where(seen, tl.dot(given, values.T, input_precision=PRECISION) * decay, 0.0)
        step = tl.load(steps + number * Q + cols)[None, :]
        acc += found * step
        found *= weights
        tl.store(over_rows + (number * tall + row // BLOCK_M) * Q + cols, tl.sum(found, 0))
        tl.store(over_cols + (number * wide + col // BLOCK_K) * Q + rows, tl.sum(found * step, 1))
    store_tile(dproducts + split * part + place, row, Q, Q, acc, Q, col, BLOCK_M, BLOCK_K)


@triton.jit
def projection_gradients(
    dproducts, other, x, states, own, steps, sums, index, grad, reading, o_batch, o_row, o_group, x_batch,
    x_row, x_head, own_batch, own_row, own_group, heads, length, chunks, members, splits, part, GROUP:
    tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M:
    tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr, HAS_INDEX: tl.constexpr, OF_B: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Write a block of rows of the gradient of B or of C, summed over `members` heads of a group.

    Of B: `other` is C, `states` the gradients of last states. Of C: `other` is B, `x` the output's gradient,
    `states` the first states; `reading` gets what each head's rows have of the decay from the first state.
    """
    parts: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    blocks: tl.constexpr = Q // BLOCK_M
    at, pair = tl.program_id(0) % parts, tl.program_id(0) // parts
    first, pair = pair % blocks * BLOCK_M, pair // blocks
    split, pair = pair % splits, pair // splits
    groups = heads // GROUP
    group, pair = pair % groups, pair // groups
    batch, chunk = pair // chunks, pair % chunks
    left = length - chunk * Q
    rows = first + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if split == 0:
        other = by_time(other, batch, chunk, group, o_batch, o_row, o_group, Q)
        dproducts += by_chunk(batch, chunk, group, groups, chunks) * (Q * Q)
        low = first // BLOCK_K * BLOCK_K if OF_B else 0
        high = Q if OF_B else first + BLOCK_M
        for col in range(low, high, BLOCK_K):
            cols = col + tl.arange(0, BLOCK_K)
            if OF_B:
                weights = product_tile(dproducts, col, first, Q, BLOCK_K, BLOCK_M)
                weights = tl.where(cols[:, None] >= rows[None, :], weights, 0.0).T
            else:
                weights = product_tile(dproducts, first, col, Q, BLOCK_M, BLOCK_K)
                weights = tl.where(rows[:, None] >= cols[None, :], weights, 0.0)
            keys = tile(other, col, left, o_row, N, at * BLOCK_N, BLOCK_K, BLOCK_N)
            acc = tl.dot(weights.to(keys.dtype), keys, acc, input_precision=PRECISION)
    if not OF_B:
        own = by_time(own, batch, chunk, group, own_batch, own_row, own_group, Q)
        queries = tile(own, first, left, own_row, N, at * BLOCK_N, BLOCK_M, BLOCK_N).to(tl.float32)
    for head in range(
        group * GROUP + split * members, group * GROUP + tl.minimum(split * members + members, GROUP)
    ):
        number = by_head(batch, chunk, head, heads, chunks)
        sums_rows = tl.load(sums + number * Q + rows)
        values = by_time(x, batch, chunk, head, x_batch, x_row, x_head, Q)
        values = tile(values, first, left, x_row, P, 0, BLOCK_M, BLOCK_P)
        state = states + by_chunk(batch, chunk, head, heads, chunks) * (P * N)
        state = tile(state, 0, P, N, N, at * BLOCK_N, BLOCK_P, BLOCK_N)
        found = tl.dot(values.to(state.dtype), state, input_precision=PRECISION)
        if OF_B:
            scale = to_after(sums + number * Q, sums_rows, rows, index, batch, chunk, length, Q, HAS_INDEX)
            found *= (scale * tl.load(steps + number * Q + rows))[:, None]
        else:
            found *= from_before(sums_rows, rows, index, batch, chunk, length, Q, HAS_INDEX)[:, None]
            tl.store(reading + (number * parts + at) * Q + rows, tl.sum(found * queries, 1))
        acc += found
    place = by_time(0, batch, chunk, group, tl.cast(length, tl.int64) * groups * N, groups * N, N, Q)
    store_tile(grad + split * part + place, first, left, groups * N, acc, N, at * BLOCK_N, BLOCK_M, BLOCK_N)


@triton.jit
def sum_of_parts(base, number, time, valid, PARTS: tl.constexpr, Q: tl.constexpr):
    """Return the sum over parts of (batch, head, chunk, part, Q)."""
    found = tl.load(base + number * PARTS * Q + time, mask=valid, other=0.0)
    for part in tl.static_range(1, PARTS):
        found += tl.load(base + (number * PARTS + part) * Q + time, mask=valid, other=0.0)
    return found


@triton.jit
def step_gradients(
    dt, a, bias, steps, dsteps, reaching, over_rows, over_cols, reading, carried, ddt, da, dbias, dt_batch,
    dt_row, dt_head, heads, length, chunks, low, high, Q: tl.constexpr, HEADS: tl.constexpr, HAS_BIAS:
    tl.constexpr, SOFTPLUS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, READING: tl.constexpr,
    CARRIED: tl.constexpr
):  # fmt: skip
    """Write the gradient of dt, and a chunk's parts of those of A and of the bias."""
    blocks = tl.cdiv(heads, HEADS)
    block, pair = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    batch, chunk = pair // chunks, pair % chunks
    head, time = block * HEADS + tl.arange(0, HEADS)[None, :], tl.arange(0, Q)[:, None]
    inside = head < heads
    valid = inside & (chunk * Q + time < length)
    number = by_head(batch, chunk, head, heads, chunks)
    step = tl.load(steps + number * Q + time, mask=inside, other=0.0)
    later = sum_of_parts(over_cols, number, time, valid, WIDE, Q) + sum_of_parts(
        reading, number, time, valid, READING, Q
    )  # fmt: skip
    later -= step * sum_of_parts(over_rows, number, time, valid, TALL, Q)
    earlier = step * tl.load(reaching + number * Q + time, mask=valid, other=0.0)
    of_decay = tl.cumsum(later, 0, reverse=True) + (tl.cumsum(earlier, 0) - earlier)
    for part in range(CARRIED):
        of_decay += tl.load(carried + number * CARRIED + part, mask=inside, other=0.0)
    of_decay = tl.where(valid, of_decay, 0.0)
    tl.store(da + number, tl.sum(step * of_decay, 0)[None, :], mask=inside)
    decay = tl.load(a + head, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dsteps + number * Q + time, mask=valid, other=0.0) + of_decay * decay
    source = by_time(dt, batch, chunk, head, dt_batch, dt_row, dt_head, Q) + tl.cast(time, tl.int64) * dt_row
    given = tl.load(source, mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        given += tl.load(bias + head, mask=inside, other=0.0).to(tl.float32)
    soft = softplus(given) if SOFTPLUS else given
    grad = tl.where((soft < low) | (soft > high), 0.0, grad)
    if SOFTPLUS:
        grad = tl.where(given > 20.0, grad, grad * tl.sigmoid(given))
    grad = tl.where(valid, grad, 0.0)
    place = (tl.cast(batch, tl.int64) * length + chunk * Q + time) * heads + head
    tl.store(ddt + place, grad.to(ddt.dtype.element_ty), mask=valid)
    if HAS_BIAS:
        tl.store(dbias + number, tl.sum(grad, 0)[None, :], mask=inside)
