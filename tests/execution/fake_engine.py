"""An engine that runs nothing: it plays what a test says that each command would have done."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from twinrun.execution.engine import Command, Engine, NodeCommand, Workspace
from twinrun.execution.engines import ENGINES, Interpreter
from twinrun.foundation.processes import LocalProcess

NAME = "fake"


@dataclass(frozen=True, kw_only=True)
class Play:
    """What a started command does, one event a poll."""

    lines: Sequence[Mapping[str, Any] | str] = ()
    """Appended to the metrics; a text is written as it is, without its attempt or the end of a line."""
    result: Mapping[str, Any] | None = None
    """Written as result.json at the end."""
    hosts: Sequence[str] = ()
    """What the ranks report."""
    nodes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the first rank of a host says of it."""
    log: str = ""
    """What the launcher prints."""
    status: int = 0
    """Exit status after the last line."""
    interrupted: BaseException | None = None
    """Raised after the last line instead of an end."""


@dataclass
class Script:
    """What the engine plays, and what was asked of it."""

    play: Callable[[Mapping[str, Any]], Play]
    """From the job of a launch to what its ranks do."""
    python: str = "3.11.0"
    packages: Mapping[str, str] = field(default_factory=dict)
    opening: BaseException | None = None
    """Raised instead of opening the engine."""
    reading: BaseException | None = None
    """Raised instead of an answer to a short command."""
    starting: BaseException | None = None
    """Raised instead of starting a command."""
    started: list[NodeCommand] = field(default_factory=list)
    stopped: int = 0
    """Commands that were ended or had ended."""


class FakeEngine(Interpreter):
    """Renders as the running interpreter does, and plays its script."""

    def __init__(self, script: Script, workspace: Workspace) -> None:
        super().__init__(python="python", workspace=workspace)
        self._script = script

    def start(self, command: NodeCommand, log: Path) -> FakeRunning:
        if self._script.starting:
            raise self._script.starting
        self._script.started.append(command)
        return FakeRunning(self._script, command, log)

    def read(self, command: Command) -> str:
        if self._script.reading:
            raise self._script.reading
        return json.dumps({"python": self._script.python, "packages": dict(self._script.packages)})


class FakeRunning(LocalProcess):
    """Plays the launch of one job; a command without a job ends well at once."""

    def __init__(self, script: Script, command: NodeCommand, log: Path) -> None:
        self._script = script
        words = command.arguments
        file = Path(words[words.index("--job") + 1]) if "--job" in words else None
        self._job: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file else {}
        self._attempt = self._job.get("attempt") or command.variables.get("TWINRUN_ATTEMPT")
        self._play = script.play(self._job) if file else Play()
        self._waiting = list(self._play.lines)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(self._play.log, encoding="utf-8")
        for rank, host in enumerate(self._play.hosts):
            report = Path(self._job["out"], "ranks", f"{rank}.json")
            report.parent.mkdir(parents=True, exist_ok=True)
            content = {"rank": rank, "host": host, "node": self._play.nodes.get(host)}
            report.write_text(json.dumps(content), encoding="utf-8")

    def poll(self) -> int | None:
        if self._waiting:
            self._append(self._waiting.pop(0))
            return None
        if self._play.interrupted:
            raise self._play.interrupted
        if self._play.result is not None:
            text = json.dumps(self._play.result)
            Path(self._job["out"], "result.json").write_text(text, encoding="utf-8")
        return self._play.status

    def stop(self) -> None:
        self._script.stopped += 1

    def _append(self, line: Mapping[str, Any] | str) -> None:
        text = line if isinstance(line, str) else json.dumps({"attempt": self._attempt, **line}) + "\n"
        with Path(self._job["metrics"]).open("a", encoding="utf-8") as stream:
            stream.write(text)


def torchrun_report(rank: int, status: int) -> str:
    """Return what torchrun prints when a rank has failed."""
    return textwrap.dedent(f"""
        Failures:
          <NO_OTHER_FAILURES>
        Root Cause (first observed failure):
        [0]:
          rank      : {rank} (local_rank: {rank})
          exitcode  : {status} (pid: 1)
        """)


def kind(script: Script) -> type[Engine]:
    """Return the row of the engine that plays `script`."""

    class FakeKind(Engine):
        @classmethod
        def renderer(cls, *, workspace: Workspace, **_of: Any) -> FakeEngine:
            return FakeEngine(script, workspace)

        @classmethod
        def open_engine(cls, *, workspace: Workspace, **_of: Any) -> FakeEngine:
            if script.opening:
                raise script.opening
            return FakeEngine(script, workspace)

    return FakeKind


def register(script: Script, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make `script` an engine that is found as all others are, and return its name; no wait between polls."""
    monkeypatch.setitem(ENGINES, NAME, kind(script))
    monkeypatch.setattr("twinrun.execution.ranks.POLL_SECONDS", 0)
    monkeypatch.setattr("twinrun.execution.engine._POLL_SECONDS", 0)
    return NAME
