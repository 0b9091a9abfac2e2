"""Every key that `--set` takes: another value is seen by each claim, or is declared neutral for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from tests.records import PROJECT, plan
from twinrun.foundation.errors import TwinrunError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.plan import Plan
from twinrun.results.configuration import configuration_of_plan
from twinrun.workloads import load_workload

DIGEST = "0" * 64
# Values of texts that no schema lists, and of what is not given: by the end of the key.
NAMED: dict[str, list[Any]] = {
    "tokenizer": [DIGEST],
    "model": [f"owner/model@{'0' * 40}"],
    "microbatch": [1],
    "position_weighting": [2.0],
}
# What lets a value be that is refused alone.
COMPANIONS = {"summation": [("trainer=plain",)], "sharding": [("model=mpt-1b",)]}


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


def other_values(key: str, value: Any, schema: Mapping[str, Any], recipe: LoadedRecipe) -> list[Any]:
    """Return values of the key's type, none of them the recipe's, the likeliest first."""
    name, tables = key.rpartition(".")[2], recipe.tables
    if name in ("model", "data") and value is not None:
        return [one for one in getattr(tables, f"{name}s" if name == "model" else name) if one != value]
    listed = [one for one in _listed(_property(schema, key)) if one != value]
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
    return [*listed, *NAMED.get(name, [1]), True]


def _property(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the schema of a key, references resolved."""
    found: Mapping[str, Any] = schema
    for name in key.split("."):
        found = _resolved(schema, found.get("properties", {}).get(name, {}))
    return found


def _resolved(schema: Mapping[str, Any], found: Mapping[str, Any]) -> Mapping[str, Any]:
    named = [one for one in (found, *found.get("anyOf", ())) if "$ref" in one]
    return schema["$defs"][named[0]["$ref"].rpartition("/")[2]] if named else found


def _listed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values that a schema lists."""
    yield from schema.get("enum", ())
    if "const" in schema:
        yield schema["const"]
    for one in schema.get("anyOf", ()):
        yield from _listed(one)


def written(value: Any) -> str:
    """Return a value as `--set` takes it."""
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else repr(value)
    )


def changed(recipe: LoadedRecipe, key: str, value: Any) -> tuple[Plan, Plan] | str:
    """Return plans at the paper scale without and with another value of a key, or why each is refused."""
    schema, name = type(table_of(recipe)).model_json_schema(), recipe.recipe.name
    others = other_values(key, value, schema, recipe)
    reasons = [] if others else ["the recipe has no other"]
    for beside in ((), *COMPANIONS.get(key.rpartition(".")[2], ())):
        for other in others:
            try:
                as_it_is, made = planned(name, *beside), planned(name, *beside, f"{key}={written(other)}")
            except TwinrunError as refusal:
                # A value of another type says nothing of the key.
                reasons += [str(refusal)] if "Input should be" not in str(refusal) else []
                continue
            if made.part != as_it_is.part or made.points != as_it_is.points:
                return as_it_is, made
    return "; ".join(reasons)


@cache
def planned(name: str, *settings: str) -> Plan:
    gpus = [claim.hardware.gpu for claim in PROJECT.recipe(name).published.claim if claim.hardware]
    return plan(name, gpu=next(iter(gpus), "mi250"), settings=settings)


def seen(
    made: Plan, claim: Claim | RecordClaim, recipe: LoadedRecipe
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what differs from the publication and counts, and the reasons of what differs and does not."""
    named = (*(claim.between or ()), getattr(claim, "point", None))
    points = [point for point in made.points if point.id in named] or list(made.points)
    value = claim.values[0] if isinstance(claim, RecordClaim) and claim.setting else None
    found = configuration_of_plan(made, points, claim, recipe=recipe, metrics=PROJECT.metrics, value=value)
    return (
        {one.field: one.found for one in found.differences},
        {one.field: f"{one.found}: {one.because}" for one in found.neutral},
    )


@pytest.mark.parametrize("name", PROJECT.recipe_names)
def test_a_changed_setting_is_seen_by_every_claim_or_neutral_for_it(name: str) -> None:
    recipe, published = PROJECT.recipe(name), PROJECT.recipe(name).published
    unseen = []
    for key, value in keys_of(table_of(recipe).model_dump(mode="json")):
        plans = changed(recipe, key, value)
        if isinstance(plans, str):
            assert plans, f"{key}: no other value was found, and none is refused"
            continue
        as_it_is, made = plans
        claims: tuple[Claim | RecordClaim, ...] = (*published.claim, *published.between_records)
        unseen += [
            f"{key} by {claim.id}"
            for claim in claims
            if seen(made, claim, recipe) == seen(as_it_is, claim, recipe)
        ]
    assert not unseen


@pytest.mark.parametrize("name", PROJECT.recipe_names)
def test_a_plan_at_the_paper_scale_is_the_published_one_but_for_what_nobody_can_have(name: str) -> None:
    recipe, made = PROJECT.recipe(name), planned(name)
    apart = {one.field for one in made.differences}
    assert apart <= recipe.published.standing.keys()
