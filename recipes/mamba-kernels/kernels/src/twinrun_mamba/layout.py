"""Tensors as kernels take them: an address and strides in elements, either times or channels adjacent."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Any

import torch
from torch import Tensor

Fields = tuple[int, ...]
LAYOUTS = ("channel-first", "token-major")
# Members of params.h that hold an address, and how many strides follow it: of a Sequence, of a Projection.
_STRIDES = {"a": 0, "s": 3, "p": 4}


class Parameters:
    """A struct of params.h, of fields of eight bytes: its size, and which of them hold addresses.

    kinds: a letter for each member: `s` a Sequence, `p` a Projection, `a` an address, `n` a number, `u` one
        without a sign.
    """

    def __init__(self, kinds: str) -> None:
        # Of each member, None for a number.
        self._strides = [_STRIDES.get(kind) for kind in kinds]
        self.fields = "".join(kind if kind in "nu" else "a" + "n" * _STRIDES[kind] for kind in kinds)
        self._struct = Struct("=" + self.fields.replace("u", "Q").replace("n", "q").replace("a", "q"))
        self.size = self._struct.size

    def pack(self, *members: Any) -> bytes:
        """Return the struct; a member with an address is a tensor, or None for zeros.

        Tensors must live until the kernel is started: the struct does not hold them.
        """
        fields: list[int] = []
        for strides, member in zip(self._strides, members):
            if strides is None:
                fields.append(member)
            elif member is None:
                fields += (0,) * (1 + strides)
            else:
                fields.append(member.data_ptr())
                if strides:
                    fields += member.stride()
        return self._struct.pack(*fields)


def is_time_adjacent(sequence: Tensor) -> bool:
    """Say how kernels go through (batch, channels, length): along channels only where times are apart."""
    return bool(sequence.stride(2) == 1 or sequence.stride(1) != 1)


def laid(time_adjacent: bool, *sequences: Tensor | None) -> list[Any]:
    """Return (batch, channels, length) each with adjacent times or channels, copied where they are not."""
    return [None if one is None else _laid(one, time_adjacent) for one in sequences]


def _laid(sequence: Tensor, time_adjacent: bool) -> Tensor:
    if sequence.stride(2 if time_adjacent else 1) == 1:
        return sequence
    # Not contiguous(), which leaves the stride of a dimension of size one as it is.
    return new_sequence(sequence, time_adjacent).copy_(sequence)


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """Return the tensors, each contiguous."""
    return [one if one is None or one.is_contiguous() else one.contiguous() for one in tensors]


def new_sequence(like: Tensor, time_adjacent: bool) -> Tensor:
    """Return memory for (batch, channels, length) of the type of `like`, without gaps."""
    batch, channels, length = like.shape
    if time_adjacent:
        return like.new_empty((batch, channels, length))
    return like.new_empty((batch, length, channels)).transpose(1, 2)


def new_projection(like: Tensor) -> Tensor:
    """Return memory for (batch, groups, states, length), without gaps, in the order of `like`."""
    batch, groups, states, length = like.shape
    if like.stride(3) == 1:
        return like.new_empty((batch, groups, states, length))
    return like.new_empty((batch, length, groups, states)).permute(0, 2, 3, 1)


def is_aligned(time_adjacent: bool, *sequences: Tensor | None) -> bool:
    """Say whether eight adjacent elements of all sequences can be moved in accesses of 16 bytes."""
    starts = strides = dtype_bytes = 0
    for one in sequences:
        if one is not None:
            starts, dtype_bytes = starts | one.data_ptr(), one.element_size()
            batch, channel, time = one.stride()
            strides |= batch | (channel if time_adjacent else time)
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
