"""What this rank does, told to a process beside it that ends it when it hangs. Imports without torch."""

from __future__ import annotations

import contextlib
import os

from twinrun.protocol.job import Job
from twinrun.train import watchdog

# The end of the pipe that `beat` writes to; none where nobody watches.
_told: list[int] = []
_step = 0


def watch(job: Job) -> None:
    """Start the process that watches this one; to be called once, before anything that may hang."""
    reader, writer = os.pipe()
    # A watchdog that is stopped must not stop what it watches.
    os.set_blocking(writer, False)
    watched = os.getpid()
    if os.fork() == 0:
        os.close(writer)
        watchdog.run(job, watched=watched, reader=reader)
    os.close(reader)
    _told.append(writer)


def beat(operation: str, *, step: int | None = None) -> None:
    """Say what is done from now on, and at which step, the one before where it is left out."""
    global _step  # noqa: PLW0603 - a process has one pulse
    _step = _step if step is None else step
    _tell(f"{_step}\t{operation}\n")


def end() -> None:
    """Say that all is done and well."""
    _tell(watchdog.FAREWELL)


def _tell(line: str) -> None:
    for descriptor in _told:
        # Nobody listens any more, or nobody has for long.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, line.encode())
