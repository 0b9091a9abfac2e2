"""Families: statements of published.toml that differ in a few words and numbers, such as rows of a table."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen, validate


class Family(Frozen):
    """A template and its rows."""

    columns: tuple[str, ...]
    """Names of the values of a row."""
    rows: tuple[tuple[Any, ...], ...]
    """One statement each; after the values a row may have a table of keys that its statement alone has."""
    each: dict[str, Any]
    """The statement. `{column}` in a text or a key is the row's value as Python formats it,
    `{column:percent}` a share in percent; a text that is `{column}` alone is the value itself."""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "percent":
            return f"{value * 100:.4g} %"
        return str(super().format_field(value, format_spec))


_FORMATTER = _Formatter()


def expanded(entries: Iterable[Any], *, place: str) -> Iterator[Any]:
    """Yield statements as they are, and those that families give; raises InputError with the row."""
    for number, entry in enumerate(entries):
        where = f"{place}.{number}"
        if not isinstance(entry, dict) or not Family.model_fields.keys() & entry.keys():
            yield entry
            continue
        family = validate(entry, Family, place=where)
        try:
            names = set(_names_in(family.each))
        except ValueError as error:
            raise InputError(f"not a template: {error}", place=f"{where}.each") from None
        if odd := names ^ set(family.columns):
            raise InputError("columns and template differ", place=where, found=", ".join(sorted(odd)))
        for row_number, row in enumerate(family.rows):
            try:
                filled = _filled(family.each, dict(zip(family.columns, row, strict=False)))
                yield _joined(filled, dict(*row[len(family.columns) :]))
            except (KeyError, ValueError, TypeError) as error:
                raise InputError(
                    f"not a row of this family: {error}",
                    place=f"{where}.rows.{row_number}",
                    found=list(row),
                    allowed=f"{', '.join(family.columns)}, and a table of further keys",
                ) from None


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(template, dict):
        return {_filled(key, values): _filled(inner, values) for key, inner in template.items()}
    if isinstance(template, list):
        return [_filled(one, values) for one in template]
    if not isinstance(template, str):
        return template
    whole = template.startswith("{") and template[1:-1] in values
    return values[template[1:-1]] if whole else _FORMATTER.vformat(template, (), values)


def _names_in(template: Any) -> Iterator[str]:
    if isinstance(template, str):
        yield from (name for _, name, _, _ in _FORMATTER.parse(template) if name is not None)
    elif isinstance(template, (dict, list)):
        for one in [*template, *template.values()] if isinstance(template, dict) else template:
            yield from _names_in(one)


def _joined(statement: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement with the keys of its row, table by table."""
    for key, value in own.items():
        statement[key] = _joined(inner, value) if isinstance(inner := statement.get(key), dict) else value
    return statement
