"""Ranks of a script, each a fork of this process; the arguments are the modules that it imports for them."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn


def serve() -> None:
    """Fork the ranks that each line of standard input asks for, and print how they ended."""
    # What modules print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        import_module(name)
    for line in sys.stdin:
        ranks = set()
        for asked in json.loads(line):
            if not (process := os.fork()):
                become(asked)
            ranks.add(process)
        answers.write(f"{ended(ranks)}\n")
        answers.flush()


def become(asked: Mapping[str, Any]) -> NoReturn:
    """Be a rank, without tearing down the modules it shares, which takes longer than most commands."""
    os.environ.clear()
    os.environ.update(asked["variables"])
    for number, name in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    status: str | int | None = None
    try:
        run(asked["arguments"])
    except SystemExit as end:
        status = end.code
    if isinstance(status, str):
        sys.exit(status)  # prints it
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


def run(arguments: Sequence[str]) -> None:
    """Run a script, or a module by its name, as the interpreter does."""
    script = arguments[0]
    sys.argv = list(arguments)
    folders = [str(Path(script).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    sys.path[:0] = [one for one in folders if one]
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def ended(waiting: set[int]) -> int:
    """Wait for all; the first that fails ends the others, and its status is returned."""
    first = 0
    while waiting:
        process, status = os.wait()
        waiting.discard(process)
        if status and not first:
            first = os.waitstatus_to_exitcode(status)
            for other in waiting:
                os.kill(other, signal.SIGKILL)
    return first


serve()
