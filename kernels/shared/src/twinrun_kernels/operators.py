"""One operation, two ways in: eager calls on plain tensors run it at once, all else sees torch.library.

The way through torch.library costs tens of microseconds a call. Both run the same functions. Outputs are laid
out after inputs, so a compiler may not lay inputs out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Function = Callable[..., Any]
is_compiling: Callable[[], bool] = torch.compiler.is_compiling
_PLAIN = (Tensor, torch.nn.Parameter)
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def is_eager(tensor: Any) -> bool:
    """Say whether no compiler, mode, transform or subclass looks at what is done with a tensor."""
    return (
        not is_compiling()
        and type(tensor) in _PLAIN
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
    )


def wants_gradient(arguments: Sequence[Any]) -> bool:
    """Say whether autograd will ask for the gradient of any of these."""
    if torch.is_grad_enabled():
        # Half the time of any().
        for t in arguments:
            if isinstance(t, Tensor) and t.requires_grad:
                return True
    return False


class Operators:
    """The operators of a package, in a namespace of torch's."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "DEF")

    def define(self, schema: str, run: Function, fake: Function) -> Function:
        """Register an operation without gradients; return it as a function of positional arguments."""
        name = schema.partition("(")[0]
        self._library.define(schema, tags=_TAGS)
        # Without the checks that torch.library.custom_op makes in Python at each call.
        self._library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self._namespace}::{name}", fake, lib=self._library)
        registered = getattr(getattr(torch.ops, self._namespace), name).default
        return lambda *arguments: run(*arguments) if is_eager(arguments[0]) else registered(*arguments)

    def differentiable(
        self, schema: str, run: Function, fake: Function, setup: Function, backward: Function
    ) -> Function:
        """Register an operation whose gradients `backward` returns from what `setup` kept."""
        name = schema.partition("(")[0]
        self.define(schema, run, fake)
        torch.library.register_autograd(
            f"{self._namespace}::{name}", backward, setup_context=setup, lib=self._library
        )
        registered = getattr(getattr(torch.ops, self._namespace), name).default
        with_gradient = _function(name, run, setup, backward).apply

        def call(*arguments: Any) -> Any:
            if not is_eager(arguments[0]):
                return registered(*arguments)
            return with_gradient(*arguments) if wants_gradient(arguments) else run(*arguments)

        return call


def _function(name: str, run: Function, setup: Function, backward: Function) -> Any:
    """Return the same for eager calls: autograd alone, without torch.library."""

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run(*arguments)
        setup(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    return type(name, (torch.autograd.Function,), members)
