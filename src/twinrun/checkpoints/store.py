"""Where checkpoints are kept: what a folder and an object store both do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from twinrun.foundation.errors import RunError

# A step's folder, or the prefix of its objects.
STEP = "step-{:08d}"


class Sink(Protocol):
    """A file that is being written."""

    def write(self, data: memoryview | bytes, /) -> object:
        """Append `data`."""


class Source(Protocol):
    """A file that is being read, by several threads at once."""

    size: int

    def read_at(self, begin: int, size: int) -> bytearray:
        """Return up to `size` bytes from `begin` on."""


class Store(Protocol):
    """Checkpoints of one run under one place; each is there when `commit` has returned, or not at all.

    Every method raises MachineError where the place refuses.
    """

    place: str

    def claim(self, run: str) -> int:
        """Make `run` the writer of this place and return its fencing token; remove what dead writers left."""

    def begin(self, step: int, token: int, *, needed: int) -> None:
        """Prepare a save of `needed` bytes; refuse where they do not fit."""

    def create(self, step: int, token: int, name: str) -> AbstractContextManager[Sink]:
        """Write one file of a save, durable at the end of the block."""

    def commit(self, step: int, token: int, manifest: bytes) -> None:
        """Publish a save whose files are durable, and make it the latest; raises RunError when fenced off."""

    def abandon(self, step: int, token: int) -> None:
        """Remove what a failed save wrote."""

    def steps(self) -> list[int]:
        """Return the steps of all that is published, oldest first."""

    def latest(self) -> int | None:
        """Return the step that was published last, whether it is still there or not."""

    def manifest(self, step: int) -> bytes:
        """Return the content of the manifest of `step`; raises DamagedError where there is none."""

    def open(self, step: int, name: str) -> AbstractContextManager[Source]:
        """Read a file of `step`; raises DamagedError where there is none."""

    def file(self, step: int, name: str) -> str:
        """Return what a message calls a file of `step`."""

    def quarantine(self, step: int) -> str:
        """Put a bad checkpoint aside, where no run takes it, and return where."""

    def remove(self, step: int) -> None:
        """Remove a checkpoint."""


def fenced_off(place: str, *, found: object, ours: object) -> RunError:
    """Return what to say when another run has become the writer of a place."""
    return RunError(
        "another run writes its checkpoints here; nothing was overwritten",
        place=place,
        found=f"writer {found}",
        allowed=f"this run, writer {ours}",
        hint="give each run a place of its own",
    )
