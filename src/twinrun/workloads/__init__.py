"""What a recipe can run, one folder for each table that a recipe.toml may have."""

from __future__ import annotations

import functools
import importlib
import pkgutil

from twinrun.foundation.errors import InputError, require_known
from twinrun.workloads.workload import Workload


@functools.cache
def workload_names() -> tuple[str, ...]:
    """Return the folders of this package."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg))


@functools.cache
def load_workload(name: str) -> Workload:
    """Return the workload of the folder `name`.

    Raises:
        InputError: no such folder, or one that does not offer a whole `WORKLOAD`.
    """
    require_known(name, workload_names(), "unknown workload", place=name)
    return whole_workload(importlib.import_module(f"{__name__}.{name}"), name)


def whole_workload(module: object, name: str) -> Workload:
    """Return the `WORKLOAD` of a module; raises InputError where it has none, or one of another table."""
    place = f"src/twinrun/workloads/{name}/__init__.py"
    found = getattr(module, "WORKLOAD", None)
    if not isinstance(found, Workload):
        raise InputError("a workload offers an instance of Workload as `WORKLOAD`", place=place, found="none")
    if found.table != name:
        raise InputError("the table is not the folder's", place=place, found=found.table, allowed=name)
    return found
