"""Claims between records: two GPUs or two stacks, each side a record of every model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.records import BENCH, PROJECT, bench_record, committed, judge_between, training_record
from twinrun.foundation.errors import InputError
from twinrun.results.reading import read_records
from twinrun.results.record import Record
from twinrun.results.verdicts import Verdict

CLAIMS = {claim.id: claim for claim in PROJECT.recipe("mpt-throughput").published.between_records}
OCTOBER = CLAIMS["october-of-a100-40gb"]
# Published learning rates.
RATES = {"mpt-1b": 2e-4, "mpt-3b": 1.6e-4, "mpt-7b": 1.2e-4, "mpt-13b": 1e-4}


def record(
    model: str, *, gpu: str, stack: str | None, rate: float, count: int = 20, settings: tuple[str, ...] = ()
) -> Record:
    """Return a record as a run of the recipe makes it, under the name of a published stack."""
    made = training_record(
        {"nodes=1": rate},
        recipe="mpt-throughput",
        gpu=gpu,
        settings=(f"model={model}", f"optimizer.learning_rate={RATES[model]}", *settings),
        count=count,
    )
    return made.model_copy(update={"plan": made.plan.model_copy(update={"stack": stack})})


def sides(ratio: float, *, slower: float = 1.0) -> list[Record]:
    """Return records of October, MI250 cards `ratio` times as fast as A100s; the last one `slower` times."""
    found = []
    for model in OCTOBER.values:
        share = ratio * (slower if model == OCTOBER.values[-1] else 1.0)
        # One MI250 card is two devices.
        found.append(record(model, gpu="mi250", stack=OCTOBER.over.stack, rate=180 * share / 2))
        found.append(record(model, gpu="a100-40gb", stack=OCTOBER.under.stack, rate=180))
    return found


def verdict(records: list[Record]) -> Verdict:
    return next(one for one in judge_between(records, PROJECT) if one.claim == OCTOBER.id)


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [(0.85, "reproduced"), (0.83, "reproduced"), (0.99, "reproduced"), (0.82, "not-reproduced")],
)
def test_a_mean_is_judged_in_its_direction(ratio: float, outcome: str) -> None:
    found = verdict(sides(ratio))
    assert found.outcome == outcome
    assert found.measured == pytest.approx(ratio)


def test_the_mean_counts_every_model() -> None:
    found = verdict(sides(0.85, slower=0.6))
    assert found.outcome == "not-reproduced"
    assert found.measured == pytest.approx(0.85 * 3.6 / 4)


def test_a_side_without_a_model_gives_no_mean() -> None:
    found = verdict(sides(0.85)[:-1])
    assert found.outcome == "not-comparable"
    assert found.measured is None
    assert "mpt-13b" in found.reason
    assert "a100-40gb" in found.reason


def test_two_records_of_one_model_give_no_mean() -> None:
    records = sides(0.85)
    found = verdict([*records, records[0]])
    assert (found.outcome, "more than one" in found.reason) == ("not-comparable", True)


def test_one_step_gives_no_mean() -> None:
    records = sides(0.85)
    one = record("mpt-1b", gpu="mi250", stack=OCTOBER.over.stack, rate=69, count=1)
    assert verdict([one, *records[1:]]).outcome == "not-comparable"


def test_other_packages_than_the_stack_are_another_stack() -> None:
    first, *rest = sides(0.85)
    other = first.environment.model_copy(update={"lock_differences": {"torch": "found 2.11, lock has 2.2"}})
    found = verdict([first.model_copy(update={"environment": other}), *rest])
    assert found.outcome == "config-mismatch"
    assert "torch" in found.reason


def test_another_configuration_is_named() -> None:
    first, *rest = sides(0.85)
    apart = training_record(
        {"nodes=1": 69},
        recipe="mpt-throughput",
        settings=("model=mpt-1b", "precision=fp32"),
    )
    plan = apart.plan.model_copy(update={"stack": first.plan.stack})
    found = verdict([apart.model_copy(update={"plan": plan}), *rest])
    assert found.outcome == "config-mismatch"
    assert "precision is fp32" in found.reason


def elsewhere(ratio: float, *, models: Sequence[str] = OCTOBER.values, **changed: Any) -> list[Record]:
    """Return records of newer GPUs, the share of the peak of one `ratio` times that of the other."""
    found = []
    for model in models:
        for gpu, share in (("mi300x", 0.5 * ratio), ("h100-80gb", 0.5)):
            rate = share * PROJECT.gpus[gpu].peak_bf16_tflops
            found.append(record(model, gpu=gpu, stack="a-stack", rate=rate, **changed))
    return found


# 0.85 x 312 / 362.1.
DERIVED = 0.7324


@pytest.mark.parametrize(
    ("ratio", "outcome"),
    [
        (DERIVED, "holds-here"),
        (0.97 * DERIVED, "holds-here"),
        (1, "holds-here"),
        (0.96 * DERIVED, "fails-here"),
    ],
)
def test_on_other_gpus_the_restatement_is_judged(ratio: float, outcome: str) -> None:
    found = verdict(elsewhere(ratio))
    assert (found.outcome, found.final) == ("not-comparable", outcome)
    assert found.here
    assert found.here.measured == pytest.approx(ratio, rel=1e-3)
    assert "AMD Instinct MI300X" in "; ".join(found.departures)
    assert "0.85 * 312 / 362.1" in found.why


def test_a_restated_mean_names_what_it_is_without() -> None:
    found = verdict(elsewhere(0.8, models=OCTOBER.values[:2]))
    assert found.final == "holds-here"
    assert "without model mpt-7b, mpt-13b" in found.departures


HALF = elsewhere(0.8, models=OCTOBER.values[:2])


@pytest.mark.parametrize(
    ("records", "why"),
    [
        (HALF[:2], "2 make a mean"),
        (HALF[::2], "no record at nodes=1 of a cuda GPU"),
        ([*HALF, HALF[0]], "more than one record of a rocm GPU for model mpt-1b"),
        (elsewhere(0.8, count=1), "single sample"),
        (elsewhere(4.0), "more than"),
        (
            [*HALF, record("mpt-7b", gpu="mi250", stack="a-stack", rate=80)],
            "several machines",
        ),
        (elsewhere(0.8, settings=("precision=fp32",)), "precision is fp32, published bf16"),
    ],
    ids=(
        "one model",
        "one side",
        "twice",
        "one step",
        "beyond the peak",
        "two machines",
        "another precision",
    ),
)
def test_a_restatement_between_records_is_not_asked(records: list[Record], why: str) -> None:
    found = verdict(records)
    assert found.final == "not-comparable"
    assert why in found.why


def timed(gpu: str, ms: float, *, stack: str = "any", call: str = "scan-backward-fp16") -> Record:
    """Return a record of the published case, under the name of a stack."""
    made = bench_record({call: [ms] * 20}, gpu=gpu)
    return made.model_copy(update={"plan": made.plan.model_copy(update={"stack": stack})})


# By measurement, with the published times on a die of an MI250 and on an A40.
KERNELS = {
    "scan-forward": (2.7, 1.8),
    "scan-backward": (16.7, 7.6),
    "conv-forward": (0.23, 0.27),
    "conv-backward": (0.34, 0.41),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("slower", "outcome"), [(1, "reproduced"), (0.5, "reproduced"), (1.06, "not-reproduced")]
)
def test_a_call_is_judged_between_one_record_of_each_gpu(kernel: str, slower: float, outcome: str) -> None:
    call, (over, under) = f"{kernel}-fp16", KERNELS[kernel]
    records = [
        timed("mi250", slower * over, stack="rocm6.1-torch2.4", call=call),
        timed("a40", under, call=call),
    ]
    found = next(one for one in judge_between(records, PROJECT) if one.claim == f"{kernel}-mi250-of-a40")
    assert found.outcome == outcome
    assert found.measured == pytest.approx(slower * over / under)


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ([timed("mi250", 16.7, stack="rocm6.1-torch2.4")], "no record at 2x4096x5376x16 of a40"),
        ([timed("mi250", 16.7), timed("a40", 7.6)], "of mi250 with rocm6.1-torch2.4"),
        (
            [timed("mi250", 16.7, stack="rocm6.1-torch2.4"), *2 * [timed("a40", 7.6)]],
            "more than one record of a40",
        ),
    ],
    ids=("one side", "another stack", "twice"),
)
def test_a_call_without_one_record_of_each_gpu_is_not_judged(records: list[Record], why: str) -> None:
    found = next(one for one in judge_between(records, PROJECT) if one.claim == "scan-backward-mi250-of-a40")
    assert (found.final, found.measured) == ("not-comparable", None)
    assert why in found.reason


def test_a_call_is_asked_of_the_point_that_has_it() -> None:
    claim = next(one for one in PROJECT.recipe(BENCH).published.between_records if one.here)
    found = next(
        one
        for one in judge_between([timed("mi300x", 0.1), timed("h200", 0.2)], PROJECT)
        if one.claim == claim.id
    )
    assert found.final == "not-comparable"
    assert "has no conv-forward-fp16/roofline-share" in found.why


def test_a_recipe_without_such_claims_is_refused() -> None:
    folder = Path(__file__).resolve().parents[2] / "recipes" / "mpt7b-scaling" / "results"
    assert committed("mpt7b-scaling", "h200x2_cuda12.6-torch2.7_2026-11-21-1")
    with pytest.raises(InputError, match="no claim between records"):
        read_records([folder / "h200x2_cuda12.6-torch2.7_2026-11-21-1.json"], PROJECT)
