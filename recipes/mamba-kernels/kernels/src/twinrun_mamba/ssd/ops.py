"""The operators of torch: forward and backward, with fake tensors and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from twinrun_entry.entry import ask_for
from twinrun_entry.recording import converted, local

from twinrun_mamba.ops import define, define_differentiable
from twinrun_mamba.ssd.launch import Inputs, Kept, as_type, run_forward
from twinrun_mamba.ssd.launch_backward import run_backward
from twinrun_mamba.ssd.sizes import Sizes

_INPUTS = (
    "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial_states, Tensor? seq_idx, int chunk_size, bool softplus, float low, float high, bool tf32"
)
# Tensors of a call that have a gradient, and arguments that have none.
DIFFERENTIABLE, OTHERS = 9, 7


def _inputs(given: tuple[Any, ...]) -> tuple[Inputs, Sizes]:
    *tensors, chunk_size, softplus, low, high, tf32 = given
    inputs = Inputs.of(*tensors, softplus=softplus, low=low, high=high, tf32=tf32)
    return inputs, Sizes.of(inputs.x, inputs.B, chunk_size)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Return output, last states, and what is kept: steps, sums, first states, output before z."""
    *given, state_dtype = arguments
    x, z, initial = given[0], given[6], given[8]
    if x.is_meta:
        return _fake_forward(*arguments)
    if x.is_cuda:
        ask_for()
    inputs, sizes = _inputs(tuple(given))
    if not x.numel():
        out, final, *rest = _fake_forward(*arguments)
        return (out, final.zero_() if initial is None else final.copy_(initial), *rest)
    wide = inputs.x.dtype if inputs.x.dtype != x.dtype else state_dtype
    out, final, kept = run_forward(inputs, sizes, wide)
    ungated = x.new_empty(0) if kept.ungated is None else as_type(kept.ungated, x.dtype)
    states = as_type(kept.states, state_dtype)
    if local.active is not None:
        local.active.kept = (kept.steps, kept.sums, states, *(() if z is None else (ungated,)))
    return as_type(out, x.dtype), final, kept.steps, kept.sums, states, ungated


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    x, _, _, B, *_ = arguments
    chunk_size, state_dtype = arguments[10], arguments[-1]
    sizes = Sizes.of(x, B, chunk_size)
    wide = {"dtype": torch.float32}
    return (
        x.new_empty(x.shape),
        x.new_empty((sizes.batch, sizes.heads, sizes.P, sizes.N), **wide),
        x.new_empty((*sizes.by_head, sizes.Q), **wide),
        x.new_empty((*sizes.by_head, sizes.Q), **wide),
        x.new_empty(sizes.states, dtype=state_dtype),
        x.new_empty(0 if arguments[6] is None else x.shape),
    )


def _backward(
    grad: Tensor,
    final: Tensor | None,
    steps: Tensor,
    sums: Tensor,
    states: Tensor,
    ungated: Tensor,
    *given: Any,
) -> list[Tensor]:
    """Return the gradients of the first nine inputs, an empty one for each input that is None."""
    x, dt, A, B, C, D, z, dt_bias, initial = given[:DIFFERENTIABLE]
    tensors = (x, dt, A, B, C, D, z, dt_bias, initial)
    if x.is_meta:
        return _fake_backward(*given)
    if not x.numel():
        return _of_nothing(tensors, final)
    inputs, sizes = _inputs(given)
    narrow = inputs.x.dtype == x.dtype
    kept = Kept(
        steps=steps,
        sums=sums,
        states=states if narrow else states.to(inputs.x.dtype),
        ungated=None if z is None else ungated.to(inputs.x.dtype),
    )
    found = list(run_backward(inputs, sizes, kept, grad, final))
    made = [
        x.new_empty(0) if tensor is None or one is None else converted(one, tensor.dtype)
        for tensor, one in zip(tensors, found)
    ]
    # Two that were added up together share their memory, which results of an operator of torch must not.
    if local.active is not None:
        return made
    return [one.clone() if one.untyped_storage().nbytes() > one.nbytes else one for one in made]


def _of_nothing(tensors: tuple[Tensor | None, ...], final: Tensor | None) -> list[Tensor]:
    x = tensors[0]
    assert x is not None
    found = [x.new_empty(0) if one is None else torch.zeros_like(one) for one in tensors]
    if tensors[-1] is not None and final is not None:
        found[-1] = final.to(tensors[-1].dtype, copy=True)
    return found


def _fake_backward(*arguments: Any) -> list[Tensor]:
    given = arguments[-DIFFERENTIABLE - OTHERS + 1 :]
    x = given[0]
    return [x.new_empty(0) if one is None else one.new_empty(one.shape) for one in given[:DIFFERENTIABLE]]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, _, _, _, _, _, _ = inputs
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
    given = tensors[:DIFFERENTIABLE]
    return (*(None if of is None else one for of, one in zip(given, found)), *(None,) * OTHERS)


backward = define(
    "ssd_backward(Tensor grad, Tensor? final, Tensor steps, Tensor sums, Tensor states, Tensor ungated, "
    f"{_INPUTS}) -> Tensor[]",
    _backward,
    _fake_backward,
)
forward = define_differentiable(
    f"ssd_forward({_INPUTS}, ScalarType state_dtype) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    _setup,
    _gradients,
)
