"""The operators: forward, backward and decoding, from tensors to launches."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from twinrun_kernels.launches import INTERPRETED, REMEMBERED, on, widened
from twinrun_kernels.operators import Operators

from twinrun_attention import plans
from twinrun_attention.plans import Band, Call

_NUMBERS = "SymInt max_q, SymInt max_k, float scale, int left, int right, bool end, float softcap"
_INPUTS = f"Tensor q, Tensor k, Tensor v, Tensor? slopes, Tensor? starts_q, Tensor? starts_k, {_NUMBERS}"
# Arguments of `attend` that have no gradient.
OTHERS = 10


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithm of the sum of each row: (batch, head, row), packed (head, row)."""
    q, k, v, slopes, starts_q, starts_k, *numbers = arguments
    dtype = q.dtype
    q, k, v = _fit(q), _fit(k), _fit(v)
    out, lse = q.new_empty(q.shape), _row_numbers(q, starts_q)
    if not q.numel() or not k.numel():
        return out.zero_(), lse.fill_(float("inf"))
    launch = plans.forward(_call(q, k, v, slopes, starts_q, numbers))
    # What is absent is never read.
    others = (q if slopes is None else slopes, *((q, q) if starts_q is None else (starts_q, starts_k)))
    with on(q.device):
        launch(q, k, v, out, lse, *others)
    return (out.to(dtype) if INTERPRETED else out), lse


def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    grad, q, k, v, out, lse, slopes, starts_q, starts_k, *numbers = arguments
    dtype = q.dtype
    q, k, v, grad, out = _fit(q), _fit(k), _fit(v), _fit(grad), _fit(out.contiguous())
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    call = _call(q, k, v, slopes, starts_q, numbers)
    row_sums, of_keys, of_queries = plans.backward(call, (grad.shape, grad.stride()))
    delta = lse.new_empty(lse.shape)
    starts = (q, q) if starts_q is None else (starts_q, starts_k)
    inputs, others = (q, k, v, grad, lse, delta), (q if slopes is None else slopes, *starts)
    with on(q.device):
        row_sums(out, grad, delta, starts[0])
        of_keys(*inputs, dk, dv, *others)
        of_queries(*inputs, dq, *others)
    return (dq.to(dtype), dk.to(dtype), dv.to(dtype)) if INTERPRETED else (dq, dk, dv)


def _decode(
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
    """Return output and logarithms of the sums (batch, row, head) of queries at the end of a cache."""
    dtype = q.dtype
    q, k, v = _fit(q), _fit(k), _fit(v)
    numbers = (0, 0, scale, left, right, True, softcap)
    splits, attend_to_part, combine = plans.decoding(_call(q, k, v, slopes, None, numbers))
    partial = q.new_empty((*q.shape[:-1], splits, q.shape[-1]), dtype=torch.float32)
    sums, lse = partial.new_empty(partial.shape[:-1]), partial.new_empty(q.shape[:-1])
    out = q.new_empty(q.shape)
    with on(q.device):
        attend_to_part(q, k, v, partial, sums, q if slopes is None else slopes, lengths)
        combine(partial, sums, out, lse)
    return out.to(dtype), lse


def _call(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, starts_q: Tensor | None, numbers: Any
) -> Call:
    max_q, max_k, *band = numbers
    apart = None if slopes is None else slopes.stride(0) if slopes.dim() == 2 else 0
    packed = None if starts_q is None else (starts_q.numel() - 1, max_q, max_k)
    forms = (q.shape, q.stride()), (k.shape, k.stride()), (v.shape, v.stride())
    return Call(*forms, q.device, Band(*band), apart, packed)


def _fit(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where its columns do not lie together or rows do not begin at 16 bytes."""
    if INTERPRETED:
        tensor = widened(tensor)
    if not tensor.data_ptr() & 15 and _is_fit(tensor.stride()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@functools.lru_cache(maxsize=REMEMBERED)
def _is_fit(strides: tuple[int, ...]) -> bool:
    """Say whether columns lie together and rows are whole vectors of 16 bytes apart."""
    return strides[-1] == 1 and all(one % 8 == 0 for one in strides[:-1])


def _row_numbers(q: Tensor, starts_q: Tensor | None) -> Tensor:
    shape = q.shape
    rows = (shape[0], shape[2], shape[1]) if starts_q is None else (shape[1], shape[0])
    return q.new_empty(rows, dtype=torch.float32)


def _fake_forward(q: Tensor, _k: Any, _v: Any, _slopes: Any, starts_q: Any, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), _row_numbers(q, starts_q)


def _fake_backward(_grad: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fake_decode(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, slopes, starts_q, starts_k, *numbers = inputs
    ctx.save_for_backward(q, k, v, *output, slopes, starts_q, starts_k)
    ctx.numbers = numbers
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, _of_sums: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * (3 + OTHERS)
    return (*backward(grad, *ctx.saved_tensors, *ctx.numbers), *(None,) * OTHERS)


_operators = Operators("twinrun_attention")
backward = _operators.define(
    "backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? slopes, "
    f"Tensor? starts_q, Tensor? starts_k, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
)
attend = _operators.differentiable(
    f"forward({_INPUTS}) -> (Tensor, Tensor)", _forward, _fake_forward, _setup, _gradients
)
attend_to_cache = _operators.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor? slopes, float scale, int left, int right, "
    "float softcap) -> (Tensor, Tensor)",
    _decode,
    _fake_decode,
)
