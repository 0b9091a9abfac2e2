"""The operators of torch: forward, backward and decoding, with fake tensors and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinrun_attention import launch
from twinrun_attention.prepared import Band, Packing


@torch.library.custom_op("twinrun_attention::forward", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
    end: bool,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return output and logarithms of the row sums."""
    packing = _packing(starts_q, starts_k, max_q, max_k)
    wide_q, wide_k, wide_v = _widened(q, k, v)
    band = Band(scale=scale, left=left, right=right, end=end, softcap=softcap)
    out, lse = launch.run_forward(wide_q, wide_k, wide_v, slopes, packing, band)
    return out.to(q.dtype), lse


@forward.register_fake
def _(q: Tensor, _k: Tensor, _v: Tensor, _slopes: Tensor | None, starts_q: Tensor | None, *_: Any) -> Any:
    rows = (q.shape[1], q.shape[0]) if starts_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("twinrun_attention::backward", mutates_args=())
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slopes: Tensor | None,
    starts_q: Tensor | None,
    starts_k: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
    end: bool,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    packing = _packing(starts_q, starts_k, max_q, max_k)
    wide_q, wide_k, wide_v, wide_out, wide_grad = _widened(q, k, v, out.contiguous(), grad)
    band = Band(scale=scale, left=left, right=right, end=end, softcap=softcap)
    found = launch.run_backward((wide_q, wide_k, wide_v, wide_out, lse), wide_grad, slopes, packing, band)
    dq, dk, dv = (one.to(q.dtype) for one in found)
    return dq, dk, dv


@backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slopes, starts_q, starts_k, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output, slopes, starts_q, starts_k)
    ctx.numbers = numbers
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _of_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    q, k, v, out, lse, slopes, starts_q, starts_k = ctx.saved_tensors
    found = backward(grad, q, k, v, out, lse, slopes, starts_q, starts_k, *ctx.numbers)
    return (*found, *(None,) * 10)


forward.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("twinrun_attention::decode", mutates_args=())
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    slopes: Tensor | None,
    scale: float,
    left: int,
    right: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return output and logarithms of the row sums of queries at the end of a cache."""
    band = Band(scale=scale, left=left, right=right, softcap=softcap)
    wide_q, wide_k, wide_v = _widened(q, k, v)
    out, lse = launch.run_decode(wide_q, wide_k, wide_v, lengths, slopes, band)
    return out.to(q.dtype), lse


@decode.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _packing(starts_q: Tensor | None, starts_k: Tensor | None, max_q: int, max_k: int) -> Packing | None:
    if starts_q is None or starts_k is None:
        return None
    return Packing(starts_q=starts_q, starts_k=starts_k, max_q=max_q, max_k=max_k)


def _widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return fp32 where Triton's interpreter runs, which multiplies bf16 wrongly."""
    return tuple(one.float() for one in tensors) if launch.INTERPRETED else tensors
