"""Every folder of recipes/ against the contract of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.checks import RECIPE_CHECKS, check_written
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project

ROOT = Path(__file__).resolve().parents[2]
RECIPES = Project(ROOT).recipes()


@pytest.mark.parametrize("check", [*RECIPE_CHECKS, check_written], ids=lambda check: check.__name__)
@pytest.mark.parametrize("loaded", RECIPES.values(), ids=RECIPES)
def test_recipe(loaded: LoadedRecipe, check: Callable[[Path, LoadedRecipe], None]) -> None:
    check(ROOT, loaded)


def test_every_folder_is_a_recipe() -> None:
    folders = {path.name for path in (ROOT / "recipes").iterdir() if path.is_dir()}
    assert folders == set(RECIPES)
    assert RECIPES
