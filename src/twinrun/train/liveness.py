"""What a rank does, told to a process beside it that writes it down, and ends a rank without progress.

A process, for a thread does not run in one that is stopped or that computes without giving way. This module
imports without torch.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable
from pathlib import Path

from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.processes import readable
from twinrun.protocol.job import Job
from twinrun.protocol.pulse import FOLDER, RankState, WatchedRank
from twinrun.train.job_files import rank_variable

# The program beside a rank, and what a rank says last.
MODULE = "twinrun.train.liveness"
FAREWELL = "done\n"
TICK_SECONDS = 0.25
# An operation that is done for the first time may compile, read, or wait for a rank that does.
FIRST_SECONDS = 1800.0
# Later it may take so many times its median, and at least as long as file systems are known to stall.
FACTOR, FLOOR_SECONDS = 10.0, 120.0
REMEMBERED = 50
# So many files are written in a second, whatever the number of ranks.
WRITES_PER_SECOND = 64
# A file system that hangs, or a host that does not answer, must not keep a rank that hangs.
PATIENCE_SECONDS = 1.0


class Watchdog:
    """Watches one rank."""

    def __init__(self, watched: WatchedRank, *, reader: int) -> None:
        self._seconds = watched.watchdog_seconds
        self._reader = reader
        self._state = RankState(
            rank=rank_variable("RANK", 0), host=platform.node(), pid=watched.pid, operation="starts"
        )
        # Now, for names are not resolved where nothing is reached.
        self._first = _first_address()
        self._file = Path(watched.out) / FOLDER / f"{self._state.rank}.json"
        self._every = max(1.0, watched.world_size / WRITES_PER_SECOND)
        self._spent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._silent = self._unwritten = 0.0
        self._last = time.monotonic()
        self._writer = threading.Thread()

    def run(self) -> None:
        """Return when the rank has ended, by itself or by us."""
        self._write()
        while True:
            ready = readable(self._reader, seconds=TICK_SECONDS)
            self._count()
            if ready:
                text = os.read(self._reader, 1 << 16).decode()
                if not text:
                    break
                self._hear(text.splitlines(keepends=True))
            elif os.getppid() != self._state.pid:
                # Others that the rank has started may hold its end of the pipe.
                break
            elif self._silent > self.limit():
                self._end_rank()
            if self._unwritten > self._every:
                self._write()
        if self._state.end is None:
            self._state = self._state.model_copy(update={"end": "lost"})
        # Nobody waits for it now but those who want its last words.
        self._write_last(patience=None)

    def limit(self) -> float:
        """Return for how many seconds the rank may be silent now."""
        spent = self._spent.get(self._state.operation)
        if not spent or self._state.end:
            return FIRST_SECONDS
        return self._seconds or max(FLOOR_SECONDS, FACTOR * statistics.median(spent))

    def _count(self) -> None:
        """Add the time since the last call, but none in which this process was stopped as well."""
        now = time.monotonic()
        passed = min(now - self._last, 2 * TICK_SECONDS)
        self._last = now
        self._silent += passed
        self._unwritten += passed

    def _hear(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line == FAREWELL:
                self._state = self._state.model_copy(update={"end": "done"})
                continue
            step, _, operation = line.rstrip("\n").partition("\t")
            self._spent[self._state.operation].append(self._silent)
            self._silent = 0.0
            self._state = self._state.model_copy(
                update={"step": int(step), "operation": operation, "since": time.time()}
            )

    def _end_rank(self) -> None:
        found = {"end": "hung", "silent_seconds": self._silent, "process": _process(self._state.pid)}
        self._state = self._state.model_copy(update=found | {"reaches_first": _reaches(self._first)})
        self._write_last(patience=PATIENCE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._state.pid, signal.SIGKILL)

    def _write(self) -> None:
        """Write the state beside the watching, unless the last one is still being written."""
        self._unwritten = 0.0
        if not self._writer.is_alive():
            self._writer = threading.Thread(target=_store, args=(self._file, self._state), daemon=True)
            self._writer.start()

    def _write_last(self, *, patience: float | None) -> None:
        """Write the state after what is being written; return without it where that takes too long."""
        if self._writer.ident:
            self._writer.join(patience)
        self._write()
        self._writer.join(patience)


def _store(file: Path, state: RankState) -> None:
    # A full disk is the rank's to tell.
    with contextlib.suppress(MachineError):
        write_atomically(file, state.model_dump_json() + "\n")


def _process(pid: int) -> str:
    """Return the state of a process and the function of the kernel that it waits in, if any."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        (state,) = (line.partition(":")[2].strip() for line in status.splitlines() if line[:6] == "State:")
        waits = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip("0")
        return f"{state} in {waits}" if waits else state
    return ""


def _first_address() -> tuple[str, int] | None:
    """Return where the first rank answers, None where it has no name or nobody knows it."""
    host, port = os.environ.get("MASTER_ADDR"), rank_variable("MASTER_PORT", 0)
    with contextlib.suppress(OSError):
        return (socket.gethostbyname(host), port) if host and port else None
    return None


def _reaches(address: tuple[str, int] | None) -> bool | None:
    """Say whether the machine at `address` answers, if only to refuse."""
    if address is None:
        return None
    try:
        socket.create_connection(address, timeout=PATIENCE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


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
        [sys.executable, "-m", MODULE, watched.model_dump_json()],
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
    _tell(FAREWELL)


def _tell(line: str) -> None:
    for descriptor in _writers:
        # Nobody listens any more, or nobody has for long.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, line.encode())


if __name__ == "__main__":
    Watchdog(WatchedRank.model_validate_json(sys.argv[1]), reader=sys.stdin.fileno()).run()
    # A write that hangs is not waited for.
    os._exit(0)
