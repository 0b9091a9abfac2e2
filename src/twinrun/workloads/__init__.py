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
        InputError: no such folder, or one that does not offer a whole `WORKLOAD`, or one of another table.
    """
    require_known(name, workload_names(), "unknown workload", place=name)
    found = getattr(importlib.import_module(f"{__name__}.{name}"), "WORKLOAD", None)
    if not isinstance(found, Workload) or found.table != name:
        message, place = "a workload's folder offers it as `WORKLOAD`", f"src/twinrun/workloads/{name}"
        raise InputError(message, place=place, found=getattr(found, "table", "none"), allowed=name)
    return found
