"""Every key that `--set` takes: another value is seen by each claim, or is declared neutral for it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.records import PROJECT, plan
from tests.settings import keys_of, other_values, table_of, written
from twinrun.foundation.errors import TwinrunError
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.plan import Plan
from twinrun.results.configuration import apart_from
from twinrun.results.outlook import planned as planned_record
from twinrun.workloads import load_workload

# What lets a value be that is refused alone.
COMPANIONS = {
    "sharding": [("model=mpt-1b",)],
    "trace": [("compile=false",)],
}


def changed(recipe: LoadedRecipe, key: str, value: Any) -> tuple[Plan, Plan] | str:
    """Return plans at the paper scale without and with another value of a key, or why each is refused."""
    name, others = recipe.recipe.name, other_values(key, value, recipe)
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
    """Return what differs from the publication and counts, and what differs and does not."""
    named = (*(claim.between or ()), getattr(claim, "point", None))
    points = [point for point in made.points if point.id in named] or list(made.points)
    value = claim.values[0] if isinstance(claim, RecordClaim) and claim.setting else None
    found = apart_from(claim, planned_record(made, PROJECT), points, setting=value or "")
    return (
        {one.field: one.found for one in found.differences},
        {one.field: str(one) for one in found.neutral},
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


def test_what_is_neutral_is_a_setting_that_there_is() -> None:
    known: set[str] = set()
    for name in PROJECT.recipe_names:
        for made in (planned(name), plan(name, gpu="h200", scale="node")):
            workload = load_workload(made.workload)
            known |= {field for point in made.points for field in workload.settings.of(made.part, point)}
    # A model that is there has a revision; all of these plans train one.
    known |= {"model.revision"}
    groups = {field.partition(".")[0] for field in known}
    rows = [row for name in PROJECT.recipe_names for row in PROJECT.recipe(name).published.neutral]
    named = {field for row in rows for field in row.fields}
    named |= {field for metric in PROJECT.metrics.values() for field in metric.neutral}
    assert not named - known - groups
