"""`--set key=value`: fields of the workload's table that one run has otherwise."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

from twinrun.foundation.errors import InputError, closest, require_known
from twinrun.foundation.manifest import Model, validate


def parse_settings(
    texts: Sequence[str], *, place: str = "--set", example: str = "model=mpt-1b"
) -> dict[str, Any]:
    """Read `key=value` texts; a value is TOML where it parses as TOML, else text.

    Args:
        place: the option that has them.

    Raises:
        InputError: no `=`, no key, or a key given twice.
    """
    parsed: dict[str, Any] = {}
    for text in texts:
        key, separator, value = (part.strip() for part in text.partition("="))
        if not separator or not key:
            hint = f"for example {place} {example}"
            raise InputError("expected key=value", place=place, found=text, hint=hint)
        if key in parsed:
            raise InputError("given twice", place=f"{place} {key}", found=text)
        parsed[key] = value_of(value)
    return parsed


def overlay(published: Model, *, scale: dict[str, Any], manifest: str, user: dict[str, Any]) -> Model:
    """Lay the fields of a scale, then the user's, over the published table; raises InputError."""
    table = published.model_dump(mode="json")
    for key, value in scale.items():
        _assign(table, key, value, place=f"{manifest}:set.{key}")
    validate(table, type(published), place=manifest)
    for key, value in user.items():
        _assign(table, key, value, place=f"--set {key}")
    return validate(table, type(published), place="--set")


def _assign(table: dict[str, Any], key: str, value: Any, *, place: str) -> None:
    """Set the field at the dotted `key` of a nested table.

    A list may be given as names with commas between them: `tasks=boolq,piqa`.

    Raises:
        InputError: there is no such field.
    """
    *parents, name = key.split(".")
    inner: Any = table
    for parent in parents:
        inner = inner.get(parent) if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or name not in inner or isinstance(inner[name], dict):
        known = sorted([*_fields(table), "cards", "devices", "nodes"])
        raise InputError("no such field", place=place, found=key, allowed=known, hint=closest(key, known))
    listed = isinstance(inner[name], list) and isinstance(value, str)
    inner[name] = [one.strip() for one in value.split(",")] if listed else value


def value_of(text: str) -> Any:
    """Return the value that a text is in TOML, else the text."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # A line break would let the text add keys of its own.
    return table["value"] if table.keys() == {"value"} else text


def chosen(asked: Any, default: tuple[str, ...], known: Iterable[str], *, key: str) -> tuple[str, ...]:
    """Return the names that `--set KEY=A,B` asked for, or the default; raises InputError."""
    if asked is None:
        return default
    names = tuple(map(str, asked if isinstance(asked, list) else str(asked).split(",")))
    for name in names:
        require_known(name, known, "no such name", place=f"--set {key}")
    return tuple(dict.fromkeys(names))


def _fields(table: dict[str, Any]) -> list[str]:
    fields: list[str] = []
    for key, value in table.items():
        fields.extend(f"{key}.{inner}" for inner in value) if isinstance(value, dict) else fields.append(key)
    return fields
