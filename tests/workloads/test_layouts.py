"""Layouts: what is refused before anything starts, what they cost by formula, and what a report says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkouts import checkout
from tests.records import PROJECT, hardware, plan
from twinrun.foundation.errors import InputError, MachineError
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


@pytest.mark.parametrize(
    ("old", "new", "place", "why"),
    [
        (
            'ddp = { framework = "torch"',
            'ddp = { framework = "torch", zero = 1',
            "ddp.zero",
            "no such setting",
        ),
        ("devices = 8", "devices = 6", "tp2-pp2-dp2.devices", "all its ranks"),
        ("pp2 = { pipeline = 2,", "pp2 = { microbatch = 3, pipeline = 2,", "pp2.microbatch", "are equal"),
        (
            'use_multi_rank_bucket_allreduce" = false',
            'stage" = 3',
            "zero-1.settings",
            "could only contradict",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_in_planning(
    tmp_path: Path, old: str, new: str, place: str, why: str
) -> None:
    project = changed(tmp_path, old, new)
    with pytest.raises(InputError, match=why) as caught:
        plan(RECIPE, project=project, **SMOKE)
    assert place in str(caught.value)


@pytest.mark.parametrize("key", OWNED)
def test_a_second_value_for_what_the_recipe_says_is_refused(tmp_path: Path, key: str) -> None:
    project = changed(tmp_path, '"zero_optimization.use_multi_rank_bucket_allreduce" = false', f'"{key}" = 2')
    with pytest.raises(InputError, match="contradict"):
        plan(RECIPE, project=project, **SMOKE)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("precision=fp16", "no fp16 on a processor"),
        ("global_batch=3", "divisor of the global batch"),
        ("microbatch=3", "divisor of 8"),
        ("layouts=zero-4", "no such layout"),
        ("trainer=composer", "one trainer"),
        ("devices=none", "count of devices"),
    ],
)
def test_settings_that_do_not_fit_are_refused(setting: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(RECIPE, **SMOKE, settings=(setting,))
    assert why in str(caught.value)


def test_fsdp2_has_no_fp16() -> None:
    with pytest.raises(InputError, match="a scaled loss"):
        plan(RECIPE, scale="node", gpu="h200", devices=2, settings=("layouts=fsdp2", "precision=fp16"))


def test_a_sweep_over_sizes_has_neither_layouts_nor_a_scaled_loss() -> None:
    for setting in ("trainer=deepspeed", "precision=fp16"):
        with pytest.raises(InputError):
            plan("mpt7b-scaling", scale="smoke", gpu=None, settings=(setting,))


def test_a_device_of_139_gib_holds_what_the_budget_says() -> None:
    made = plan(RECIPE, scale="node", gpu="h200", devices=1)
    assert hardware("h200", 1).device_memory_bytes
    assert PROJECT.gpus["h200"]
    sizes = {point.id: point.part.microbatches for point in made.points}
    assert all(sizes.values()), sizes
