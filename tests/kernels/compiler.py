"""The kernels' compile module, loaded by path: the package itself needs torch."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

KERNELS = Path(__file__).parents[2] / "recipes" / "mamba-kernels" / "kernels"


def load(name: str) -> ModuleType:
    """Return a module of the package that needs nothing but the standard library."""
    path = KERNELS / "src" / "twinrun_mamba" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kernel_{name}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def sources(folder: Path, kernels: str) -> Path:
    """Return a copy of the kernels' sources of which `kernels` is all that gets compiled."""
    copy = folder / "csrc"
    shutil.copytree(KERNELS / "csrc", copy)
    (copy / "kernels.cpp").write_text(kernels, encoding="utf-8")
    return copy
