"""What a recipe allows of an error stands in recipe.toml, and its script refuses by the same numbers."""

from __future__ import annotations

import ast

import pytest

from tests.records import PROJECT, ROOT

# Constants of the scripts, by the label whose values they are of.
CONSTANTS = {"ALLOWED_ERRORS": "dtype", "ALLOWED_LOSSES": "compression"}
BENCHES = [name for name, one in PROJECT.recipes().items() if one.workload == "bench"]


@pytest.mark.parametrize("recipe", BENCHES)
def test_a_script_allows_what_its_recipe_says(recipe: str) -> None:
    loaded = PROJECT.recipe(recipe)
    script = ROOT / loaded.file(loaded.recipe.script or "bench.py")
    found = {
        CONSTANTS[target.id]: ast.literal_eval(node.value)
        for node in ast.parse(script.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in CONSTANTS
    }
    assert found == loaded.tables.allowed_errors
