"""What tests of compiling share: the kernels' folder, and sources of their own."""

from __future__ import annotations

import shutil
from pathlib import Path

KERNELS = Path(__file__).parents[1] / "kernels"


def copy_sources(folder: Path, kernels: str) -> Path:
    """Return a copy of the kernels' sources of which `kernels` is all that gets compiled."""
    copy = folder / "csrc"
    shutil.copytree(KERNELS / "csrc", copy)
    (copy / "kernels.cpp").write_text(kernels, encoding="utf-8")
    return copy
