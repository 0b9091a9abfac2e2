"""A class is named by a noun, and its name belongs to one class of the package, of a model or of a recipe."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.contracts.tree import PACKAGE, project_files, shown

# A participle says what was done, not what a thing is. The first kind is regular, the others are not.
PARTICIPLES = re.compile(
    r"_?(?:[A-Z][a-z]+ed|Begun|Bound|Brought|Built|Caught|Chosen|Done|Drawn|Driven|Found|Given|Gone|Held|Hung"
    r"|Kept|Known|Laid|Led|Left|Lost|Made|Meant|Met|Nothing|Paid|Read|Running|Said|Seen|Sent|Set|Shown|Shut"
    r"|Spent|Stood|Taken|Told|Understood|Waiting|Won|Worn|Written)"
)
# Nouns that end as participles do.
NOUNS = frozenset({"Embed", "Need", "Seed", "Speed"})
# Kernels are a package of their own, which others install; what a template bakes is no code of ours.
# A reader of a recipe, or of a published model, has its own names: two models may each have an `Attention`.
WORLDS = re.compile(r"recipes/[^/]+/|src/twinrun/train/models/[^/]+\.py")
OTHERS = re.compile(r"(?:recipes/[^/]+/)?kernels/|templates/")


def classes(paths: Iterable[Path]) -> dict[str, list[str]]:
    """Return the places of each class at the top of a module, by its name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{shown(path)}:{node.lineno}")
    return dict(found)


def _world(place: str) -> str:
    """Return what a name must be alone in: its recipe or its model family, else all that is shared."""
    found = WORLDS.match(place)
    return found[0] if found else ""


def is_participle(name: str) -> bool:
    """Say whether a name is one word, and that a participle."""
    return PARTICIPLES.fullmatch(name) is not None and name.lstrip("_") not in NOUNS


def test_a_name_belongs_to_one_class() -> None:
    paths = [path for path in project_files("*.py") if not OTHERS.match(shown(path))]
    twice = {
        name: places
        for name, places in classes(paths).items()
        if len(places) > 1 and len({_world(place) for place in places}) < len(places)
    }
    assert not twice, "\n".join(["", *(f"{name}: {', '.join(places)}" for name, places in twice.items())])


def test_no_class_is_a_bare_participle() -> None:
    named = classes(sorted(PACKAGE.rglob("*.py")))
    found = [f"{name}: {', '.join(places)}" for name, places in named.items() if is_participle(name)]
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("name", "found"), [("Planned", True), ("_Written", True), ("PlannedPoint", False), ("Seed", False)]
)
def test_participles_are_told_from_nouns(name: str, *, found: bool) -> None:
    assert is_participle(name) == found
