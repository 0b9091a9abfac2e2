"""A CSV file of published points, where a table of them is too long for published.toml."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import is_file_in

SOURCE = ("document", "where", "how", "derivation")


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the rows as `[[reference]]` has them; raises InputError where the folder has no such file."""
    if not is_file_in(folder, name):
        place = f"{folder / 'published.toml'}:references"
        raise InputError("no such file in the recipe's folder", place=place, found=name)
    with (folder / name).open(encoding="utf-8", newline="") as handle:
        return [_row(row) for row in csv.DictReader(handle)]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    filled = {key: value for key, value in row.items() if value}
    numbers = {"cards": _integer(filled.get("cards")), "value": _number(filled.get("value"))}
    source = {key: filled[key] for key in SOURCE if key in filled}
    rest = {key: value for key, value in filled.items() if key not in SOURCE}
    return {**rest, **numbers, "source": source}


def _integer(text: str | None) -> int | str | None:
    return int(text) if text and text.isdecimal() else text


def _number(text: str | None) -> float | str | None:
    try:
        return float(text) if text else text
    except ValueError:
        return text
