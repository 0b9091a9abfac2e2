"""Each check of a recipe refuses the recipe that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkouts import checkout
from tests.contracts import checks
from tests.contracts.baking import bake
from twinrun.foundation.errors import InputError
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project

Check = Callable[[Path, LoadedRecipe], None]

# Check, file, what is replaced in it, by what; where nothing is replaced, the file is written.
BROKEN: list[tuple[Check, str, str, str]] = [
    (checks.check_folder, "notes.txt", "", "note"),
    (checks.check_schema_lines, "recipe.toml", "#:schema ../../docs", "#:schema ../docs"),
    (checks.check_sources, "published.toml", "document = ", 'document = "a talk" #'),
    (checks.check_sources, "published.toml", 'how = "read from a table"', 'how = "derived"'),
    (checks.check_hardware, "published.toml", 'gpu = "h100-80gb"', 'gpu = "h100"'),
    (checks.check_stacks, "recipe.toml", 'cpu = "cpu"', 'cpu = "cuda12.6-torch2.7"'),
    (checks.check_published_plan, "recipe.toml", "global_batch = 256", "global_batch = 512"),
    (checks.check_published_plan, "recipe.toml", "devices_per_node = 1", "devices_per_node = 2"),
    (checks.check_published_plan, "published.toml", 'point = "nodes=1"', 'point = "nodes=2"'),
    (checks.check_smoke_plan, "recipe.toml", "global_batch = 32", "global_batch = 33"),
    (checks.check_scripts, "train.py", "from __future__", "import composer\nfrom __future__"),
    (checks.check_scripts, "train.py", "from __future__", checks.SCRIPT_LINES * "\n" + "from __future__"),
    (checks.check_readme, "README.md", "## Deviations", "## Differences"),
    (checks.check_readme, "README.md", "invoke run recipes/", "invoke run "),
    (checks.check_results, "results/good-name.json", "", "{}"),
    (checks.check_results, "results/h200x4_cuda12.6-torch2.7_2026-01-02.json", "", "{}"),
]


@pytest.mark.parametrize(("check", "file", "old", "new"), BROKEN)
def test_a_broken_recipe_is_refused(tmp_path: Path, check: Check, file: str, old: str, new: str) -> None:
    root = checkout(tmp_path)
    loaded = bake(root, {})
    check(root, loaded)
    path = root / loaded.folder / file
    text = path.read_text(encoding="utf-8") if old else ""
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else new, encoding="utf-8")
    with pytest.raises((AssertionError, InputError), match=f"{Path(file).parts[0]}|--set"):
        check(root, Project(root).recipe(loaded.recipe.name))


def test_every_check_is_tried() -> None:
    assert {check for check, *_ in BROKEN} == set(checks.RECIPE_CHECKS)
