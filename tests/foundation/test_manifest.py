from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from tests.checkouts import ROOT, checkout
from twinrun.foundation.errors import InputError, TwinrunError
from twinrun.foundation.manifest import MAX_MANIFEST_BYTES, Frozen, load_json, load_toml, read_toml
from twinrun.manifests.stack import load_stack
from twinrun.manifests.vendor import load_gpus, load_vendors
from twinrun.planning.project import Project


class Inner(Frozen):
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()


class Manifest(Frozen):
    name: str
    count: Annotated[int, Field(gt=0)] = 1
    share: float = 0.0
    inner: Inner = Inner()
    table: dict[str, Inner] = Field(default_factory=dict)
    row: tuple[Inner, ...] = ()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "manifest.toml"


def refused(file: Path, content: str | bytes) -> InputError:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as caught:
        load_toml(file, Manifest)
    return caught.value


def test_a_good_file_is_read(file: Path) -> None:
    file.write_text('name = "x"\nshare = 1\ninner = { kind = "b", sizes = [1, 2] }\n[[row]]\n')
    inner = Inner(kind="b", sizes=(1, 2))
    assert load_toml(file, Manifest) == Manifest(name="x", share=1.0, inner=inner, row=(Inner(),))


@pytest.mark.parametrize(
    ("text", "key", "allowed"),
    [
        ("nome = 1", "nome", ["count", "inner", "name", "row", "share", "table"]),
        ("[table.one]\nsize = 1", "table.one.size", ["kind", "sizes"]),
        ("[[row]]\n[[row]]\nkinf = 1", "row.1.kinf", ["kind", "sizes"]),
    ],
)
def test_an_unknown_key_is_told_with_those_allowed_and_the_nearest(
    file: Path, text: str, key: str, allowed: list[str]
) -> None:
    error = refused(file, f'name = "x"\n{text}\n')
    assert error.message == "unknown key"
    assert error.place == f"{file}:{key}"
    assert error.allowed == allowed
    assert error.hint in {f"did you mean `{name}`?" for name in allowed}


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("count = '1'", "count", "'1'"),
        ("count = 1.5", "count", "1.5"),
        ("count = true", "count", "True"),
        ("share = inf", "share", "inf"),
        ("inner = { kind = 'c' }", "inner.kind", "'c'"),
        ("inner = { sizes = [1, 'x'] }", "inner.sizes.1", "'x'"),
        ("inner = 1", "inner", "1"),
        # Broken TOML, and keys given twice, by their lines.
        ("count = 1\nname = 'y'\nshare = 1.0", "3", None),
        ("[inner]\n[table]\n[inner]\nname = 1", "4", None),
        ("count = = 1\nshare = 1.0", "2", None),
        ("\n\ncount = 01\nshare = 1.0", "4", None),
        ("row = [", "3", None),
        ('inner = "x', "2", None),
    ],
)
def test_a_wrong_value_is_told_with_its_key_or_line(
    file: Path, text: str, place: str, found: str | None
) -> None:
    error = refused(file, f'name = "x"\n{text}\n')
    assert (error.place, error.found) == (f"{file}:{place}", found)
    assert found or error.message.startswith("broken TOML: ")


def test_what_is_no_manifest_is_refused(file: Path) -> None:
    error = refused(file, b'name = "caf\xe9"\n')
    assert error.message == "not UTF-8: invalid continuation byte at byte 11"
    error = refused(file, "count = 2\n")
    assert (error.place, error.message) == (f"{file}:name", "this key is required")
    error = refused(file, b"[" * (MAX_MANIFEST_BYTES + 1))
    assert error.found == f"{MAX_MANIFEST_BYTES + 1} bytes, at most {MAX_MANIFEST_BYTES}"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError, match="no manifest") as caught:
        load_toml(file, Manifest)
    assert caught.value.found == "a pipe"
    for path in (file.parent / "absent.toml", file.parent):
        with pytest.raises(InputError, match=str(path)):
            load_toml(path, Manifest)


DEEP = (
    "inner = " + "[" * 50_000,
    "inner = " + "[" * 400 + "]" * 400,
    "[" + "a." * 3000 + "a]\n",
    "inner = " + "{a=" * 5000 + "}" * 5000,
    f"count = {'9' * 5000}",
)
NO_JSON = ("", "{", "[" * 100_000, '{"name": ' + "9" * 5000 + "}", '{"name": "x", "nome": 1}')
# Two readers could understand these in two ways.
TWICE = ('{"name": "a", "name": "b"}', r'{"name": "\ud800"}')
CASES = [(load_toml, one) for one in DEEP] + [(load_json, one) for one in NO_JSON + TWICE]


@pytest.mark.parametrize(("read", "text"), CASES)
def test_what_no_parser_can_hold_is_an_error_in_the_file(
    file: Path, read: Callable[..., Manifest], text: str
) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"{file}"):
        read(file, Manifest)


# Files that are mutated, and what reads them.
RECIPE, CPU = "mpt7b-scaling", "cpu"


UNBROKEN = Project(ROOT)


def _load_recipe(root: Path) -> object:
    project = Project(root)
    # What is not broken is read once.
    vars(project).update(metrics=UNBROKEN.metrics, gpus=UNBROKEN.gpus, vendors=UNBROKEN.vendors)
    return project.recipe(RECIPE)


READERS: dict[str, Callable[[Path], object]] = {
    f"recipes/{RECIPE}/recipe.toml": _load_recipe,
    f"recipes/{RECIPE}/published.toml": _load_recipe,
    f"images/stacks/{CPU}/stack.toml": partial(load_stack, name=CPU),
    "images/vendors/cuda/vendor.toml": load_vendors,
    "images/gpus.toml": load_gpus,
}
SYNTAX = tuple(one.encode("latin-1") for one in (*'\n"[]{}=.#\\\0\xff-', "'''", "e9", "inf"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with the manifests of this one, to be broken."""
    root = checkout(tmp_path_factory.mktemp("root"), RECIPE)
    (root / "images").unlink()
    for folder in (f"stacks/{CPU}", "vendors"):
        shutil.copytree(ROOT / "images" / folder, root / "images" / folder)
    shutil.copy(ROOT / "images" / "gpus.toml", root / "images")
    return root


def mutated(content: bytes, choice: random.Random) -> bytes:
    for _ in range(choice.randint(1, 4)):
        lines, place = content.splitlines(keepends=True) or [b"\n"], choice.randint(0, len(content))
        one, other = choice.randrange(len(lines)), choice.randrange(len(lines))
        token = choice.choice((*SYNTAX, choice.randbytes(choice.randint(1, 4))))
        flipped = bytes(byte ^ (1 << choice.randrange(8)) for byte in content[place : place + 1])
        changes = (
            content[:place] + token + content[place + choice.randrange(2) :],
            content[:place] + flipped + content[place + 1 :],
            content[:place] + content[place + choice.randint(1, 40) :],
            b"".join([*lines[:other], lines[one], *lines[other:]]),
            b"".join(lines[:one] + lines[one + 1 :]),
        )
        content = choice.choice(changes)
    return content


# An expression that Python will read otherwise one day is still an expression.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", READERS)
def test_a_mutated_manifest_is_read_or_refused(tree: Path, name: str) -> None:
    whole = (ROOT / name).read_bytes()
    for seed in range(500):
        (tree / name).write_bytes(mutated(whole, random.Random(seed)))
        with contextlib.suppress(TwinrunError):
            READERS[name](tree)
    (tree / name).write_bytes(whole)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"\\"".' * 40_000 + "x = 1", "a key of too many parts"),
        ("a." * 100_000 + "a=1", "a key of too many parts"),
        ("\n[" + "a." * 100_000 + "a]", "bomb.toml:2: a key of too many parts"),
        ("x={" + "a." * 100_000 + "a=1}", "a key of too many parts"),
        ("'a' . " * 50_000 + "a=1", "a key of too many parts"),
        ("\N{ZERO WIDTH NO-BREAK SPACE}a=1", "a byte order mark"),
    ],
    ids=["escaped", "key", "table", "inline", "spaced", "mark"],
)
def test_keys_that_take_the_memory_are_refused_unread(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=said):
        read_toml(tmp_path / "bomb.toml")
