"""What a call does, written down while it runs: memory it makes, kernels it starts, what it keeps.

Every tensor that kernels write is made here. Of the arguments only sizes, strides, types and alignment decide
what a call does, never values, so it can be repeated for others alike; see entry.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twinrun_mamba.drivers import Launch

# Tests fill with NaN what is handed out, so that nothing unwritten passes for a result.
poisoned = False


@dataclass
class Recording:
    """What a call did so far."""

    made: list[Tensor] = field(default_factory=list)
    # Each with what Driver.described returned.
    starts: list[tuple[tuple[Any, ...], Launch]] = field(default_factory=list)
    kept: Sequence[Tensor] = ()
    # A tensor was copied, or values were looked at.
    once: bool = False


class _Local(threading.local):
    active: Recording | None = None


local = _Local()


@contextmanager
def recording() -> Iterator[Recording]:
    """Write down what this thread does."""
    before, local.active = local.active, Recording()
    try:
        yield local.active
    finally:
        local.active = before


def not_repeated() -> None:
    """Write down that others alike may not be done the same way."""
    if local.active is not None:
        local.active.once = True


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory with arbitrary values, from torch's allocator, as graph capture and streams need."""
    return _made(torch.empty(shape, dtype=dtype, device=device))


def empty_like(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return memory of the type and on the device of `like`: sooner than by naming both."""
    return _made(like.new_empty(shape))


def _made(tensor: Tensor) -> Tensor:
    if local.active is not None:
        local.active.made.append(tensor)
    return tensor.fill_(float("nan")) if poisoned else tensor
