"""A rank that stays: each point runs in a fork of a process that has imported what all points need.

A fork is a process of its own, so what a point leaves behind ends with it: memory of the device and what its
allocator counted, random state, variables, process groups, graphs that were compiled. Imports without torch.
"""

from __future__ import annotations

import os
import resource
import signal
import stat
import sys
import time
from pathlib import Path

from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.foundation.processes import end_with_parent
from twinrun.protocol.job import FollowingPoint
from twinrun.train.job_files import rank_variable

# A host that was killed names no further point, and one that lives does so within half of it.
PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.02
# Major numbers of character devices that hold nothing of a process: memory such as /dev/null, and terminals.
_HARMLESS = (1, 5, 136)
# The mapped files that the forking process had in memory: a fork has their pages when it touches them.
_file_bytes_before = 0


def next_job(first: Path, folder: Path) -> tuple[Path, int | None]:
    """Return the job of a point and the process that this is a fork of; once in each fork.

    The process that calls it waits for the forks and ends as the first that fails does; it returns only where
    it cannot be forked safely, with `first` and None, and its launcher starts other ranks for what follows.

    Args:
        folder: where the host names points, see `FollowingPoint`.
    """
    if not forks_safely():
        return first, None
    number = 0
    point: FollowingPoint | None = FollowingPoint(job=str(first), logs="")
    global _file_bytes_before  # noqa: PLW0603 - a process is forked from one
    _file_bytes_before = _file_bytes()
    while point:
        if not (child := _fork()):
            _print_to(point.logs)
            return Path(point.job), os.getppid()
        _end_like(_wait_for(child))
        write_atomically(folder / f"{number}-{rank_variable('RANK', 0)}", "")
        number += 1
        point = _named(folder / f"{number}.json")
    os._exit(0)


def untouched_bytes() -> int:
    """Return the bytes of libraries that a process without forks would hold and this fork has not touched."""
    return max(0, _file_bytes_before - _file_bytes())


def _file_bytes() -> int:
    """Return the bytes of mapped files that this process has in memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssFile:"))


def forks_safely() -> bool:
    """Say whether this process has one thread and no device open, without which forks are not whole."""
    # OpenBLAS ends its threads before a fork, and starts others where it computes again.
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    threads, opened = Path("/proc/self/task").iterdir(), Path("/proc/self/fd").iterdir()
    return len(list(threads)) == 1 and not any(_is_device(int(one.name)) for one in opened)


def _is_device(descriptor: int) -> bool:
    try:
        found = os.fstat(descriptor)
    except OSError:
        # The list itself was read through one.
        return False
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) not in _HARMLESS


def _fork() -> int:
    """Fork, and let what tells this process to end tell its fork; return 0 in the fork."""
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if child := os.fork():
        signal.signal(signal.SIGTERM, lambda number, _frame: os.kill(child, number))
    else:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return child


def _wait_for(child: int) -> int:
    """Return the exit status of a fork, negative for a signal."""
    # It keeps its number until nothing is sent to it any more.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end_like(status: int) -> None:
    """End as a fork has that failed, so that the launcher sees what it would see of a rank without forks."""
    if status < 0:
        # The fork has left its memory for who looks into it.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -status)
    if status:
        os._exit(status)


def _named(file: Path) -> FollowingPoint | None:
    """Wait until the host has named a point; return None where it does not."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_SECONDS)
    return load_json(file, FollowingPoint)


def _print_to(logs: str) -> None:
    """Print into the folder of the point; the first prints where the launcher has led it."""
    if not logs:
        return
    folder = Path(logs) / str(rank_variable("LOCAL_RANK", 0))
    folder.mkdir(parents=True, exist_ok=True)
    for descriptor, name in ((1, "stdout.log"), (2, "stderr.log")):
        opened = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
