"""Numbers that decide how kernels are launched, by architecture.

A result has the same bits on every device. So whatever decides the order of a sum, such as the parts into
which time and batch go, is a function of sizes and of numbers that are the same everywhere: those stand in
scan_kernels.py and conv_kernels.py. Here is what decides time alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Timing:
    """What changes how long a launch takes, and no bit of what it computes."""

    # While a first kernel has blocks on some multiprocessors, those of one that overlaps it gather on the
    # others, which takes longer than it saves unless there is room for all of both, or so many that they are
    # everywhere.
    overlap_room: int
    overlap_many: int
    # Elements of a convolution from which a lane does many steps, which is less work; fewer make enough
    # blocks of a small tensor. Aligned rows must be long, too, and of 16 bits five times as many.
    medium_elements: int
    large_elements: int
    long_row: int


# An H200, of 132 multiprocessors.
MEASURED = Timing(
    overlap_room=132, overlap_many=330, medium_elements=2**21, large_elements=2**22, long_row=2048
)
# Architectures that were measured; the others are launched as the first is.
TIMING: Mapping[str, Timing] = MappingProxyType({"sm_90": MEASURED})


def timing(arch: str) -> Timing:
    """Return what holds for an architecture as kernels.json names it."""
    return TIMING.get(arch, MEASURED)
