"""Tensors as kernels take them: an address and strides in elements, either times or channels adjacent."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any, ClassVar

import torch
from torch import Tensor

from twinrun_mamba.memory import empty_like
from twinrun_mamba.recording import local

Fields = tuple[int, ...]
LAYOUTS = ("channel-first", "token-major")
ABSENT_SEQUENCE = (0, 0, 0, 0)


class Parameters:
    """A struct of params.h, of fields of eight bytes: its size, and which of them hold addresses.

    kinds: a letter for each member: `s` a Sequence, `p` a Projection, `a` an address, `n` a number, `u` one
        without a sign.
    """

    # No two structs are of one size.
    by_size: ClassVar[dict[int, Parameters]] = {}

    def __init__(self, kinds: str) -> None:
        fields = kinds.replace("s", "annn").replace("p", "annnn")
        struct = Struct("=" + fields.translate({ord("a"): "q", ord("n"): "q", ord("u"): "Q"}))
        self.fields, self.size, self.pack = fields, struct.size, struct.pack
        self.addresses = [place for place, kind in enumerate(fields) if kind == "a"]
        if self.by_size.setdefault(self.size, self) is not self:
            raise ValueError(f"{kinds}: another struct has {self.size} bytes, too")


def is_time_adjacent(sequence: Tensor) -> bool:
    """Say how kernels go through (batch, channels, length): along channels only where times are apart."""
    return bool(sequence.stride(2) == 1 or sequence.stride(1) != 1)


def contiguous_along(sequence: Tensor, time_adjacent: bool) -> Tensor:
    """Return (batch, channels, length) with adjacent times or channels, copied where they are not."""
    if sequence.stride(2 if time_adjacent else 1) == 1:
        return sequence
    if local.active is not None:
        local.active.once = True
    # Not contiguous(), which leaves the stride of a dimension of size one as it is.
    return new_sequence(sequence, time_adjacent).copy_(sequence)


def contiguous(tensor: Tensor | None) -> Any:
    """Return a contiguous tensor."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def new_sequence(like: Tensor, time_adjacent: bool) -> Tensor:
    """Return memory for (batch, channels, length) of the type of `like`, without gaps."""
    batch, channels, length = like.shape
    if time_adjacent:
        return empty_like(like, (batch, channels, length))
    return empty_like(like, (batch, length, channels)).transpose(1, 2)


def new_projection(like: Tensor) -> Tensor:
    """Return memory for (batch, groups, states, length), without gaps, in the order of `like`."""
    batch, groups, states, length = like.shape
    if like.stride(3) == 1:
        return empty_like(like, (batch, groups, states, length))
    return empty_like(like, (batch, length, groups, states)).permute(0, 2, 3, 1)


def sequence(tensor: Tensor | None) -> Fields:
    """Return the fields of a Sequence."""
    return ABSENT_SEQUENCE if tensor is None else (tensor.data_ptr(), *tensor.stride())


def projection(tensor: Tensor) -> Fields:
    """Return the fields of a Projection."""
    return (tensor.data_ptr(), *tensor.stride())


def address(tensor: Tensor | None) -> int:
    """Return where a tensor starts, 0 when there is none."""
    return 0 if tensor is None else tensor.data_ptr()


def is_aligned(sequences: Fields, time_adjacent: bool, dtype_bytes: int) -> bool:
    """Say whether eight adjacent elements of all sequences can be moved in accesses of 16 bytes."""
    starts = strides = 0
    others = sequences[2::4] if time_adjacent else sequences[3::4]
    for start, batch, other in zip(sequences[::4], sequences[1::4], others):
        starts |= start
        strides |= batch | other
    return not (starts | strides * dtype_bytes) & 15


def channel_first(sequence: Tensor, layout: str) -> Tensor:
    """Return (batch, channels, length) of what is in `layout`, or the other way round: a view."""
    return sequence if layout == LAYOUTS[0] else sequence.transpose(1, 2)


def cast(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    """Return a tensor in a dtype, with its gradient."""
    return tensor if tensor is None or tensor.dtype is dtype else tensor.to(dtype)


def copied_into(promised: Iterable[Tensor], found: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    """Return values in the memory order that is promised to compilers."""
    return tuple(place if value is None else place.copy_(value) for place, value in zip(promised, found))
