"""The software a run really had, and the state of the project's files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine
from twinrun.foundation.errors import MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.redaction import without_credentials
from twinrun.manifests.stack import LoadedStack, normalise, pins

# Standard library only: it runs in every environment, whatever is installed there.
_PROGRAM = """
import importlib.metadata, json, platform
packages = {item.metadata["Name"]: item.version for item in importlib.metadata.distributions()}
print(json.dumps({"python": platform.python_version(), "packages": packages}))
"""

# Names of the variables that a record holds.
_VARIABLES = Path(__file__).with_name("variables.txt")


# The packages that files import at their beginning, and PyTorch, whose ranks every launcher starts.
_ABSENT = """
import importlib.util, pathlib, re, sys
files = [pathlib.Path(name) for name in sys.argv[1:] if name.endswith(".py")]
sys.path[:0] = [str(file.parent) for file in files]
found = {name for name in sys.argv[1:] if not name.endswith(".py")}
found |= {name for file in files for name in re.findall(r"^(?:import|from) (\\w+)", file.read_text(), re.M)}
print(*sorted(name for name in found | {"torch"} if importlib.util.find_spec(name) is None))
"""


class PythonEnvironment(Frozen):
    """An interpreter and what is installed for it."""

    python: str
    packages: dict[str, str]


def inspect(engine: Engine) -> PythonEnvironment:
    """Ask the interpreter of `engine` for its version and packages; raises RunError."""
    text = engine.read(Command(arguments=(PYTHON, "-c", _PROGRAM), variables={}))
    facts = json.loads(text)
    packages = {normalise(name): version for name, version in facts["packages"].items() if name}
    return PythonEnvironment(python=facts["python"], packages=packages)


def demand_packages(engine: Engine, files: Iterable[Path | str], *, name: str) -> None:
    """Raise MachineError where the interpreter of the ranks lacks a package that one of `files` imports.

    Args:
        files: a text is a package, or a module beside one of the files.
        name: of the engine, for the message.
    """
    seen = (one if isinstance(one, str) else engine.inside(one) for one in files)
    text = engine.read(Command(arguments=(PYTHON, "-c", _ABSENT, *seen), variables={}))
    if text.split():
        raise MachineError(
            "the interpreter of the ranks lacks packages that they import",
            place=f"--engine {name}",
            found=f"no {', no '.join(text.split())}",
            hint="use --engine venv, which installs the lock of the stack, or install them there",
        )


def lock_differences(installed: PythonEnvironment, stack: LoadedStack, root: Path) -> dict[str, str]:
    """Name each installed package that is not the locked one, and the direct requirements that are absent."""
    locked = stack.locked(root)
    direct = pins((root / stack.folder / "requirements.in").read_text(encoding="utf-8"))
    return {
        name: f"{installed.packages.get(name, 'absent')}, lock has {' or '.join(versions)}"
        for name, versions in sorted(locked.items())
        if (name in installed.packages or name in direct) and installed.packages.get(name) not in versions
    }


def steering_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change a run, of the names in variables.txt; secrets are hidden."""
    lines = _VARIABLES.read_text(encoding="utf-8").splitlines()
    allowed = {name for line in lines if not line.startswith("#") for name in line.split()}
    return {
        name: without_credentials(value) for name, value in sorted(environment.items()) if name in allowed
    }
