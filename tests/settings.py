"""The keys that `--set` takes in a recipe, and other values of the type of each."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.workloads import load_workload

DIGEST = "0" * 64
# Values of texts that no schema lists, and of what is not given: by the end of the key.
NAMED: dict[str, list[Any]] = {
    "tokenizer": [DIGEST],
    "documents": [f"./wsc273.jsonl@{DIGEST}"],
    "model": [f"owner/model@{'0' * 40}"],
    "microbatch": [1],
    "trainer": ["plain", "composer"],
    "position_weighting": [2.0],
}


def table_of(recipe: LoadedRecipe) -> Frozen:
    """Return the table of recipe.toml that `--set` overrides."""
    table: Frozen = getattr(recipe.tables, load_workload(recipe.workload).table)
    return table


def keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key that `--set` can name with the value that the recipe has."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        elif name != "schedule" and not (
            isinstance(value, list) and any(isinstance(one, dict) for one in value)
        ):
            # A list of tables, and a table that is left out, are none that a text gives.
            yield prefix + name, value


def other_values(key: str, value: Any, recipe: LoadedRecipe) -> list[Any]:
    """Return values of the key's type, none of them the recipe's, the likeliest first."""
    name, tables = key.rpartition(".")[2], recipe.tables
    if name in ("model", "data") and value is not None:
        return [one for one in getattr(tables, f"{name}s" if name == "model" else name) if one != value]
    if key.startswith("reports."):
        return ["another unit"]
    holder = functools.reduce(getattr, key.split(".")[:-1], table_of(recipe))
    field = type(holder).model_fields.get(name) if isinstance(holder, Frozen) else None
    listed = [one for one in _listed(field and field.annotation) if one != value]
    if isinstance(value, bool):
        return [not value, *listed]
    if isinstance(value, int):
        return [value * 2, value // 2, value + 1, value - 1]
    if isinstance(value, float):
        return [value / 2, value + 0.5, 1.0]
    if isinstance(value, list):
        if name == "only":
            return [[one.id] for one in tables.checks.check]
        labels = [list(one.values) for one in getattr(tables, "label", ()) if f"{one.name}s" == name]
        numbers = [one / 2 for one in value if isinstance(one, float)]
        return [numbers, value[:1], value[1:], *([one] for values in labels for one in values)]
    return [*listed, *(one for one in NAMED.get(name, [1]) if one != value), True]


def _listed(kind: Any) -> Iterator[Any]:
    """Yield the values that a type lists."""
    for one in get_args(kind):
        if get_origin(kind) is Literal:
            yield one
        else:
            yield from _listed(one)


def written(value: Any) -> str:
    """Return a value as `--set` takes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return json.dumps(value) if isinstance(value, bool | str) else repr(value)
