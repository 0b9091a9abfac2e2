"""The operators of torch: forward and backward, with fake tensors and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinrun_mamba.ops import operators
from twinrun_mamba.ssd.launch import Call, run_backward, run_forward
from twinrun_mamba.ssd.sizes import Sizes

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial_states, Tensor? seq_idx, int chunk_size, bool softplus, float low, float high, bool tf32"
)
# Tensors of a call that have a gradient, and arguments that have none.
DIFFERENTIABLE, OTHERS = 9, 7


def _call(given: Any) -> Call:
    *tensors, chunk_size, softplus, low, high, tf32 = given
    return Call(*tensors, chunk_size=chunk_size, softplus=softplus, low=low, high=high, tf32=tf32)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return output, last states, and what is kept: steps, sums, first states, output before z."""
    *given, state_dtype = arguments
    x, initial = given[0], given[8]
    if x.is_meta:
        return _fake_forward(*arguments)
    if not x.numel():
        out, final, *rest = _fake_forward(*arguments)
        return (out, final.zero_() if initial is None else final.copy_(initial), *rest)
    call = _call(given)
    narrow = call.x.dtype is x.dtype
    out, final, steps, sums, states, ungated = run_forward(call, state_dtype if narrow else call.x.dtype)
    ungated = x.new_empty(0) if ungated is None else ungated.to(x.dtype)
    return out.to(x.dtype), final, steps, sums, states.to(state_dtype), ungated


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    x, B, z, chunk_size, state_dtype = (arguments[place] for place in (0, 3, 6, 10, -1))
    sizes = Sizes.of(x, B, chunk_size)
    wide = {"dtype": torch.float32}
    return (
        x.new_empty(x.shape),
        x.new_empty((sizes.batch, sizes.heads, sizes.P, sizes.N), **wide),
        x.new_empty((*sizes.by_head, sizes.Q), **wide),
        x.new_empty((*sizes.by_head, sizes.Q), **wide),
        x.new_empty(sizes.states, dtype=state_dtype),
        x.new_empty(0 if z is None else x.shape),
    )


def _backward(*arguments: Any) -> list[Tensor]:
    """Return the gradients of the first nine inputs, an empty one for each input that is None."""
    grad, final, steps, sums, states, ungated, *given = arguments
    x, tensors = given[0], given[:DIFFERENTIABLE]
    if x.is_meta:
        return _fake_backward(*arguments)
    if not x.numel():
        found = [x.new_empty(0) if one is None else torch.zeros_like(one) for one in tensors]
        if tensors[-1] is not None and final is not None:
            found[-1] = final.to(tensors[-1].dtype, copy=True)
        return found
    call = _call(given)
    wide = call.x.dtype
    kept = steps, sums, states if wide is x.dtype else states.to(wide), ungated.to(wide)
    made = run_backward(call, grad, final, *kept)
    return [
        x.new_empty(0) if tensor is None or one is None else one.to(tensor.dtype)
        for tensor, one in zip(tensors, made)
    ]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    given = arguments[-DIFFERENTIABLE - OTHERS + 1 :]
    return [
        given[0].new_empty(0) if one is None else one.new_empty(one.shape) for one in given[:DIFFERENTIABLE]
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = inputs[: DIFFERENTIABLE + 1]
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.numbers = inputs[len(tensors) : -1]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, final: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None and final is None:
        return (None,) * (DIFFERENTIABLE + OTHERS)
    *tensors, steps, sums, states, ungated = ctx.saved_tensors
    grad = torch.zeros_like(tensors[0]) if grad is None else grad
    found = backward(grad, final, steps, sums, states, ungated, *tensors, *ctx.numbers)
    return (*(None if of is None else one for of, one in zip(tensors, found)), *(None,) * OTHERS)


backward = operators.define(
    "ssd_backward(Tensor grad, Tensor? final, Tensor steps, Tensor sums, Tensor states, Tensor ungated, "
    f"{_INPUTS}) -> Tensor[]",
    _backward,
    _fake_backward,
)
forward = operators.differentiable(
    f"ssd_forward({_INPUTS}, ScalarType state_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    _setup,
    _gradients,
)
