"""The machines that ranks ran on, which need not be the one that started them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from twinrun.foundation.manifest import Frozen


class Allocation(Frozen):
    """What a scheduler gave to one start."""

    scheduler: str
    nodes: Annotated[tuple[str, ...], Field(min_length=1)]
    """Host names in the order of their first ranks."""


class RankReport(Frozen):
    """What each rank says of itself, in `ranks/<rank>.json` of the folder of its point."""

    rank: Annotated[int, Field(ge=0)]
    host: str
    """Name of the machine, as its kernel has it."""
