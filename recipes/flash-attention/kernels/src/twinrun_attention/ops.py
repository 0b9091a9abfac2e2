"""The operators of torch: forward, backward and decoding, with fake tensors and autograd.

The way through torch.library takes hundreds of microseconds a call. So eager calls on plain tensors take a
short one: the entry in C++ once it is compiled, before that torch.autograd.Function or the bare function.
Compilers, modes and transforms see the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from twinrun_entry.eager import is_eager, wants_gradient
from twinrun_entry.entry import Operation, ask_for
from twinrun_entry.recording import local

from twinrun_attention import launch
from twinrun_attention.prepared import Band, Packing


def run_forward(
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
    band = Band(scale, left, right, end, softcap)
    if not launch.INTERPRETED:
        ask_for()
        return launch.run_forward(q, k, v, slopes, packing, band)
    out, lse = launch.run_forward(q.float(), k.float(), v.float(), slopes, packing, band)
    return out.to(q.dtype), lse


def run_backward(
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
    band, out = Band(scale, left, right, end, softcap), out.contiguous()
    if not launch.INTERPRETED:
        return launch.run_backward((q, k, v, out, lse), grad, slopes, packing, band)
    saved = (q.float(), k.float(), v.float(), out.float(), lse)
    dq, dk, dv = launch.run_backward(saved, grad.float(), slopes, packing, band)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


forward = torch.library.custom_op("twinrun_attention::forward", run_forward, mutates_args=())
backward = torch.library.custom_op("twinrun_attention::backward", run_backward, mutates_args=())


@forward.register_fake
def _(q: Tensor, _k: Tensor, _v: Tensor, _slopes: Tensor | None, starts_q: Tensor | None, *_: Any) -> Any:
    rows = (q.shape[1], q.shape[0]) if starts_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(rows, dtype=torch.float32)


@backward.register_fake
def _(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slopes, starts_q, starts_k, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output, slopes, starts_q, starts_k)
    ctx.numbers = numbers
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, grad: Tensor | None, run: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 13
    q, k, v, out, lse, slopes, starts_q, starts_k = ctx.saved_tensors
    found = run(grad, q, k, v, out, lse, slopes, starts_q, starts_k, *ctx.numbers)
    return (*found, *(None,) * 10)


def _registered_gradients(ctx: Any, grad: Tensor | None, _of_sums: Tensor | None) -> Any:
    return _gradients(ctx, grad, backward)


forward.register_autograd(_registered_gradients, setup_context=_setup)


class _Attention(torch.autograd.Function):
    """The same without torch.library."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run_forward(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _of_sums: Tensor | None) -> Any:
        return _gradients(ctx, grad, run_backward)


def _attend(*inputs: Any) -> tuple[Tensor, Tensor]:
    if not is_eager(inputs[0]):
        found: tuple[Tensor, Tensor] = forward(*inputs)
    elif wants_gradient(inputs[:3]):
        found = _Attention.apply(*inputs)
    else:
        found = run_forward(*inputs)
    if local.active is not None:
        local.active.kept = found
    return found


def _attend_gradients(grad: Tensor | None, out: Tensor, lse: Tensor, *inputs: Any) -> tuple[Any, ...]:
    q, k, v, *others = inputs
    if grad is None:
        return (None,) * len(inputs)
    return (*run_backward(grad, q, k, v, out, lse, *others), *(None,) * len(others))


attend = Operation(_attend, _attend_gradients)
"""Takes and returns what `forward` does, by the shortest way that all who look at the call can see."""


def run_decode(
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
    band = Band(scale, left, right, True, softcap)
    if not launch.INTERPRETED:
        return launch.run_decode(q, k, v, lengths, slopes, band)
    out, lse = launch.run_decode(q.float(), k.float(), v.float(), lengths, slopes, band)
    return out.to(q.dtype), lse


decode = torch.library.custom_op("twinrun_attention::decode", run_decode, mutates_args=())


@decode.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def attend_to_cache(*given: Any) -> tuple[Tensor, Tensor]:
    """Return what `decode` does, by the shortest way that all who look at the call can see."""
    found: tuple[Tensor, Tensor] = run_decode(*given) if is_eager(given[0]) else decode(*given)
    return found


def _packing(starts_q: Tensor | None, starts_k: Tensor | None, max_q: int, max_k: int) -> Packing | None:
    if starts_q is None or starts_k is None:
        return None
    return Packing(starts_q=starts_q, starts_k=starts_k, max_q=max_q, max_k=max_k)
