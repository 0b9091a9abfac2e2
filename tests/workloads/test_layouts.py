"""Layouts: what is refused before anything starts, what they cost by formula, and what a report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkouts import checkout
from tests.records import PROJECT, plan
from twinrun.foundation.errors import MachineError
from twinrun.planning.project import Project

RECIPE = "deepspeed-pretrain"
OWNED = [*(engine.owns if (engine := PROJECT.recipe(RECIPE).tables.engine) else ()), "zero_optimization"]
SMOKE: dict[str, Any] = {"scale": "smoke", "gpu": None, "devices": 0}
PAPER: dict[str, Any] = {"scale": "paper", "gpu": "mi210", "devices": 8}


def changed(folder: Path, old: str, new: str) -> Project:
    """Return a project whose recipe has `new` in place of `old`."""
    root = checkout(folder, RECIPE)
    path = root / "recipes" / RECIPE / "recipe.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return Project(root)


def test_a_layout_that_needs_more_devices_than_there_are_is_left_out() -> None:
    made = plan(RECIPE, scale="smoke", gpu="h200", devices=2)
    assert "tp2-pp2-dp2" not in {point.id for point in made.points}
    with pytest.raises(MachineError, match="no layout fits"):
        plan(RECIPE, scale="smoke", gpu="h200", devices=2, settings=("layouts=tp2-pp2-dp2",))
