"""Identifiers of the formulas that numbers are named after; an identifier is part of the number.

Those of model FLOP are the families': each class of shapes names its own and says where it stands.
"""

from __future__ import annotations

from twinrun.protocol.models import FAMILIES

BUS_BANDWIDTH = "bus-bandwidth/all-reduce"
"""2 (n - 1) / n times the bytes of a buffer over n ranks, a second, by PERFORMANCE.md of nccl-tests."""

FORWARD_SHARE = "forward-share/forward-over-wall"
"""Seconds in forward passes over wall seconds, both of the first rank and summed over tasks. As both have the
same requests, it is requests a second over those that the forward passes alone would reach."""

FORMULAS = (
    BUS_BANDWIDTH,
    FORWARD_SHARE,
    *(formula for shape in FAMILIES.values() for formula in shape.formulas),
)
