"""One command of twinrun as a step of a longer session: shown while it runs, ended when its time is over."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import duration

SHOWN_LINES = 40
# A run that is told to stop ends its ranks and says where they are.
GRACE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of twinrun, and how long it may take."""

    name: str
    command: tuple[str, ...]
    minutes: float
    usual: tuple[int, ...] = (0, 1)
    """Exit codes after which the session has what it wants of this step."""

    def line(self) -> str:
        """Return the step as one types it, with its limit."""
        return f"invoke {shlex.join(self.command)}  (at most {duration(self.minutes * 60)})"


class StepResult(Frozen):
    """How a step ended."""

    name: str
    command: tuple[str, ...]
    exit_code: int
    usual: bool
    """Whether the session has what it wanted of it."""
    seconds: float
    timed_out: bool
    printed: Any
    """The JSON that it printed; null where it printed none."""
    said: tuple[str, ...]
    """The last lines of its messages."""

    def line(self) -> str:
        """Return how the step ended in one line."""
        why = ", stopped at its limit" if self.timed_out else ""
        return f"{self.name}: exit code {self.exit_code} after {duration(self.seconds)}{why}"

    def run_folder(self) -> Path | None:
        """Return the folder of the run that this step made and recorded."""
        record = self.printed.get("record") if isinstance(self.printed, dict) else None
        return Path(record).parent if record else None


def perform(step: Step, *, root: Path) -> StepResult:
    """Run a step in the checkout `root`; its messages go to standard error as they come."""
    began, over = time.monotonic(), threading.Event()
    said: deque[str] = deque(maxlen=SHOWN_LINES)
    command = [sys.executable, "-m", "invoke", *step.command]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:

        def stop() -> None:
            over.set()
            process.send_signal(signal.SIGINT)
            last.start()

        limit, last = threading.Timer(step.minutes * 60, stop), threading.Timer(GRACE_SECONDS, process.kill)
        assert process.stderr is not None
        shown = threading.Thread(target=_show, args=(process.stderr, said))
        shown.start()
        limit.start()
        try:
            assert process.stdout is not None
            printed = process.stdout.read()
            process.wait()
        finally:
            for timer in (limit, last):
                timer.cancel()
            shown.join()
    return StepResult(
        name=step.name,
        command=step.command,
        exit_code=process.returncode,
        usual=process.returncode in step.usual and not over.is_set(),
        seconds=round(time.monotonic() - began, 1),
        timed_out=over.is_set(),
        printed=_json(printed),
        said=tuple(said),
    )


def _show(stream: Any, said: deque[str]) -> None:
    for line in stream:
        said.append(line.rstrip())
        sys.stderr.write(line)
        sys.stderr.flush()


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
