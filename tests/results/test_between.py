"""Claims between records: two GPUs or two stacks, each side a record of every model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.records import PROJECT, committed, training_record
from twinrun.foundation.errors import InputError
from twinrun.results.between import judge_between, read_records
from twinrun.results.record import Record, Verdict

CLAIMS = {claim.id: claim for claim in PROJECT.recipe("mpt-throughput").published.between_records}
OCTOBER = CLAIMS["october-of-a100-80gb"]


def record(model: str, *, gpu: str, stack: str, rate: float, count: int = 20) -> Record:
    """Return a record as a run of the recipe makes it, under the name of a published stack."""
    settings = (f"model={model}",)
    made = training_record(
        {"nodes=1": rate}, recipe="mpt-throughput", gpu=gpu, settings=settings, count=count
    )
    return made.model_copy(update={"plan": made.plan.model_copy(update={"stack": stack})})


def sides(ratio: float, *, slower: float = 1.0) -> list[Record]:
    """Return records of October, MI250 cards `ratio` times as fast as A100s; the last one `slower` times."""
    found = []
    for model in OCTOBER.values:
        share = ratio * (slower if model == OCTOBER.values[-1] else 1.0)
        # One MI250 card is two devices.
        found.append(record(model, gpu="mi250", stack=OCTOBER.over.stack, rate=180 * share / 2))
        found.append(record(model, gpu="a100-80gb", stack=OCTOBER.under.stack, rate=180))
    return found


def verdict(records: list[Record]) -> Verdict:
    return next(one for one in judge_between(records, PROJECT) if one.claim == OCTOBER.id)


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [(0.77, "reproduced"), (0.75, "reproduced"), (0.9, "reproduced"), (0.74, "not-reproduced")],
)
def test_a_mean_is_judged_in_its_direction(ratio: float, outcome: str) -> None:
    found = verdict(sides(ratio))
    assert found.outcome == outcome
    assert found.measured == pytest.approx(ratio)


def test_the_mean_counts_every_model() -> None:
    found = verdict(sides(0.77, slower=0.6))
    assert found.outcome == "not-reproduced"
    assert found.measured == pytest.approx(0.77 * 3.6 / 4)


def test_a_side_without_a_model_gives_no_mean() -> None:
    found = verdict(sides(0.77)[:-1])
    assert found.outcome == "not-comparable"
    assert found.measured is None
    assert "mpt-13b" in found.reason
    assert "a100-80gb" in found.reason


def test_two_records_of_one_model_give_no_mean() -> None:
    records = sides(0.77)
    found = verdict([*records, records[0]])
    assert (found.outcome, "more than one" in found.reason) == ("not-comparable", True)


def test_one_step_gives_no_mean() -> None:
    records = sides(0.77)
    one = record("mpt-1b", gpu="mi250", stack=OCTOBER.over.stack, rate=69, count=1)
    assert verdict([one, *records[1:]]).outcome == "not-comparable"


def test_other_packages_than_the_stack_are_another_stack() -> None:
    first, *rest = sides(0.77)
    other = first.environment.model_copy(update={"lock_differences": {"torch": "found 2.11, lock has 2.2"}})
    found = verdict([first.model_copy(update={"environment": other}), *rest])
    assert found.outcome == "not-comparable"
    assert "torch" in found.reason


def test_another_configuration_is_named() -> None:
    first, *rest = sides(0.77)
    apart = training_record(
        {"nodes=1": 69},
        recipe="mpt-throughput",
        settings=("model=mpt-1b", "precision=fp32"),
    )
    plan = apart.plan.model_copy(update={"stack": first.plan.stack})
    found = verdict([apart.model_copy(update={"plan": plan}), *rest])
    assert found.outcome == "config-mismatch"
    assert "precision is fp32" in found.reason


def test_a_recipe_without_such_claims_is_refused() -> None:
    folder = Path(__file__).resolve().parents[2] / "recipes" / "mpt7b-scaling" / "results"
    assert committed("mpt7b-scaling", "h200x2_cuda12.6-torch2.7_2026-11-21-1")
    with pytest.raises(InputError, match="no claim between records"):
        read_records([folder / "h200x2_cuda12.6-torch2.7_2026-11-21-1.json"], PROJECT)
