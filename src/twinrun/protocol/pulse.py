"""What is known of a rank while it works, and its last words: `pulse/RANK.json` in its point's folder."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen

FOLDER = "pulse"


class RankState(Frozen):
    """One rank, as the process beside it sees it."""

    rank: Annotated[int, Field(ge=0)]
    host: str
    pid: int
    step: Annotated[int, Field(ge=0)] = 0
    """The optimizer step, or case, that it works on; 0 before the first."""
    operation: str
    """What it began last."""
    since: float = 0.0
    """When it began that, in seconds since 1970 by the clock of its machine."""
    end: Literal["done", "lost", "hung"] | None = None
    """`lost`: its process ended by itself or was killed; `hung`: it was killed here, for want of progress.
    Null while it works, and for ever where its machine died."""
    silent_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Time since it began `operation`, of one that hung."""
    process: str = ""
    """State of the process in the words of the kernel, of one that hung."""
    reaches_first: bool | None = None
    """Whether its machine reaches that of the first rank; null where nobody asked."""


class WatchedRank(Frozen):
    """What the process beside a rank is told of it; a part of the rank's job."""

    pid: int
    out: str
    """Folder of the point."""
    world_size: Annotated[int, Field(gt=0)]
    watchdog_seconds: Annotated[float, Field(gt=0)] | None
