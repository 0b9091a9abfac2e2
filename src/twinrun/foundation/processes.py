"""Processes of this machine, started in a group of their own so that they end together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from twinrun.foundation.errors import MachineError, RunError, TwinrunError
from twinrun.foundation.redaction import without_credentials

# A rank needs a moment to close its process group; torchrun waits 30 s before it kills, we do not.
GRACE_SECONDS = 10.0
# Names a process and, through the environment they inherit, all that it starts.
_MARK = "TWINRUN_PROCESS"
# A message takes so much of a log: a rank may print gigabytes, and a line of it megabytes.
_LOG_BYTES, _LINE = 1 << 16, 500


# The process's own C library, loaded before anything is forked; the number is that of <linux/prctl.h>.
_LIBRARY = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the one that started it ends, however it ends."""
    _LIBRARY.prctl(_PR_SET_PDEATHSIG, number)


class LocalProcess:
    """A process with its own group; what it prints goes to one file.

    Where this process is killed, the other one is told to end.
    """

    stdin: int = subprocess.DEVNULL
    """What it reads, chosen before it is started."""

    def __init__(
        self, arguments: Sequence[str], *, variables: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._mark = uuid.uuid4().hex
        try:
            with log.open("ab") as stream:
                self._process = subprocess.Popen(
                    list(arguments),
                    env=os.environ | dict(variables) | {_MARK: self._mark},
                    cwd=folder,
                    stdin=self.stdin,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    # Ours alone, and a single system call.
                    preexec_fn=partial(end_with_parent, signal.SIGTERM),  # noqa: PLW1509
                )
        except OSError as error:
            raise MachineError(f"cannot start: {error.strerror}", place=arguments[0]) from None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Terminate the group, then kill what is left of it and of all that it started.

        torchrun gives each rank a session of its own, and stopped while it starts them it forgets some.
        """
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        wanted = f"{_MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            # Processes end while they are listed, and those of others are closed to us.
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def read_output(
    arguments: Sequence[str], *, variables: Mapping[str, str], folder: Path, seconds: float = 120
) -> str:
    """Run a short command and return its standard output.

    Raises:
        RunError: it failed or took too long; the message holds its last lines.
    """
    run = partial(tool_output, failure="the command failed", error=RunError, seconds=seconds)
    return run(arguments, variables=variables, folder=folder, place=" ".join(arguments[:4]))


def tool_output(
    arguments: Sequence[str],
    *,
    failure: str | None,
    absent: str | None = None,
    error: type[TwinrunError] = MachineError,
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
    umask: int = -1,
    seconds: float | None = None,
    **told: str | None,
) -> str:
    """Run a tool of this machine to its end and return its standard output.

    Args:
        failure: what is said where it fails, with its last lines; None where that is an answer too.
        absent: hint where it cannot be started.
        error: kind of error that is raised.
        told: what it says beside what the tool has printed: place, allowed, hint.

    Raises:
        TwinrunError: it cannot be started, or it failed.
    """
    try:
        done = subprocess.run(
            arguments,
            env=os.environ | dict(variables or {}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            # Not the locale's: what a child prints has no encoding that we could know.
            encoding="utf-8",
            errors="replace",
            umask=umask,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as refused:
        said = getattr(refused, "strerror", None) or str(refused)
        raise error(f"cannot start: {said}", place=arguments[0], hint=absent) from None
    if done.returncode and failure:
        found = last_lines(done.stderr or done.stdout)
        raise error(failure, found=found, **told)
    return done.stdout


def end_of(log: Path) -> str:
    """Return the last 64 KiB of what a process has printed to `log`, however much that was."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return stream.read(_LOG_BYTES).decode(errors="replace")


def last_lines(text: str, count: int = 15) -> str:
    """Return the last lines of `text` that are not blank, long ones cut, and without credentials."""
    lines = [line.rstrip()[: 4 * _LINE] for line in text.splitlines() if line.strip()][-count:]
    shown = without_credentials("\n".join(lines)).splitlines()
    cut = [line if len(line) <= _LINE else f"{line[:_LINE]} ..." for line in shown]
    return "\n    ".join(["", *cut])
