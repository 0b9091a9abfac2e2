"""Ranks that run points one after another, each in forks of their own: one submission after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from twinrun.execution.schedulers import Submission
from twinrun.foundation.files import write_atomically
from twinrun.protocol.allocation import RankReport
from twinrun.protocol.job import FollowingPoint

# Ranks wait twice as long: none may give up while a point is handed to the others.
PATIENCE_SECONDS = 30.0


@dataclass(kw_only=True)
class StayingRanks:
    """The submission of the point that the ranks are at; what fails ends them all, as it ends other ranks."""

    started: Submission
    kind: tuple[object, ...]
    """What the launches have in common that these ranks can run."""
    folder: Path
    """Where points are named, see `FollowingPoint`."""
    world_size: int
    number: int = 0
    """Which of their points they are at, counted from 0."""
    _ended: float | None = field(default=None, init=False)
    """When all ranks had ended it well."""
    _over: bool = field(default=False, init=False)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes of the ranks."""
        return self.started.nodes

    @property
    def handle(self) -> str:
        """Return what `adopt` finds the ranks by."""
        return self.started.handle

    def poll(self) -> int | None:
        """Return 0 when all ranks have ended the point, else as the ranks themselves end."""
        if self._ended is None and len(list(self.folder.glob(f"{self.number}-*"))) == self.world_size:
            self._ended = time.monotonic()
        return self.started.poll() if self._ended is None else 0

    def logs(self) -> tuple[Path, ...]:
        """Return the logs of the launcher that started the ranks."""
        return self.started.logs()

    def cancel(self) -> None:
        """End the ranks, unless they wait for a further point."""
        if self._ended is None:
            self.end()

    def end(self) -> None:
        """End the ranks."""
        if not self._over:
            self.started.cancel()
        self._over = True

    def take(self, kind: tuple[object, ...], point: FollowingPoint) -> bool:
        """Give the ranks their next point; return False where they do not wait for one, or for another."""
        waits = self._ended is not None and time.monotonic() - self._ended < PATIENCE_SECONDS
        if kind != self.kind or not waits or self.started.poll() is not None:
            return False
        self.number, self._ended = self.number + 1, None
        write_atomically(self.folder / f"{self.number}.json", point.model_dump_json() + "\n")
        return True


def processes(reports: Sequence[RankReport]) -> tuple[str, ...]:
    """Return the process of each rank in words, in their order."""
    return tuple(
        f"{one.process}, a fork of {one.forked_from}" if one.forked_from else f"{one.process}"
        for one in reports
        if one.process
    )
