"""What is known of a rank while it works: `pulse/RANK.json` in its point's folder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen

FOLDER = "pulse"
# An operation that is done for the first time may compile, read, or wait for a rank that does.
FIRST_SECONDS = 1800.0
# So many files are written in a second, whatever the number of ranks.
WRITES_PER_SECOND = 64


def interval(world_size: int) -> float:
    """Return the seconds between two writes of one rank, which writes whether or not it goes on."""
    return max(1.0, world_size / WRITES_PER_SECOND)


class RankState(Frozen):
    """One rank, as it says itself."""

    rank: Annotated[int, Field(ge=0)]
    host: str
    pid: int
    step: Annotated[int, Field(ge=0)] = 0
    """The optimizer step, or case, that it works on; 0 before the first."""
    operation: str
    """What it began last."""
    since: float = 0.0
    """When it began that, in seconds since 1970 by the clock of its machine."""
    limit: Annotated[float, Field(gt=0)] = FIRST_SECONDS
    """Seconds that it may take: then the rank ends itself, and its log has the traceback of each thread."""
    end: Literal["done"] | None = None
    """Null while it works, and for ever where its process was ended."""
    quiet: Annotated[float, Field(ge=0)] = 0.0
    """Seconds between its last word and the newest of any rank, as the host finds it."""
    reaches_first: bool | None = None
    """Whether its machine reaches that of the first rank; null until half of `limit` is over."""
