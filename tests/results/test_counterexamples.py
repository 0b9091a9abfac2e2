"""Every restatement of every recipe: the published value holds it, and what it says that it fails does."""

from __future__ import annotations

import pytest

from tests.counterexamples import restated_at
from tests.records import PROJECT
from twinrun.manifests.claims import Claim, RecordClaim

RESTATED: dict[str, tuple[str, Claim | RecordClaim]] = {
    f"{loaded.recipe.name}: {claim.id}": (loaded.recipe.name, claim)
    for loaded in PROJECT.recipes().values()
    for claim in (*loaded.published.claim, *loaded.published.between_records)
    if claim.here
}


@pytest.mark.parametrize(("recipe", "claim"), RESTATED.values(), ids=RESTATED)
def test_the_published_value_holds_and_the_counterexample_fails(
    recipe: str, claim: Claim | RecordClaim
) -> None:
    assert claim.here
    outcomes = {}
    for name, value in (("published", claim.here.value), ("fails_when", claim.here.fails_when.value)):
        found = restated_at(recipe, claim, value)
        outcomes[name] = found.outcome, found.reason
    assert outcomes["published"][0] == "holds-here", outcomes["published"]
    assert outcomes["fails_when"][0] == "fails-here", outcomes["fails_when"]


def test_there_are_restatements_in_every_metric_that_records_are_made_for() -> None:
    assert len(RESTATED) > 25
