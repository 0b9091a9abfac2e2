"""Parts found by file name: an engine or a launcher is one module in its package."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from twinrun.foundation.errors import require_known


def part_names(package: ModuleType) -> list[str]:
    """Return the names of the modules in `package`."""
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def load_part(package: ModuleType, name: str) -> ModuleType:
    """Import the module `name` of `package`; raises InputError when there is none."""
    option = package.__name__.rpartition(".")[2].removesuffix("s")
    require_known(name, part_names(package), f"unknown {option}", place=f"--{option}")
    return importlib.import_module(f"{package.__name__}.{name}")
