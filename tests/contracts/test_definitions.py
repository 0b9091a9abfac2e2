"""A public name is defined once, and a description of a field or a line is no fragment."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.contracts.tree import is_train, modules, shown

# Modules of these folders offer functions and constants of the same names, each for its own part; a command
# is called as what it does, and so is a function of the library.
FAMILIES = re.compile(
    r"src/twinrun/(cli|execution/(engines|launchers|schedulers)|export/trackers|protocol/models"
    r"|train/models|results/kinds|workloads/(training|bench|checks|evaluation))/"
    r"|src/twinrun/api\.py|src/twinrun/train/(composer_loop|data_parallel|loop|training|state_space|attention|checks|worker)\.py"
)
FRAGMENT = re.compile(r"(Of|That|As|Whose)\b")
SOURCES = {shown(path): path.read_text(encoding="utf-8") for path in modules().values()}
HOST = {shown(path) for name, path in modules().items() if not is_train(name)}


def definitions(text: str, *, of_family: bool) -> Iterator[tuple[str, str]]:
    """Yield each public name of a module with its value, where another value is another thing.

    Of a family only classes and types count, and everywhere constants of the same value.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not of_family):
            yield node.name, ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and not target.id.isupper():
                    yield target.id, ""
                elif isinstance(target, ast.Name) and not of_family:
                    yield target.id, ast.dump(node.value)


def twice(sources: dict[str, str]) -> dict[str, list[str]]:
    """Return the public names that several modules define, with the modules."""
    found: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for place, text in sources.items():
        for name, value in dict.fromkeys(definitions(text, of_family=bool(FAMILIES.match(place)))):
            if not name.startswith("_") and name != "main":
                found[name, value].append(place)
    return {name: places for (name, _), places in found.items() if len(places) > 1}


def descriptions(text: str) -> Iterator[tuple[int, str]]:
    """Yield the description below each field of a class, with its line."""
    classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
    for field, below in (pair for node in classes for pair in zip(node.body, node.body[1:], strict=False)):
        value = below.value if isinstance(below, ast.Expr) else None
        if isinstance(field, ast.AnnAssign) and isinstance(value, ast.Constant):
            yield below.lineno, str(value.value)


def fragments(text: str) -> list[str]:
    """Return the descriptions of fields, and the comments, that are no sentence and no noun phrase."""
    comments = ((line, words.strip()) for line, words in enumerate(text.splitlines(), 1))
    return [
        *(f"{line}: {words}" for line, words in descriptions(text) if FRAGMENT.match(words)),
        *(f"{line}: {words}" for line, words in comments if words.startswith("# What ")),
    ]


@pytest.mark.parametrize("host", [True, False], ids=["host", "ranks"])
def test_a_public_name_is_defined_once(host: bool) -> None:
    """The host's and the ranks' side are two programs."""
    found = twice({place: text for place, text in SOURCES.items() if (place in HOST) == host})
    assert not found, "\n".join(["", *(f"{name}: {', '.join(places)}" for name, places in found.items())])


@pytest.mark.parametrize("place", SOURCES)
def test_no_description_is_a_fragment(place: str) -> None:
    assert not fragments(SOURCES[place])


def test_a_second_definition_and_a_fragment_are_found() -> None:
    one, other = "GIB = 2\nclass A: ...\nkind = int\nN = 1\n", "GIB = 2\nkind = str\nN = 2\n"
    assert twice({"a.py": one, "b.py": other}).keys() == {"GIB", "kind"}
    assert fragments('class A:\n    x: int\n    """Of it."""\n# What it is.\n') == [
        "3: Of it.",
        "4: # What it is.",
    ]
