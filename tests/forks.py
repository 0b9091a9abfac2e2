"""Processes that fork where what they need is imported, which takes longer than they do."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Forked:
    """A process to be forked, by what it has of its own."""

    arguments: Sequence[str]
    folder: str
    variables: dict[str, str]
    stdout: str
    stderr: str


class ForkServer:
    """A module that ends in `serve`, run by an interpreter of its own."""

    def __init__(self, module: str, *arguments: str, variables: Mapping[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._server.communicate)

    def run(self, processes: Sequence[Forked]) -> int:
        """Run processes side by side; the first that fails ends the others, and its status is returned."""
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{json.dumps([asdict(one) for one in processes])}\n")
        server.stdin.flush()
        # Unlike `select`, this takes descriptors above 1,023.
        waiting = select.poll()
        waiting.register(server.stdout, select.POLLIN)
        if not waiting.poll(PATIENCE_SECONDS * 1000):
            os.killpg(server.pid, signal.SIGKILL)
            raise TimeoutError(processes[0].arguments)
        return int(server.stdout.readline())


def serve(run: Callable[[Sequence[str]], object], *, modules: Iterable[str]) -> None:
    """Fork the processes that each line of standard input asks for, and print how they ended.

    Args:
        run: what a process does with its arguments.
        modules: what it needs.
    """
    # What modules print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in modules:
        import_module(name)
    for line in sys.stdin:
        processes = [_fork(Forked(**asked), run) for asked in json.loads(line)]
        answers.write(f"{_ended(processes)}\n")
        answers.flush()


def _fork(asked: Forked, run: Callable[[Sequence[str]], object]) -> int:
    process = os.fork()
    if process == 0:
        _become(asked, run)
    return process


def _become(asked: Forked, run: Callable[[Sequence[str]], object]) -> NoReturn:
    os.chdir(asked.folder)
    os.environ.clear()
    os.environ.update(asked.variables)
    for number, name in enumerate((os.devnull, asked.stdout, asked.stderr)):
        opened = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    status: str | int | None = None
    try:
        run(asked.arguments)
    except SystemExit as ended:
        status = ended.code
    _finish(status)


def _finish(status: str | int | None) -> NoReturn:
    """End this process without tearing down the modules it shares, which takes longer than most commands."""
    if isinstance(status, str):
        sys.exit(status)  # prints it
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


def _ended(processes: Sequence[int]) -> int:
    waiting, first = set(processes), 0
    while waiting:
        process, status = os.wait()
        waiting.discard(process)
        if status and not first:
            first = os.waitstatus_to_exitcode(status)
            for other in waiting:
                os.kill(other, signal.SIGKILL)
    return first
