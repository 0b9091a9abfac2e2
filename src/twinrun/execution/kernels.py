"""Packages of kernels that recipes carry: on the search path of ranks, compiled once, into the cache.

A package whose code is loaded kernel by kernel compiles each when it is first called, where ranks may write.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, Workspace, run_to_end
from twinrun.foundation.cache import locked
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.processes import end_of, last_lines
from twinrun.manifests.stack import SHARED_KERNELS

# The module that compiles a package for architectures.
COMPILE = "compile"
_COMPILERS = f"*/{COMPILE}.py"
# A package with this module can leave each kernel to its first call: `--first-use` looks for compilers alone.
UNITS = "units"
# Name of the emulation on a processor among architectures.
PROCESSOR = "cpu"
Say = Callable[[str], None]


def package_folders(root: Path, recipes: Sequence[str], *, own: Sequence[Path] = ()) -> tuple[Path, ...]:
    """Return the folders to import the kernels of `recipes` from, and those in folders of one's own."""
    folders = [*own, *(root / "recipes" / name / "kernels" for name in recipes)]
    return tuple(folder / "src" for folder in (*folders, root / SHARED_KERNELS)) if folders else ()


def kernel_variables(
    workspace: Workspace, *, archs: Sequence[str], engine: Engine, say: Say
) -> dict[str, str]:
    """Return the variables by which packages find their code, compiling what this machine has not yet.

    Where it cannot be compiled that is said, and the package itself says what it can do without.
    """
    found = {}
    for package in (path.parent for folder in workspace.packages for path in sorted(folder.glob(_COMPILERS))):
        variable = f"{package.name.upper()}_OBJECTS"
        objects = workspace.data / "kernels" / f"{package.name}-{'-'.join(archs)}-{_mark(package)}"
        if os.environ.get(variable):
            say(f"{variable} is set: {os.environ[variable]}")
        elif _compiled(package, objects, archs=archs, engine=engine, workspace=workspace, say=say):
            found[variable] = engine.inside(objects)
    return found


def _mark(package: Path) -> str:
    """Return what changes with every file that the compiled code depends on."""
    kernels = package.parents[1]
    sources = [*sorted((kernels / "csrc").rglob("*")), package / f"{COMPILE}.py"]
    content = b"\0".join(path.name.encode() + path.read_bytes() for path in sources if path.is_file())
    return sha256_of_bytes(content)[:12]


def _compiled(
    package: Path, objects: Path, *, archs: Sequence[str], engine: Engine, workspace: Workspace, say: Say
) -> bool:
    """Say whether `objects` holds the compiled code, making it if it does not."""
    objects.parent.mkdir(parents=True, exist_ok=True)
    name, partial, log = (
        package.name,
        objects.with_suffix(".part"),
        workspace.run / "log" / f"{package.name}.log",
    )
    with locked(Path(f"{objects}.lock")):
        if objects.is_dir():
            return True
        later = ("--first-use",) if (package / f"{UNITS}.py").is_file() else ()
        when = ", each kernel when it is first called" if later else ""
        say(f"compiling {name} for {', '.join(archs)}, once{when}: {objects}")
        shutil.rmtree(partial, ignore_errors=True)
        output = ("--output", engine.inside(partial))
        arguments = (PYTHON, "-m", f"{name}.{COMPILE}", *output, *later, "--archs", *archs)
        command = Command(arguments=arguments, variables={}, writes_data=True)
        if run_to_end(engine, command, log=log, waiting=lambda past: say(f"compiling {name}: {past} s")):
            say(f"{name} is not compiled; the whole log is {log}\n{last_lines(end_of(log))}")
            return False
        partial.rename(objects)
    return True
