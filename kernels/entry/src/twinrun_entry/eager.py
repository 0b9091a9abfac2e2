"""Whether a call is seen by nobody but autograd, so that it may take the short way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Where torch lacks it, nothing is compiled as one graph either.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", lambda: False)
_PLAIN = (Tensor, torch.nn.Parameter)


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
