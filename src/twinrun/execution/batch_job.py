"""A job of a scheduler that says only whether it still knows it; its script leaves the exit status."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path
from typing import Protocol

from twinrun.execution.batch import LOG, refuse_failed_set_up, written_status
from twinrun.execution.pending import SchedulerSilentError
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError
from twinrun.foundation.processes import last_lines
from twinrun.manifests.cluster import LoadedSite

_ANSWER_SECONDS = 60
# A scheduler that restarts is silent for a moment; one that stays away is gone.
PATIENCE_SECONDS = 60.0
CANCEL_SECONDS = 90.0
# A shared folder may show the status later than the scheduler forgets the job.
_SETTLE_SECONDS = 5.0


class BatchClient(Protocol):
    """What such a scheduler is asked."""

    site: LoadedSite

    def known(self, number: str) -> bool:
        """Say whether a job waits or runs; raises RunError, MachineError where there is no answer."""

    def end(self, number: str) -> None:
        """End a job; one that is not there is no error."""


def ask(site: LoadedSite, *arguments: str) -> str:
    """Return what a command of a site's scheduler prints.

    Raises:
        RunError: it refuses, in its own words, or does not answer.
        MachineError: it cannot be started.
    """
    command = [*site.site.client, *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError("no answer", place=arguments[0], found=f"{_ANSWER_SECONDS} s") from None
    except OSError as error:
        raise MachineError(
            f"cannot start: {error.strerror}",
            place=command[0],
            hint=f"run twinrun where the scheduler's commands are, or set {site.place}.client",
        ) from None
    if done.returncode:
        raise RunError("refused", place=arguments[0], found=last_lines(done.stderr or done.stdout, 4))
    return done.stdout


def submitted(site: LoadedSite, script: Path, *arguments: str) -> str:
    """Hand a script to the scheduler and return what it prints; raises InputError where it refuses."""
    try:
        return ask(site, *arguments, str(script)).strip()
    except RunError as error:
        raise InputError(
            f"{arguments[0]} refuses the job",
            place=site.place,
            found=str(error.found).strip(),
            hint=f"the options are the first lines of {script}",
        ) from None


class BatchJob:
    """A submitted job."""

    def __init__(self, number: str, *, client: BatchClient, logs: Path, point: str) -> None:
        self.handle = number
        self._client = client
        self._logs = logs
        self._point = point
        self._asked = 0.0
        self._answered = time.monotonic()
        self._ended = False

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the host names of the nodes, as the script has written them; empty while the job waits."""
        file = self._logs / "hosts"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        return tuple(line.split()[0] for line in lines if line.strip())

    def logs(self) -> tuple[Path, ...]:
        """Return the files of the script and of each node, as far as they are there."""
        agents = sorted(self._logs.glob("launcher-*.log"), key=lambda path: (len(path.name), path.name))
        return tuple(path for path in (self._logs / LOG, *agents) if path.exists())

    def poll(self) -> int | None:
        """Return the exit status, None until the job has ended; asks no oftener than the site wants.

        Raises:
            Interrupted: the job ended without a status: cancelled, out of time, or its node died.
            RunError: a set-up line failed, or the scheduler has not answered for a minute.
        """
        now = time.monotonic()
        if now - self._asked < self._client.site.site.poll_seconds:
            return None
        self._asked = now
        try:
            if self._client.known(self.handle):
                self._answered = now
                return None
        except (RunError, MachineError) as error:
            if now - self._answered > PATIENCE_SECONDS:
                raise SchedulerSilentError(
                    f"the scheduler has not answered for {PATIENCE_SECONDS:.0f} s",
                    place=self._point,
                    found=str(error.found or error.message).strip(),
                    hint=f"job {self.handle} may still run; when the scheduler is back, --resume goes on",
                ) from None
            return None
        self._ended = True
        return self._status()

    def _status(self) -> int:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (status := written_status(self._logs)) is None and time.monotonic() < deadline:
            time.sleep(0.2)
        if status is None:
            raise RunInterruptedError(
                f"job {self.handle} ended without an exit status",
                place=self._point,
                found="it was cancelled, out of time, or lost its node",
                hint="the same command with --resume runs the points that are left",
            )
        refuse_failed_set_up(status, site=self._client.site, logs=self._logs)
        return status

    def cancel(self) -> None:
        """End the job and wait until the scheduler knows it no more; one that has ended is no error."""
        if self._ended:
            return
        with contextlib.suppress(RunError, MachineError):
            self._client.end(self.handle)
            deadline = time.monotonic() + CANCEL_SECONDS
            while self._client.known(self.handle) and time.monotonic() < deadline:
                time.sleep(min(0.5, self._client.site.site.poll_seconds))
            self._ended = True
