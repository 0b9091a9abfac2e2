"""What a call does, written down while it runs: memory it makes, what it starts, what it keeps.

Every tensor that kernels write is made here. Of the arguments only sizes, strides, types and alignment decide
what a call does, never values, so it can be repeated for others alike; see entry.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Kinds of starts, in the order of entry.cpp's: kernels by driver, and torch's operations.
EMULATOR, CUDA, HIP, SUM, COPY = range(5)
_NO_CALLS = (0, 0, 0, 0, 0, 0, None)

# Tests fill with NaN what is handed out, so that nothing unwritten passes for a result.
poisoned = False


class Start(NamedTuple):
    """A kernel that was started, or an operation of torch, as entry.cpp repeats it."""

    driver: tuple[Any, ...]
    """The kind, then addresses of functions: of what starts a kernel, starts it early, enters the device's
    context, leaves it, and gives a tensor map another address; the context; what raises a status."""
    function: int = 0
    blocks: int = 0
    threads: int = 0
    shared_bytes: int = 0
    overlap: bool = False
    fields: Sequence[int] = ()
    """Words of eight bytes that hold the parameters; of a sum its dimensions."""
    parameters: Sequence[int] = (0,)
    """The word at which each parameter begins: a struct is one."""
    addresses: Sequence[tuple[int, int]] = ()
    """Words that are addresses, and the addresses; of torch's operations what is read and what is written."""
    maps: Sequence[tuple[int, int]] = ()
    """Words at which tensor maps begin, and the addresses in them."""
    shapes: Sequence[tuple[int, ...]] = ((), ())
    """Of torch's operations the shapes of what is read and written."""


@dataclass
class Recording:
    """What a call did so far."""

    made: list[Tensor] = field(default_factory=list)
    zeroed: list[bool] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
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


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory with zeros."""
    return _made(torch.zeros(shape, dtype=dtype, device=device), zeroed=True)


def summed(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the sums of a contiguous tensor over dimensions."""
    shape = tuple(size for dim, size in enumerate(tensor.shape) if dim not in dims)
    out = empty(shape, tensor.dtype, tensor.device)
    torch.sum(tensor, dims, out=out)
    _operated(SUM, tensor, out, fields=dims)
    return out


def converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor in a dtype."""
    if tensor.dtype is dtype:
        return tensor
    out = empty(tuple(tensor.shape), dtype, tensor.device).copy_(tensor)
    _operated(COPY, tensor, out, fields=())
    return out


def _operated(kind: int, source: Tensor, target: Tensor, fields: Sequence[int]) -> None:
    if local.active is not None:
        shapes = (tuple(source.shape), tuple(target.shape))
        addresses = ((0, source.data_ptr()), (1, target.data_ptr()))
        driver = (kind, *_NO_CALLS)
        local.active.starts.append(Start(driver, fields=fields, addresses=addresses, shapes=shapes))


def _made(tensor: Tensor, *, zeroed: bool = False) -> Tensor:
    if local.active is not None:
        local.active.made.append(tensor)
        local.active.zeroed.append(zeroed)
    return tensor.fill_(float("nan")) if poisoned and not zeroed else tensor
