"""The package's operators, and how an operation on sequences keeps what its backward pass takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from twinrun_kernels.operators import Operators

operators = Operators("twinrun_mamba")
Operation = Callable[..., Any]


def saving(backward: Operation, *, last_on_demand: bool = False) -> tuple[Operation, Operation]:
    """Return how an operation on sequences keeps what `backward` takes, and what calls that.

    The operation takes tensors, an option, whether to make what it makes on demand, and the backend; it
    returns output, last state and what it keeps. `backward` takes the gradients of the first two, what was
    kept, the tensors, the option and the backend.
    last_on_demand: the last state is made on demand, and else has no gradient.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, option, demanded, backend = inputs
        ctx.options, ctx.kept = (option, backend), len(output[2:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1 if last_on_demand and not demanded else 2 :])
        ctx.save_for_backward(*output[2:], *tensors)

    def gradients(ctx: Any, out_gradient: Any, last_gradient: Any, *_: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        kept, inputs = saved[: ctx.kept], saved[ctx.kept :]
        if out_gradient is None:
            out_gradient = torch.zeros_like(inputs[0])
        found = backward(out_gradient, last_gradient, *kept, *inputs, *ctx.options)
        given = [None if tensor is None else gradient for tensor, gradient in zip(inputs, found)]
        # Neither seq_idx, the last tensor, nor the three options have one.
        return (*given, None, None, None, None)

    return setup, gradients
