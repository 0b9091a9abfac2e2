"""Checkouts of tests: recipes that may be changed, beside the images of this project, which may not."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def checkout(folder: Path, *recipes: str) -> Path:
    """Return a checkout below `folder` with some recipes, without their records, and all else of a plan."""
    root = folder / "checkout"
    (root / "recipes").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "metrics.toml", root / "recipes")
    unwanted = shutil.ignore_patterns("results", "__pycache__")
    for name in recipes:
        shutil.copytree(ROOT / "recipes" / name, root / "recipes" / name, ignore=unwanted)
    (root / "images").symlink_to(ROOT / "images")
    return root
