"""Every setting counts: of invariants, of the sides of a claim, and of models that a list is published of."""

from __future__ import annotations

import pytest

from tests.counterexamples import configured
from tests.records import PROJECT, judge, judge_between, plan, training_record
from twinrun.manifests.claims import Claim
from twinrun.results.configuration import Configuration, configuration_of_plan
from twinrun.results.record import Record

SCALING, THROUGHPUT = PROJECT.recipe("mpt7b-scaling"), PROJECT.recipe("mpt-throughput")
OTHER = {
    "data": ("data=standard-library",),
    "a tenth of the learning rate": ("optimizer.learning_rate=1.2e-5",),
    "fp32": ("precision=fp32",),
    "batch": ("global_batch=512",),
    "a smaller model": ("model=mpt-1b",),
    "loop": ("trainer=plain",),
    "compiler": ("compile=false",),
    "reduction": ("reduction=step",),
    "end of the schedule": ("optimizer.decay_steps=1000",),
    "sums": ("trainer=plain", "summation=canonical"),
}


@pytest.mark.parametrize("other", OTHER)
def test_an_invariant_of_another_configuration_is_not_the_published_one(other: str) -> None:
    planned = plan("mpt7b-scaling", settings=OTHER[other])
    rates = {point.id: 80.0 for point in planned.points}
    record = training_record(rates, recipe="mpt7b-scaling", settings=OTHER[other])
    verdicts = {one.claim: one for one in judge(record, SCALING.published, PROJECT)}
    same = [verdict for claim, verdict in verdicts.items() if claim.startswith("same-")]
    assert same
    assert {one.outcome for one in same} == {"config-mismatch"}


@pytest.mark.parametrize("other", ["compile=false", "trainer=plain"])
def test_sides_that_differ_are_not_compared(other: str) -> None:
    claim = next(one for one in THROUGHPUT.published.between_records if one.here)

    def side(gpu: str, share: float, *settings: str) -> list[Record]:
        rate = share * PROJECT.gpus[gpu].device_peak_flops / 1e12
        asked = [(*configured("mpt-throughput", claim, value=name), *settings) for name in claim.values]
        return [
            training_record({"nodes=1": rate}, recipe="mpt-throughput", gpu=gpu, settings=one)
            for one in asked
        ]

    for changed, outcome in (((), "holds-here"), ((other,), "not-comparable")):
        records = [*side("mi300x", 0.4), *side("h100-80gb", 0.5, *changed)]
        verdict = next(one for one in judge_between(records, PROJECT) if one.claim == claim.id)
        assert verdict.final == outcome, verdict.why
        assert not changed or other.partition("=")[0] in verdict.why


def found_of(recipe: str, claim: str, *settings: str, here: bool = False) -> Configuration:
    loaded = PROJECT.recipe(recipe)
    about: Claim = next(one for one in loaded.published.claim if one.id == claim)
    made = plan(recipe, settings=settings)
    return configuration_of_plan(made, made.points, about, recipe=loaded, metrics=PROJECT.metrics, here=here)


def test_a_model_with_the_settings_of_another_is_no_published_one() -> None:
    found = found_of("mpt-chinchilla", "stable-to-the-end", "training.model=mpt-3b")
    assert {"optimizer.learning_rate", "tokens"} <= {one.field for one in found.differences}


def test_what_the_publication_does_not_give_is_said() -> None:
    found = found_of("mpt7b-scaling", "throughput-1-node", "compile=false")
    assert "compile" in found.silent
    assert not found.equal
    assert found.words == "compile is False, the recipe's True (the publication is silent)"


def test_what_is_neutral_is_named_with_its_reason() -> None:
    found = found_of("mpt7b-scaling", "throughput-1-node", "steps=200")
    assert found.equal
    (one,) = found.neutral
    assert (one.field, one.found) == ("steps", 200)
    assert one.because.startswith("the median")
