"""One operation, three ways in: torch.library for compilers, autograd.Function, or bare without gradients.

torch.library's way costs tens of microseconds a call, so eager calls on plain tensors take the short one;
both run the same functions. Before torch 2.4 there is no torch.library.register_autograd: calls are eager
there and torch.compile breaks its graph at them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from twinrun_entry.eager import is_eager, wants_gradient

NAMESPACE = "twinrun_mamba"
HAS_LIBRARY = hasattr(torch.library, "register_autograd")
_library = torch.library.Library(NAMESPACE, "DEF")

Operation = Callable[..., Any]
Setup = Callable[[Any, tuple[Any, ...], Any], None]


def define(schema: str, run: Operation, fake: Operation) -> Operation:
    """Register an operation without gradients; return it as a function of positional arguments."""
    name = schema.partition("(")[0]
    if not HAS_LIBRARY:
        return run
    # Outputs are laid out after inputs, so a compiler may not lay inputs out anew.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    _library.define(schema, tags=tags)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    registered = getattr(torch.ops.twinrun_mamba, name).default
    return lambda *arguments: run(*arguments) if is_eager(arguments[0]) else registered(*arguments)


def define_differentiable(
    schema: str, run: Operation, fake: Operation, setup: Setup, backward: Operation
) -> Operation:
    """Register an operation whose gradients `backward` returns from what `setup` kept."""
    name = schema.partition("(")[0]
    define(schema, run, fake)
    eager = _function(name, run, setup, backward)
    if not HAS_LIBRARY:
        return eager.apply  # type: ignore[no-any-return]
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library)
    registered = getattr(torch.ops.twinrun_mamba, name).default

    def call(*arguments: Any) -> Any:
        if not is_eager(arguments[0]):
            return registered(*arguments)
        return eager.apply(*arguments) if wants_gradient(arguments) else run(*arguments)

    return call


def saving(backward: Operation, *, last_on_demand: bool = False) -> tuple[Setup, Operation]:
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


def _function(name: str, run: Operation, setup: Setup, backward: Operation) -> Any:
    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run(*arguments)
        setup(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)
