"""What ranks import at their start, read from the sources, so that a missing package is found before them."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine
from twinrun.foundation.errors import MachineError

# Standard library only: it runs in every environment, and imports none of what it looks for.
_PROGRAM = """
import importlib.util, json, sys
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps({"missing": missing}))
"""
_PROJECT = "twinrun"


def demand_packages(engine: Engine, packages: Iterable[str], *, name: str) -> None:
    """Raise MachineError where the interpreter of the ranks lacks one of `packages`.

    Args:
        name: of the engine, for the message.
    """
    wanted = tuple(sorted(packages))
    text = engine.read(Command(arguments=(PYTHON, "-c", _PROGRAM, *wanted), variables={}))
    missing = json.loads(text)["missing"]
    if missing:
        raise MachineError(
            "the interpreter of the ranks lacks packages that they import",
            place=f"--engine {name}",
            found=f"no {', no '.join(missing)}",
            allowed=wanted,
            hint="use --engine venv, which installs the lock of the stack, or install them there",
        )


def packages_of(script: Path | str, modules: Iterable[str], *, root: Path) -> frozenset[str]:
    """Return the names of the packages that ranks import, without the project's and the standard library's.

    Imports inside functions and `try` are left out: those of this project choose between frameworks.

    Args:
        script: what the ranks run, a file or a module of the project.
        modules: what else of the project they import when they start.
        root: the project.
    """
    folder = script.parent if isinstance(script, Path) else None
    waiting = [*modules, *(_imported(script) if isinstance(script, Path) else [script])]
    seen: set[str] = set()
    found: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        file = _file(name, root=root, folder=folder)
        if file is not None:
            waiting.extend(_imported(file))
        else:
            found.add(name.partition(".")[0])
    beside = {file.stem for file in folder.glob("*.py")} if folder else set()
    return frozenset(found - beside - sys.stdlib_module_names - {_PROJECT})


def _file(name: str, *, root: Path, folder: Path | None) -> Path | None:
    """Return the source of a module of the project, or of one beside the script."""
    if name.partition(".")[0] == _PROJECT:
        path = root / "src" / name.replace(".", "/")
        return next((one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()), None)
    beside = folder / f"{name}.py" if folder else None
    return beside if beside and beside.is_file() else None


def _imported(file: Path) -> Iterator[str]:
    """Yield the modules that a file imports whenever it is imported, with the packages around them."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)))
