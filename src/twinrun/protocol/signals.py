"""What is heard of ranks while they work: a pulse of each, and sniff tests that name slow ones.

A pulse is `pulse/RANK.json` in the folder of the point. In a sniff test every rank times the same matrix
product, and an exchange with each of its partners; a rank is slow where its time stands above the median of
all ranks by more than ranks differ anyway, sniff after sniff.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen

PULSE = "pulse"
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


SNIFFS = "sniffs.jsonl"
# A rank must be slower than the median by this share at least, and by so many deviations of the ranks' noise.
LEAST_EXCESS, DEVIATIONS = 0.05, 9.0
# As many sniffs must agree, of the newest WINDOW.
AGREEING, WINDOW = 3, 5


class Sniff(Frozen):
    """What all ranks measured at one step."""

    step: int
    compute: tuple[float, ...]
    """Seconds of the matrix product, by rank: the shortest of several."""
    exchange: tuple[float, ...]
    """Seconds of the fastest exchange of each rank: a rank with a slow link has no fast one."""
    reduce: float
    """Seconds of an all-reduce, which no rank can be blamed for."""
    seconds: float
    """What the whole sniff took."""


class Alarm(Frozen):
    """A rank that is slower than its peers."""

    step: int
    rank: int
    kind: Literal["compute", "exchange"]
    excess: float
    """Median share by which it was slower than the median of all ranks."""

    def text(self, host: str) -> str:
        """Return the alarm in words."""
        what = "computes" if self.kind == "compute" else "exchanges"
        much = f"{self.excess:.0%} slower than the others"
        return f"rank {self.rank} on {host} {what} {much}, from step {self.step}"


def alarms(sniffs: Sequence[Sniff]) -> tuple[Alarm, ...]:
    """Return the ranks that the newest sniffs agree on, none for fewer than three sniffs or ranks.

    The noise is that of all other ranks in the same sniffs, so other work on a machine raises the bar.
    """
    newest = sniffs[-WINDOW:]
    found = []
    for kind in ("compute", "exchange"):
        rows = [one.compute if kind == "compute" else one.exchange for one in newest]
        if len(rows) < AGREEING or not rows[0] or len(rows[0]) < AGREEING:
            continue
        excesses = [_excesses(row) for row in rows]
        for rank in range(len(rows[0])):
            own = [row[rank] for row in excesses]
            others = [one for row in excesses for place, one in enumerate(row) if place != rank]
            # Half of the values of a normal distribution lie within 0.6745 of its deviations.
            deviation = statistics.median(map(abs, others)) / 0.6745
            bar = max(math.log1p(LEAST_EXCESS), DEVIATIONS * deviation / math.sqrt(len(own)))
            if sum(one > bar for one in own) >= max(AGREEING, len(own) - 1) and statistics.median(own) > bar:
                excess = math.expm1(statistics.median(own))
                found.append(Alarm(step=newest[0].step, rank=rank, kind=kind, excess=excess))
    return tuple(found)


def _excesses(row: Sequence[float]) -> list[float]:
    """Return the logarithm of each rank's time over the median of the ranks."""
    middle = statistics.median(row)
    return [math.log(max(one, 1e-9) / max(middle, 1e-9)) for one in row]
