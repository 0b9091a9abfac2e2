"""Every restatement of every recipe: the published value holds it, and what it says that it fails does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.counterexamples import restated_at
from tests.records import PROJECT
from twinrun.manifests.claims import Claim, RecordClaim


def _restated() -> Iterator[tuple[str, Claim | RecordClaim]]:
    for loaded in PROJECT.recipes().values():
        claims: list[Claim | RecordClaim] = [*loaded.published.claim, *loaded.published.between_records]
        yield from ((loaded.recipe.name, claim) for claim in claims if claim.here)


RESTATED = {f"{recipe}: {claim.id}": (recipe, claim) for recipe, claim in _restated()}


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
