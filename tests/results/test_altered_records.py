"""A farm of altered records over all claims: none is reproduced, or holds, where nothing was shown."""

from __future__ import annotations

import pytest

from tests.altered_records import ALTERATIONS, BETWEEN, first_side, honest, honest_between
from tests.records import PROJECT
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.results.between import judge_between
from twinrun.results.judge import judge
from twinrun.results.record import Record
from twinrun.results.verdicts import Verdict

CASES = [
    pytest.param(recipe, claim, record, id=f"{recipe}: {claim.id}") for recipe, claim, record in honest()
]
# Its corpus is not public, and nothing is said of it on other hardware.
NEVER_AS_PUBLISHED = {"under-two-days": ("config-mismatch",)}
BETWEEN_CASES = [
    pytest.param(recipe, claim, records, id=claim.id) for recipe, claim, records in honest_between()
]


def verdict_on(recipe: str, claim: Claim, record: Record) -> Verdict:
    published = PROJECT.recipe(recipe).published
    # The others say on which hardware the publication ran.
    others = tuple(one for one in published.claim if one.hardware or one.id == claim.id)
    published = published.model_copy(update={"claim": others})
    return next(one for one in judge(record, published, PROJECT) if one.claim == claim.id)


@pytest.mark.parametrize(("recipe", "claim", "record"), CASES)
def test_a_record_holds_and_none_of_its_alterations_does(recipe: str, claim: Claim, record: Record) -> None:
    honest_one = verdict_on(recipe, claim, record)
    expected = NEVER_AS_PUBLISHED.get(claim.id, ("reproduced", "holds-here"))
    assert honest_one.final in expected, honest_one.why
    for name, alteration in ALTERATIONS.items():
        if alteration.about(claim):
            found = verdict_on(recipe, claim, alteration.alter(record, claim))
            assert found.final not in alteration.never, f"{name}: {found.final}, {found.why}"


@pytest.mark.parametrize(("recipe", "claim", "records"), BETWEEN_CASES)
def test_records_hold_and_no_alteration_of_a_side_does(
    recipe: str, claim: RecordClaim, records: list[Record]
) -> None:
    def final(of: list[Record]) -> str:
        return next(one.final for one in judge_between(of, PROJECT) if one.claim == claim.id)

    assert final(records) == "holds-here"
    for name, alteration in ALTERATIONS.items():
        # What an alteration asks a claim for, claims of both kinds have.
        if name not in BETWEEN or not alteration.about(claim):  # type: ignore[arg-type]
            continue
        altered = first_side(alteration.alter)(records, claim)
        assert final(altered) not in ("reproduced", "holds-here"), name


def test_the_farm_is_large_enough() -> None:
    claims = [claim for case in CASES for claim in case.values if isinstance(claim, Claim)]
    altered = [name for claim in claims for name, one in ALTERATIONS.items() if one.about(claim)]
    assert len(altered) >= 150
    assert set(altered) == ALTERATIONS.keys()
