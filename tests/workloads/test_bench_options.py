"""Options of a benchmark that lists values of a label: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkouts import checkout
from tests.records import plan
from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project

RECIPE = "ring-allreduce"


def test_what_was_asked_for_holds_where_a_case_has_its_own() -> None:
    made = plan(RECIPE, scale="smoke", gpu=None, settings=('options.compressions=["bf16"]', "cases=64KB,1KB"))
    settings = {point.part.case: point.part.settings for point in made.points}
    assert {name: one["compressions"] for name, one in settings.items()} == {
        "64KB": ("bf16",),
        "1KB": ("bf16",),
    }
    assert len(settings["64KB"]["dtypes"]) == 4


@pytest.mark.parametrize(
    ("old", "new", "found", "place"),
    [
        ('compressions = ["bf16"', 'compressions = ["tree"', "tree", "cases.64KB.compressions"),
        ('algorithms = ["ring"', 'algorithms = ["tree"', "tree", "bench.options.algorithms"),
        ("in_flight = 4", "in_flight = 0", 0, "bench.options.in_flight"),
        ("in_flight = 1", "in_fligth = 1", "in_fligth", "at_least"),
        ("in_flight = 1", "dtypes = 1", "dtypes", "at_least"),
    ],
)
def test_the_recipe_itself_is_held_to_what_it_allows(
    tmp_path: Path, old: str, new: str, found: object, place: str
) -> None:
    root = checkout(tmp_path, RECIPE)
    path = root / "recipes" / RECIPE / "recipe.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        plan(RECIPE, scale="smoke", gpu=None, project=Project(root))
    assert caught.value.found == found
    assert str(caught.value.place).endswith(f"recipe.toml:{place}")
