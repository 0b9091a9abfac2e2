"""What ranks find: packages, variables, and the kernels that recipes carry, compiled once into the cache.

A package whose code is loaded kernel by kernel compiles each when it is first called, where ranks may write.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, Say, Workspace, run_to_end
from twinrun.foundation.cache import locked
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import end_of, last_lines
from twinrun.foundation.redaction import without_credentials
from twinrun.manifests.stack import SHARED_KERNELS, LoadedStack, normalise, pins

# Standard library only: it runs in every environment, whatever is installed there.
_PROGRAM = """
import importlib.metadata, json, platform
packages = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), "packages": packages}))
"""
# Names of the variables that a record holds.
_VARIABLES = Path(__file__).with_name("variables.txt")
# The module that compiles a package for architectures, and the one that is there where each kernel can be
# left to its first call: `--first-use` looks for compilers alone.
COMPILE, UNITS = "compile.py", "units.py"
# Name of the emulation on a processor among architectures.
PROCESSOR = "cpu"


class PythonEnvironment(Frozen):
    """An interpreter and what is installed for it."""

    python: str
    packages: dict[str, str]


def inspect(engine: Engine) -> PythonEnvironment:
    """Ask the interpreter of `engine` for its version and packages; raises RunError."""
    facts = json.loads(engine.read(Command(arguments=(PYTHON, "-c", _PROGRAM), variables={})))
    packages = {normalise(name): version for name, version in facts["packages"].items() if name}
    return PythonEnvironment(python=facts["python"], packages=packages)


def lock_differences(installed: PythonEnvironment, stack: LoadedStack, root: Path) -> dict[str, str]:
    """Name each installed package that is not the locked one, and the direct requirements that are absent."""
    pinned = stack.locked(root)
    direct = pins((root / stack.folder / "requirements.in").read_text(encoding="utf-8"))
    return {
        name: f"{installed.packages.get(name, 'absent')}, lock has {' or '.join(versions)}"
        for name, versions in sorted(pinned.items())
        if (name in installed.packages or name in direct) and installed.packages.get(name) not in versions
    }


def steering_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a run, of the names in variables.txt; secrets are hidden."""
    lines = _VARIABLES.read_text(encoding="utf-8").splitlines()
    allowed = {name for line in lines if not line.startswith("#") for name in line.split()}
    return {name: without_credentials(environment[name]) for name in sorted(allowed & environment.keys())}


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
    compilers = (one for folder in workspace.packages for one in sorted(folder.glob(f"*/{COMPILE}")))
    for package in (one.parent for one in compilers):
        variable = f"{package.name.upper()}_OBJECTS"
        objects = workspace.data / "kernels" / f"{package.name}-{'-'.join(archs)}-{_mark(package)}"
        if os.environ.get(variable):
            say(f"{variable} is set: {os.environ[variable]}")
        elif _compiled(package, objects, archs=archs, engine=engine, run=workspace.run, say=say):
            found[variable] = engine.inside(objects)
    return found


def _mark(package: Path) -> str:
    """Return what changes with every file that the compiled code depends on."""
    sources = [*sorted((package.parents[1] / "csrc").rglob("*")), package / COMPILE]
    content = b"\0".join(path.name.encode() + path.read_bytes() for path in sources if path.is_file())
    return sha256_of_bytes(content)[:12]


def _compiled(
    package: Path, objects: Path, *, archs: Sequence[str], engine: Engine, run: Path, say: Say
) -> bool:
    """Say whether `objects` holds the compiled code, making it if it does not."""
    objects.parent.mkdir(parents=True, exist_ok=True)
    name, partial = package.name, objects.with_suffix(".part")
    log = run / "log" / f"{name}.log"
    with locked(Path(f"{objects}.lock")):
        if objects.is_dir():
            return True
        later = ("--first-use",) if (package / UNITS).is_file() else ()
        when = ", each kernel when it is first called" if later else ""
        say(f"compiling {name} for {', '.join(archs)}, once{when}: {objects}")
        shutil.rmtree(partial, ignore_errors=True)
        output = ("--output", engine.inside(partial))
        arguments = (PYTHON, "-m", f"{name}.{COMPILE[:-3]}", *output, *later, "--archs", *archs)
        command = Command(arguments=arguments, variables={}, writes_data=True)
        if run_to_end(engine, command, log=log, waiting=lambda past: say(f"compiling {name}: {past} s")):
            say(f"{name} is not compiled; the whole log is {log}\n{last_lines(end_of(log))}")
            return False
        partial.rename(objects)
    return True
