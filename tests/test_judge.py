from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.records import (
    PAPER_RATES,
    gpus,
    judged,
    loaded_recipe,
    loss_curve,
    node_record,
    paper_record,
    record,
    smoke_record,
    with_losses,
    with_point,
)
from twinrun.claims import Claim, Published
from twinrun.judge import judge, largest_difference, measured_value
from twinrun.record import Record, Verdict

SPEED = ("throughput-1-node", "throughput-32-nodes")
EFFICIENCY = "efficiency-1-to-32-nodes"
SAME_LOSS = "same-loss-at-every-world-size"


def verdict(judged_record: Record, claim: str) -> Verdict:
    return next(item for item in judged_record.verdicts if item.claim == claim)


def claim(name: str, **changes: object) -> Claim:
    found = next(item for item in loaded_recipe().published.claim if item.id == name)
    return found.model_copy(update=changes)


def judged_alone(judged_record: Record, one: Claim) -> Verdict:
    return judge(judged_record, Published(fingerprint={}, claim=(one,)), gpus())[0]


def scaled(factor: float) -> Record:
    return paper_record(rates={nodes: rate * factor for nodes, rate in PAPER_RATES.items()})


def test_the_published_rates_reproduce_every_claim() -> None:
    assert {item.outcome for item in paper_record().verdicts} == {"reproduced"}


def test_verdicts_keep_the_published_order() -> None:
    claims = [item.id for item in loaded_recipe().published.claim]
    assert [item.claim for item in paper_record().verdicts] == claims


@pytest.mark.parametrize(
    ("factor", "outcome"), [(0.90, "not-reproduced"), (0.97, "reproduced"), (1.5, "reproduced")]
)
def test_a_slower_run_never_passes_a_speed_claim(factor: float, outcome: str) -> None:
    assert {verdict(scaled(factor), name).outcome for name in SPEED} == {outcome}


@pytest.mark.parametrize(("factor", "outcome"), [(0.90, "reproduced"), (1.10, "not-reproduced")])
def test_lower_is_better_turns_the_direction(factor: float, outcome: str) -> None:
    one = claim("throughput-1-node", better="lower")
    assert judged_alone(scaled(factor), one).outcome == outcome


def test_a_card_of_two_dies_is_two_devices() -> None:
    run = paper_record()
    found = verdict(run, "throughput-1-node")
    assert run.points[0].devices == 8
    assert found.measured == pytest.approx(2 * run.points[0].model_flops.rate.median)
    assert found.per == "card"


def test_a_claim_per_device_is_not_multiplied() -> None:
    run = paper_record()
    one = claim("throughput-1-node", per="device")
    assert measured_value(one, run.points[0], run.gpu) == run.points[0].model_flops.rate.median


def test_tokens_are_taken_where_tokens_are_claimed() -> None:
    run = paper_record()
    one = claim("throughput-1-node", metric="tokens-per-second")
    assert measured_value(one, run.points[0], run.gpu) == 2 * run.points[0].tokens_per_second.median


def test_another_gpu_is_shown_with_mfu_beside_mfu() -> None:
    found = verdict(node_record(), "throughput-1-node")
    assert found.outcome == "not-comparable"
    assert found.measured is None
    assert "MFU 45.9% published" in found.reason
    assert "60.0% at devices=1" in found.reason


def test_without_a_gpu_nothing_absolute_is_comparable() -> None:
    found = verdict(smoke_record(), "throughput-1-node")
    assert found.outcome == "not-comparable"
    assert "no GPU" in found.reason


def test_another_model_of_the_same_family_is_not_the_published_hardware() -> None:
    assert verdict(paper_record(gpu="mi250x"), "throughput-1-node").outcome == "not-comparable"


def test_a_missing_point_is_named() -> None:
    found = verdict(paper_record(rates={1: PAPER_RATES[1]}), "throughput-32-nodes")
    assert found.outcome == "not-comparable"
    assert "nodes=32" in found.reason


def test_another_configuration_is_named_field_by_field() -> None:
    run = record(scale="paper", gpu="mi250", rates=PAPER_RATES, settings=("precision=fp32",))
    for name in (*SPEED, EFFICIENCY):
        found = verdict(run, name)
        assert found.outcome == "config-mismatch"
        assert "precision is fp32, published bf16" in found.reason
        assert found.measured is not None


@pytest.mark.parametrize(
    ("kept", "outcome"), [(0.90, "not-reproduced"), (0.95, "reproduced"), (1.02, "reproduced")]
)
def test_a_ratio_is_between_points_of_one_run(kept: float, outcome: str) -> None:
    found = verdict(paper_record(rates={1: 1000.0, 32: 1000.0 * kept}), EFFICIENCY)
    assert found.outcome == outcome
    assert found.measured == pytest.approx(kept)


def test_a_ratio_without_its_points_tells_what_the_run_keeps() -> None:
    found = verdict(node_record(), EFFICIENCY)
    assert found.outcome == "not-comparable"
    assert "from devices=1 to devices=4 it keeps 0.951" in found.reason


def test_equal_curves_hold_the_invariant() -> None:
    found = verdict(with_losses(smoke_record(), loss_curve(40), loss_curve(40)), SAME_LOSS)
    assert (found.outcome, found.measured) == ("reproduced", 0.0)


def test_curves_that_part_break_the_invariant() -> None:
    found = verdict(with_losses(smoke_record(), loss_curve(40), loss_curve(40, shift=0.05)), SAME_LOSS)
    assert found.outcome == "not-reproduced"
    assert "at step 40 of 40" in found.reason


def test_a_curve_that_ends_early_breaks_the_invariant() -> None:
    found = verdict(with_losses(smoke_record(), loss_curve(40), loss_curve(40)[:39]), SAME_LOSS)
    assert found.outcome == "not-reproduced"
    assert "step 40" in found.reason


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_breaks_the_invariant(bad: float) -> None:
    broken = (*loss_curve(40)[:6], bad, *loss_curve(40)[7:])
    for curves in ((loss_curve(40), broken), (broken, loss_curve(40)), (broken, broken)):
        found = verdict(with_losses(smoke_record(), *curves), SAME_LOSS)
        assert found.outcome == "not-reproduced"
        assert found.measured is None
        assert "step 7" in found.reason


def test_another_order_of_batches_is_a_mismatch_not_a_failure() -> None:
    found = verdict(with_point(smoke_record(), 1, order_hash="c" * 64), SAME_LOSS)
    assert found.outcome == "config-mismatch"
    assert "data order" in found.reason


def test_one_point_cannot_show_an_invariant() -> None:
    assert verdict(smoke_record(rates={1: 5000.0}), SAME_LOSS).outcome == "not-comparable"


def test_no_point_is_judged_without_failing() -> None:
    empty = judged(smoke_record().model_copy(update={"points": ()}))
    assert {item.outcome for item in empty.verdicts} == {"not-comparable"}


RATES = st.floats(min_value=100, max_value=10_000)


@given(rate=RATES, gain=st.floats(min_value=1, max_value=10))
def test_a_faster_run_never_loses_a_speed_claim(rate: float, gain: float) -> None:
    slow, fast = (paper_record(rates={1: value}) for value in (rate, rate * gain))
    outcomes = [verdict(run, "throughput-1-node").outcome for run in (slow, fast)]
    assert outcomes != ["reproduced", "not-reproduced"]


@given(kept=st.floats(min_value=0.1, max_value=2), gain=st.floats(min_value=1, max_value=3))
def test_better_scaling_never_loses_the_ratio(kept: float, gain: float) -> None:
    runs = [paper_record(rates={1: 1000.0, 32: 1000.0 * share}) for share in (kept, kept * gain)]
    outcomes = [verdict(run, EFFICIENCY).outcome for run in runs]
    assert outcomes != ["reproduced", "not-reproduced"]


LOSSES = st.lists(st.floats(min_value=0.01, max_value=20), min_size=1, max_size=30)


@given(first=LOSSES, second=LOSSES)
def test_distance_is_symmetric_and_at_a_step(first: list[float], second: list[float]) -> None:
    forth = largest_difference([tuple(first), tuple(second)])
    back = largest_difference([tuple(second), tuple(first)])
    assert forth == back or (math.isnan(forth[0]) and math.isnan(back[0]) and forth[1] == back[1])
    assert 1 <= forth[1] <= max(len(first), len(second))


@given(curve=LOSSES)
def test_a_curve_is_at_no_distance_from_itself(curve: list[float]) -> None:
    assert largest_difference([tuple(curve), tuple(curve)])[0] == 0
