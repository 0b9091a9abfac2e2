"""What a run has submitted and not collected yet: a file a point, so that another process goes on with it."""

from __future__ import annotations

from pathlib import Path

from twinrun.foundation.errors import RunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen, load_json

FOLDER = "jobs"


class SchedulerSilentError(RunError):
    """A scheduler does not answer; what it was given may still run."""


class Pending(Frozen):
    """A launch that a scheduler has taken."""

    point: str
    place: int
    """Which of the attempts of the plan it is, counted from 0."""
    attempt: str
    """What the lines of its metrics carry."""
    scheduler: str
    site: str
    handle: str
    """How the scheduler calls it."""
    detached: bool
    """Whether it goes on when the process that follows it is interrupted."""


def remember(run: Path, pending: Pending) -> None:
    """Write that a launch was submitted, whole or not at all."""
    write_atomically(_file(run, pending.point), pending.model_dump_json() + "\n")


def forget_pending(run: Path, point: str) -> None:
    """Remove what was written of a launch that has been collected, or will never be."""
    _file(run, point).unlink(missing_ok=True)


def pending_of(run: Path, point: str) -> Pending | None:
    """Return what was submitted for a point and not collected, None where there is nothing."""
    file = _file(run, point)
    return load_json(file, Pending) if file.is_file() else None


def all_pending(run: Path) -> tuple[Pending, ...]:
    """Return all that a run has submitted and not collected."""
    return tuple(load_json(file, Pending) for file in sorted((run / FOLDER).glob("*.json")))


def _file(run: Path, point: str) -> Path:
    return run / FOLDER / f"{point}.json"
