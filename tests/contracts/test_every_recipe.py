"""Every folder of recipes/ against the contract of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.checks import RECIPE_CHECKS, check_written
from tests.records import machine
from twinrun.foundation.errors import MachineError
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Machine
from twinrun.runs.selection import stack_for_run

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Project(ROOT)
RECIPES = PROJECT.recipes()
STACKS = {
    name
    for one in RECIPES.values()
    for name in (*one.recipe.stacks.current.values(), *one.recipe.stacks.also)
}


@pytest.mark.parametrize("check", [*RECIPE_CHECKS, check_written], ids=lambda check: check.__name__)
@pytest.mark.parametrize("loaded", RECIPES.values(), ids=RECIPES)
def test_recipe(loaded: LoadedRecipe, check: Callable[[Path, LoadedRecipe], None]) -> None:
    check(ROOT, loaded)


@pytest.mark.parametrize("gpu", PROJECT.gpus.values(), ids=PROJECT.gpus)
def test_all_recipes_run_in_one_stack_on_a_machine(gpu: Gpu) -> None:
    """Whoever runs all of them installs one stack; a GPU that none is built for is refused by all."""
    there = machine(gpu.vendor, gpu, devices=1)
    chosen = {_chosen(loaded, gpu, there) for loaded in RECIPES.values()}
    assert len(chosen) == 1, chosen
    assert chosen <= {*STACKS, "no stack of this recipe is built for this GPU"}


def _chosen(loaded: LoadedRecipe, gpu: Gpu, there: Machine) -> str:
    try:
        return stack_for_run(PROJECT, loaded, asked=None, vendor=gpu.vendor, machine=there)[0].stack.name
    except MachineError as error:
        return error.message
