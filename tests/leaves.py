"""Every leaf of a record's file altered: what is done to it, and what follows."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.records import PROJECT, ROOT
from twinrun.foundation.errors import InputError
from twinrun.results.account import gaps
from twinrun.results.bounds import excesses
from twinrun.results.correctness import faults
from twinrun.results.reading import plan_hash, read_content
from twinrun.results.record import Record, content_digest

Json = Any
Kind = Literal["other", "absent", "twice", "swapped", "type", "range"]
HOLDS = ("reproduced", "holds-here")
NEUTRAL = ROOT / "src" / "twinrun" / "results" / "neutral.toml"
# Parts of a file that another leaf decides, or that are the seal itself.
SEALS = ("sha256", "plan_sha256")


class LeafChange(NamedTuple):
    """One change to one leaf, or to a table or list of leaves."""

    path: str
    kind: Kind
    apply: Callable[[Json], None]
    """Changes a copy of the file's content in place."""
    what: str


class NeutralRow(NamedTuple):
    """A row of neutral.toml."""

    leaf: str
    kinds: tuple[str, ...]
    reason: str


@cache
def neutral_rows() -> tuple[NeutralRow, ...]:
    """Return what neutral.toml declares."""
    rows = tomllib.loads(NEUTRAL.read_text(encoding="utf-8"))["neutral"]
    return tuple(NeutralRow(row["leaf"], tuple(row["alterations"]), row["reason"]) for row in rows)


def declared(path: str, kind: str) -> NeutralRow | None:
    """Return the row that declares an alteration neutral."""
    return next((row for row in neutral_rows() if kind in row.kinds and fnmatchcase(path, row.leaf)), None)


def alterations(content: Json) -> Iterator[LeafChange]:
    """Yield every alteration of every leaf, table and list of a file."""
    yield from _walked(content, (), "")


Keys = tuple[str | int, ...]


def _walked(value: Json, keys: Keys, path: str) -> Iterator[LeafChange]:
    children = _children(value)
    for key, child, name in children:
        below, where = (*keys, key), f"{path}.{name}" if path else name
        if where in SEALS:
            continue
        yield from _of_child(value, child, key, below, where)
        if isinstance(child, (dict, list)):
            yield from _walked(child, below, where)


def _children(value: Json) -> list[tuple[str | int, Json, str]]:
    if isinstance(value, dict):
        return [(key, child, key) for key, child in value.items()]
    return [(index, child, _name(child, index)) for index, child in enumerate(value)]


def _name(child: Json, index: int) -> str:
    if isinstance(child, dict) and isinstance(child.get("id"), str):
        return str(child["id"])
    return str(index)


def _of_child(parent: Json, child: Json, key: str | int, keys: Keys, path: str) -> Iterator[LeafChange]:
    yield LeafChange(path, "absent", _deleting(keys), "taken out")
    if isinstance(parent, list):
        yield LeafChange(path, "twice", _doubling(keys), "there twice")
    if (sibling := _sibling(parent, child, key)) is not None:
        yield LeafChange(path, "swapped", _swapping(keys, sibling), f"swapped with {sibling}")
    if isinstance(child, (dict, list)):
        yield LeafChange(path, "type", _setting(keys, "text"), "is text")
        if child:
            yield LeafChange(path, "other", _setting(keys, type(child)()), "is empty")
        return
    for kind, other in _values(child):
        yield LeafChange(path, kind, _setting(keys, other), f"{child!r} is {other!r}")


def _values(value: Json) -> Iterator[tuple[Kind, Json]]:
    if isinstance(value, bool):
        yield "other", not value
        yield "type", "text"
    elif isinstance(value, (int, float)):
        yield "other", value + 1 if isinstance(value, int) else value * 1.3 + (0.01 if not value else 0)
        yield "type", "text"
        for far in (-1, 1e15, 0):
            if far != value:
                yield "range", type(value)(far)
    elif isinstance(value, str):
        yield "other", ("f" if value[:1] != "f" else "e") + value[1:] if _is_hash(value) else f"{value} other"
        yield "type", 7.5
        yield "range", ""
    else:
        yield "other", "text"
        yield "type", [7]


def _is_hash(text: str) -> bool:
    return len(text) in (40, 64) and not set(text) - set("0123456789abcdef")


def _sibling(parent: Json, child: Json, key: str | int) -> str | int | None:
    """Return the next sibling of the same kind that has another value."""
    keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
    after = keys[keys.index(key) + 1 :]
    return next((one for one in after if type(parent[one]) is type(child) and parent[one] != child), None)


def _at(content: Json, keys: Keys) -> Json:
    for key in keys:
        content = content[key]
    return content


def _setting(keys: Keys, value: Json) -> Callable[[Json], None]:
    def apply(content: Json) -> None:
        _at(content, keys[:-1])[keys[-1]] = value

    return apply


def _deleting(keys: Keys) -> Callable[[Json], None]:
    def apply(content: Json) -> None:
        del _at(content, keys[:-1])[keys[-1]]

    return apply


def _doubling(keys: Keys) -> Callable[[Json], None]:
    def apply(content: Json) -> None:
        parent, index = _at(content, keys[:-1]), keys[-1]
        assert isinstance(index, int)
        parent.insert(index, copy.deepcopy(parent[index]))

    return apply


def _swapping(keys: Keys, sibling: str | int) -> Callable[[Json], None]:
    def apply(content: Json) -> None:
        parent, key = _at(content, keys[:-1]), keys[-1]
        parent[key], parent[sibling] = parent[sibling], parent[key]

    return apply


def altered(content: Json, alteration: LeafChange) -> Json:
    """Return a copy of a file's content that is altered and sealed again."""
    changed = copy.deepcopy(content)
    alteration.apply(changed)
    return sealed(changed)


def sealed(content: Json) -> Json:
    """Seal a file's content by the project's own functions, and name its run after its plan.

    Whoever seals leaves no verdict of before behind, which would contradict the one of today.
    """
    if "verdicts" in content:
        content["verdicts"] = []
    if isinstance(content.get("plan"), dict):
        before, content["plan_sha256"] = content.get("plan_sha256"), plan_hash(content)
        if isinstance(content.get("run"), str) and isinstance(before, str):
            content["run"] = content["run"].replace(before[:8], content["plan_sha256"][:8])
    content["sha256"] = content_digest(content)
    return content


def finals(record: Record) -> dict[str, str]:
    """Return the outcome that counts of every claim."""
    return {one.claim: one.final for one in record.verdicts}


# What no reader relies on: it is the seal, or it is computed again from the rest of the file.
RECOMPUTED = {"sha256", "plan_sha256", "run", "verdicts"}


def unseen(content: Json, alteration: LeafChange, honest: Record) -> str:
    """Return what still holds of an altered record, empty where the alteration was seen.

    A file that says the same, as where a default is left out, is no alteration.

    Raises:
        AssertionError: a claim holds that did not hold of the honest record.
    """
    try:
        record = read_content(altered(content, alteration), PROJECT, place="altered")
    except InputError:
        return ""
    if said(record) == said(honest):
        return ""
    found, before = finals(record), finals(honest)
    gained = [name for name, one in found.items() if one in HOLDS and before.get(name) not in HOLDS]
    assert not gained, f"{alteration.path} {alteration.what}: {gained} hold"
    if gaps(record, PROJECT):
        assert not [name for name, one in found.items() if one in HOLDS], (
            f"{alteration.path}: holds with a gap"
        )
        return ""
    if faults(record, PROJECT) or excesses(record, PROJECT):
        return ""
    if found != before:
        return ""
    return ", ".join(name for name, one in found.items() if one in HOLDS) or "nothing held before"


def said(record: Record) -> str:
    """Return what a record says, but for what is computed again."""
    return record.model_dump_json(exclude=RECOMPUTED)


def committed_file(recipe: str, name: str) -> Json:
    """Return the content of a committed record."""
    path = Path("recipes") / recipe / "results" / f"{name}.json"
    return json.loads((ROOT / path).read_text(encoding="utf-8"))
