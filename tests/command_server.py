"""Runs commands of twinrun, each in a fork of this process, which has imported what they need.

A line of standard input asks for one, as JSON: arguments, folder, variables, and files for what it prints.
A line of standard output says how it ended.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import invoke.main
import rich.console  # noqa: F401 - commands import it late

import twinrun
from twinrun.planning.project import Project

# All of them import without a framework but those that run in ranks.
for package in ("cli", "manifests", "planning", "results", "workloads"):
    path = [f"{folder}/{package}" for folder in twinrun.__path__]
    for module in pkgutil.walk_packages(path, f"twinrun.{package}."):
        import_module(module.name)

# Models are built where they are first used, which else each fork would do anew.
project = Project(Path(__file__).resolve().parents[1])
for recipe in project.recipes().values():
    project.stack(next(iter(recipe.recipe.stacks.current.values())))


def become(asked: dict[str, Any]) -> None:
    """Turn this process into the command."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["variables"])
    for number, name in enumerate((os.devnull, asked["stdout"], asked["stderr"])):
        opened = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["invoke", *asked["arguments"]]
    sys.path.insert(0, asked["folder"])
    invoke.main.program.run()


def finish(status: str | int | None) -> None:
    """End this process without tearing down the modules it shares, which takes longer than most commands."""
    if isinstance(status, str):
        sys.exit(status)  # prints it
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


for line in sys.stdin:
    process = os.fork()
    if process == 0:
        try:
            become(json.loads(line))
        except SystemExit as ended:
            finish(ended.code)
        finish(None)
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\n")
    sys.stdout.flush()
