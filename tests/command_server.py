"""Commands of twinrun, each in a fork of this process."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import invoke.main
import rich.console  # noqa: F401 - commands import it late

import twinrun
from tests.forks import ROOT, serve
from twinrun.planning.project import Project

# Models are built where they are first used, which else each fork would do anew.
project = Project(ROOT)
for recipe in project.recipes().values():
    project.stack(next(iter(recipe.recipe.stacks.current.values())))


def modules() -> Iterator[str]:
    """Name what commands import; all of it loads without a framework, unlike what runs in ranks."""
    for package in ("cli", "manifests", "planning", "results", "runs", "workloads"):
        path = [f"{folder}/{package}" for folder in twinrun.__path__]
        yield from (module.name for module in pkgutil.walk_packages(path, f"twinrun.{package}."))


def command(arguments: Sequence[str]) -> None:
    sys.argv = ["invoke", *arguments]
    sys.path.insert(0, str(Path.cwd()))
    invoke.main.program.run()


serve(command, modules=modules())
