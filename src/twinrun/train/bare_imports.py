"""Modules without what is loaded beside them: every rank pays for an import."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec


@contextlib.contextmanager
def bare(*packages: str) -> Iterator[None]:
    """Let modules of `packages`, outer ones first, be imported while the code of the packages is not run.

    Whoever imports a package later gets all of it, with the same modules.
    """
    made = [name for name in packages if name not in sys.modules]
    try:
        for name in made:
            spec = find_spec(name)
            if spec is None:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            sys.modules[name] = module_from_spec(spec)
        yield
    finally:
        for name in made:
            sys.modules.pop(name, None)


def switched_off(module: str, *switches: str) -> None:
    """Import a module that says which optional packages there are, and say that some are not."""
    for name in switches:
        setattr(import_module(module), name, False)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Let modules be imported whose functions ask for torch.compile, which starts a compiler's process."""
    name = "TORCHDYNAMO_DISABLE"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
