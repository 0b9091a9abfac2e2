"""One backward kernel in place of two: five products, and the gradient of queries added up in a fixed order.

    python recipes/flash-attention/kernels/tools/one_backward.py

times it beside the two kernels of the package, compares the gradients and repeats them. A program has a
block of keys. It adds its part to the gradient of a block of queries when the program to its right has done
so: a counter of each block of queries says whose turn it is, so that the sum has one order and repeats bit
for bit. Programs start from the right, so none waits for one that starts later. Sequences are whole blocks,
causal or full.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from twinrun_attention import flash_attn_func, launch
from twinrun_attention.launch import Band
from twinrun_attention.tiles import LOG2E

# Queries, keys, warps, stages.
SHAPES = ((64, 128, 8, 2), (64, 64, 4, 2), (32, 128, 8, 2), (32, 64, 4, 3), (64, 64, 8, 2))
TOKENS, WIDTH, LENGTH, REPEATS = 16384, 2048, 4096, 50
# Each thread waits by itself; Triton pipelines a loop only where it has no other loop inside.
WAIT = tl.constexpr(
    "{ .reg .pred p; again: ld.acquire.gpu.global.u32 $0, [$1]; setp.ne.u32 p, $0, $2; @p bra again; }"
)


@triton.jit
def one_backward(
    q, k, v, grad, lse, delta, dk, dv, dq, turns, pairs, heads, length, scale, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Write the gradients of a block of keys and values, and add to `dq` (batch, head, row, column), fp32."""
    blocks = length // BLOCK_N
    block, pair = blocks - 1 - tl.program_id(0) // pairs, tl.program_id(0) % pairs
    step, first = heads * D, block * BLOCK_N
    base = (tl.cast(pair // heads, tl.int64) * length * heads + pair % heads) * D
    cols, cols_d, rows = tl.arange(0, BLOCK_N), tl.arange(0, D), tl.arange(0, BLOCK_M)
    own = base + (first + cols)[:, None] * step + cols_d[None, :]
    keys, values = tl.load(k + own), tl.load(v + own)
    sum_k, sum_v = tl.zeros([BLOCK_N, D], dtype=tl.float32), tl.zeros([BLOCK_N, D], dtype=tl.float32)
    sums, wide = lse + tl.cast(pair, tl.int64) * length, tl.cast(pair, tl.int64) * length * D
    for at in tl.range(first // BLOCK_M * BLOCK_M if CAUSAL else 0, length, BLOCK_M):
        places = base + (at + rows)[:, None] * step + cols_d[None, :]
        queries, grads = tl.load(q + places), tl.load(grad + places)
        s = tl.dot(keys, queries.T)
        p = tl.math.exp2(s * (scale * LOG2E) - tl.load(sums + at + rows)[None, :] * LOG2E)
        if CAUSAL:
            p = tl.where((first + cols)[:, None] <= (at + rows)[None, :], p, 0.0)
        sum_v = tl.dot(p.to(grads.dtype), grads, sum_v)
        dp = tl.dot(values, grads.T)
        ds = (p * (dp - tl.load(delta + tl.cast(pair, tl.int64) * length + at + rows)[None, :])).to(
            queries.dtype
        )
        sum_k = tl.dot(ds, queries, sum_k)
        part = tl.dot(ds.T, keys)
        turn = ((at + BLOCK_M - 1) // BLOCK_N if CAUSAL else blocks - 1) - block
        mark = turns + tl.cast(pair, tl.int64) * (length // BLOCK_M) + at // BLOCK_M
        come = tl.inline_asm_elementwise(WAIT, "=r,l,r", [mark, turn], dtype=tl.int32, is_pure=False, pack=1)
        # The difference is zero: it keeps what follows behind the wait.
        there = dq + wide + (at + rows + come - turn)[:, None] * D + cols_d[None, :]
        before = tl.load(there, mask=(rows >= 0)[:, None] & (turn > 0), other=0.0, cache_modifier=".cg")
        tl.store(there, before + part)
        tl.debug_barrier()
        tl.atomic_xchg(mark, turn + 1, sem="release")
    tl.store(dk + own, (sum_k * scale).to(dk.dtype.element_ty))
    tl.store(dv + own, sum_v.to(dv.dtype.element_ty))


def gradients(
    saved: tuple[Tensor, ...], grad: Tensor, shape: tuple[int, int, int, int], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values from one kernel."""
    q, k, v, out, lse = saved
    batch, length, heads, size = q.shape
    block_m, block_n, warps, stages = shape
    delta = (out.float() * grad.float()).sum(-1).transpose(1, 2).contiguous()
    dq = torch.empty((batch, heads, length, size), dtype=torch.float32, device=q.device)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    turns = torch.zeros((batch * heads, length // block_m), dtype=torch.int32, device=q.device)
    one_backward[(batch * heads * (length // block_n),)](
        q, k, v, grad, lse, delta, dk, dv, dq, turns, batch * heads, heads, length, size**-0.5,
        D=size, BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=causal, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return (dq.transpose(1, 2) * size**-0.5).to(q.dtype), dk, dv


def compare(size: int, *, causal: bool) -> None:
    """Print the times of both, the distance of the gradients, and whether they repeat."""
    heads = WIDTH // size
    q, k, v, grad = (
        torch.randn(TOKENS // LENGTH, LENGTH, heads, size, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    )
    found: Any = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    saved, band = (q, k, v, *found[:2]), Band(scale=size**-0.5, right=0 if causal else -1)
    flops = 10.0 * TOKENS * LENGTH * WIDTH * (0.5 if causal else 1)

    def two() -> tuple[Tensor, Tensor, Tensor]:
        return launch.run_backward(saved, grad, None, None, band)

    wanted, name = two(), f"d{size} {'causal' if causal else 'full'}"
    spent = triton.testing.do_bench(two, return_mode="median")
    print(f"{name}: two kernels {spent:.3f} ms, {flops / spent / 1e9:.0f} TFLOP/s", flush=True)
    for shape in SHAPES:
        try:
            ours = gradients(saved, grad, shape, causal=causal)
            torch.cuda.synchronize()
        except Exception as error:
            print(f"{name}: {shape} {type(error).__name__}: {str(error)[:90]}", flush=True)
            continue
        far = max(
            float((a.double() - b.double()).norm() / b.double().norm())
            for a, b in zip(ours, wanted, strict=True)
        )
        same = all(
            torch.equal(a, b)
            for _ in range(REPEATS)
            for a, b in zip(gradients(saved, grad, shape, causal=causal), ours, strict=True)
        )
        spent = triton.testing.do_bench(
            lambda shape=shape: gradients(saved, grad, shape, causal=causal), return_mode="median"
        )
        rate = flops / spent / 1e9
        print(
            f"{name}: {shape} {spent:.3f} ms, {rate:.0f} TFLOP/s, distance {far:.1e}, repeats {same}",
            flush=True,
        )


if __name__ == "__main__":
    for chosen in map(int, sys.argv[1:] or ("64", "128")):
        compare(chosen, causal=True)
        compare(chosen, causal=False)
