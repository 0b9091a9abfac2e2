"""Checkouts of tests: recipes that may be changed, beside the images of this project, which may not."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def checkout(folder: Path, *recipes: str) -> Path:
    """Return a checkout below `folder`: some recipes, those whose kernels they name, and all else of a plan.

    Records are left out.
    """
    root = folder / "checkout"
    (root / "recipes").mkdir(parents=True)
    shutil.copy(ROOT / "recipes" / "metrics.toml", root / "recipes")
    unwanted = shutil.ignore_patterns("results", "__pycache__")
    manifests = [(ROOT / "recipes" / name / "recipe.toml").read_text(encoding="utf-8") for name in recipes]
    carriers = {name for text in manifests for name in tomllib.loads(text).get("kernels", ())}
    for name in carriers.union(recipes):
        shutil.copytree(ROOT / "recipes" / name, root / "recipes" / name, ignore=unwanted)
    (root / "images").symlink_to(ROOT / "images")
    return root
