"""What this rank does, told to a process beside it that ends it when it hangs. Imports without torch."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from twinrun.protocol.job import Job
from twinrun.protocol.pulse import WatchedRank
from twinrun.train import watchdog

# The end of the pipe that `beat` writes to; none where nobody watches.
_writers: list[int] = []
_step = 0


def watch(job: Job) -> None:
    """Start the process that watches this one; to be called once, before anything that may hang.

    A program of its own and no fork: libraries have started threads by then, and a lock that one of them
    holds stays locked in a fork for ever.
    """
    reader, writer = os.pipe()
    # A watchdog that is stopped must not stop what it watches.
    os.set_blocking(writer, False)
    watched = WatchedRank(
        pid=os.getpid(),
        out=job.out,
        world_size=job.world_size,
        watchdog_seconds=job.watchdog_seconds,
    )
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", watchdog.__name__, watched.model_dump_json()],
        os.environ,
        # Who reads what the rank prints to its end must not wait for the watchdog's too.
        file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0), (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
        # They are for the rank, which may go on to a step's end.
        setsigmask=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
    )
    os.close(reader)
    _writers.append(writer)


def beat(operation: str, *, step: int | None = None) -> None:
    """Say what is done from now on, and at which step, the one before where it is left out."""
    global _step  # noqa: PLW0603 - a process has one pulse
    _step = _step if step is None else step
    _tell(f"{_step}\t{operation}\n")


def end() -> None:
    """Say that all is done and well."""
    _tell(watchdog.FAREWELL)


def _tell(line: str) -> None:
    for descriptor in _writers:
        # Nobody listens any more, or nobody has for long.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, line.encode())
