"""Where every tensor that kernels write comes from."""

from __future__ import annotations

import torch
from torch import Tensor

from twinrun_mamba.recording import local

# Tests fill with NaN what is handed out, so that nothing unwritten passes for a result.
poisoned = False


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory with arbitrary values, from torch's allocator, as graph capture and streams need."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if local.active is not None:
        local.active.made.append(made)
    return made.fill_(float("nan")) if poisoned else made


def empty_like(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return memory of the type and on the device of `like`: sooner than by naming both."""
    made = like.new_empty(shape)
    if local.active is not None:
        local.active.made.append(made)
    return made.fill_(float("nan")) if poisoned else made
