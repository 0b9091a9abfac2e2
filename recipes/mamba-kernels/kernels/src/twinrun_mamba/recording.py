"""What a call did, written down while it runs: the memory it made, the kernels it started, what it kept.

Of the arguments only sizes, strides, types and alignment decide that, never values, so it can be repeated for
others alike; see entry.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Start:
    """A kernel that was started; the names are those of Driver.launch, `driver` is Driver.described()."""

    driver: tuple[Any, ...]
    function: int
    blocks: int
    threads: int
    shared_bytes: int
    overlap: bool
    params: bytes


@dataclass
class Recording:
    """What a call did so far."""

    made: list[Tensor] = field(default_factory=list)
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
