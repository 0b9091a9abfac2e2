from __future__ import annotations

import json
import math

import pytest

from tests.records import (
    PAPER_RATES,
    loss_curve,
    node_record,
    paper_record,
    record,
    smoke_record,
    with_losses,
    with_point,
)
from twinrun.circumstances import ABSENT, FACTORS, circumstances, differences, flat
from twinrun.compare import Comparison, compare
from twinrun.errors import InputError
from twinrun.record import ModelFlops, Record

A = {"GPU model": "one", "python": "3.11", "stack": "old"}


def names(comparison: Comparison) -> list[str]:
    return [item.name for item in comparison.differences]


def with_formula(original: Record, formula: str) -> Record:
    flops = original.points[0].model_flops
    changed = original
    for place in range(len(original.points)):
        changed = with_point(changed, place, model_flops=ModelFlops(rate=flops.rate, formula=formula))
    return changed


def test_a_record_does_not_differ_from_itself() -> None:
    found = compare(node_record(), node_record())
    assert found.differences == ()
    assert {pair.flops_ratio for pair in found.pairs} == {1.0}
    assert {pair.loss.value for pair in found.pairs if pair.loss} == {0.0}
    assert "within the spread" in found.summary


def test_the_summary_names_the_ratio_and_the_strongest_reasons() -> None:
    slow = node_record(gpu="h100-80gb", rates={1: 50_000.0})
    fast = node_record(gpu="h200", rates={1: 65_500.0})
    assert compare(slow, fast).summary == (
        "B is 1.31x A in model FLOP/s per device at devices=1;"
        " most likely because: GPU model NVIDIA H100 80GB SXM -> NVIDIA H200 SXM"
    )


def test_models_are_compared_by_model_flops_not_by_tokens() -> None:
    small, large = node_record(), node_record(rates={4: 15_000.0}, settings=("model=mpt-7b",))
    found = compare(small, large)
    assert "model mpt-1b -> mpt-7b" in found.summary
    assert found.pairs[-1].tokens_ratio < 0.3 < found.pairs[-1].flops_ratio


def test_a_difference_that_nothing_explains_is_said_to_be_so() -> None:
    found = compare(node_record(rates={1: 50_000.0}), node_record(rates={1: 60_000.0}))
    assert found.summary.endswith("nothing recorded explains it")


def test_points_are_paired_by_name_smallest_first() -> None:
    found = compare(node_record(), node_record(rates={2: 60_000.0, 4: 61_000.0}))
    assert (
        [pair.a.point for pair in found.pairs]
        == [pair.b.point for pair in found.pairs]
        == ["devices=2", "devices=4"]
    )


def test_without_a_common_point_the_largest_are_compared_and_it_is_said() -> None:
    found = compare(node_record(rates={1: 65_000.0}), node_record(rates={2: 60_000.0, 4: 50_000.0}))
    assert [(pair.a.point, pair.b.point) for pair in found.pairs] == [("devices=1", "devices=4")]
    assert found.pairing == "none has the same name, so the largest of each: devices=1 of A, devices=4 of B"
    assert "devices=4 against devices=1" in found.summary
    assert "devices 1 -> 4" in found.summary


def test_losses_of_other_world_sizes_are_compared_when_the_batches_are_the_same() -> None:
    pair = compare(node_record(rates={1: 65_000.0}), node_record(rates={4: 60_000.0})).pairs[0]
    assert pair.loss is not None
    assert 0 < pair.loss.value < 1e-4


def test_how_a_step_is_computed_does_not_forbid_comparing_losses() -> None:
    settings = ("model=mpt-1b", "compile=false", "attention=math", "microbatch=2")
    pair = compare(
        node_record(rates={1: 65_000.0}), node_record(rates={1: 30_000.0}, settings=settings)
    ).pairs[0]
    assert pair.loss is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"data_hash": "c" * 64}, "other data"), ({"order_hash": "c" * 64}, "another order of batches")],
)
def test_other_batches_have_no_loss_distance(changes: dict[str, str], reason: str) -> None:
    pair = compare(smoke_record(), with_point(smoke_record(), 0, **changes)).pairs[0]
    assert pair.loss is None
    assert reason in pair.loss_note


def test_another_configuration_has_no_loss_distance_and_is_named() -> None:
    other = node_record(settings=("model=mpt-1b", "optimizer.learning_rate=1e-3", "seed=18"))
    pair = compare(node_record(), other).pairs[0]
    assert pair.loss is None
    assert pair.loss_note == "not comparable: another configuration (seed, optimizer.learning_rate)"


def test_a_loss_that_is_no_number_is_named_by_its_step() -> None:
    curves = loss_curve(40), loss_curve(40)
    broken = with_losses(smoke_record(), (*curves[0][:4], math.nan, *curves[0][5:]), curves[1])
    pairs = compare(smoke_record(), broken).pairs
    assert pairs[0].loss is None
    assert "step 5" in pairs[0].loss_note
    assert pairs[1].loss is not None


def test_records_without_losses_are_compared_in_speed() -> None:
    pair = compare(with_losses(smoke_record(), (), ()), with_losses(smoke_record(), (), ())).pairs[0]
    assert (pair.loss, pair.loss_note) == (None, "not comparable: no loss was recorded")


def test_differences_are_ranked_by_their_factor() -> None:
    found = names(compare(node_record(), paper_record(rates={1: PAPER_RATES[1]})))
    expected = [
        "GPU model",
        "devices",
        "model",
        "shape.width",
        "training.global_batch",
        "microbatch",
        "stack",
    ]
    assert [name for name in found if name in expected] == expected


def test_a_circumstance_of_one_side_only_is_absent_on_the_other() -> None:
    found = differences(A, {**A, "driver": "570"})
    assert [(item.name, item.a, item.b) for item in found] == [("driver", ABSENT, "570")]


@pytest.mark.parametrize(
    ("name", "speed", "numerics"),
    [
        ("library collectives", "some", "none"),
        ("library something", "small", "small"),
        ("training.optimizer.learning_rate", "none", "large"),
        ("host", "none", "none"),
    ],
)
def test_a_circumstance_is_graded_by_the_first_factor_that_fits(name: str, speed: str, numerics: str) -> None:
    found = differences({}, {name: "2"})[0]
    assert (found.speed, found.numerics) == (speed, numerics)


def test_small_differences_are_not_called_the_reason() -> None:
    slow, fast = (node_record(rates={1: rate}) for rate in (50_000.0, 60_000.0))
    changed = fast.environment.model_copy(update={"variables": {"OMP_NUM_THREADS": "8"}})
    found = compare(slow, fast.model_copy(update={"environment": changed}))
    assert found.summary.endswith("only small things differ: variable OMP_NUM_THREADS 1 -> 8")


def test_every_circumstance_has_a_factor_and_no_factor_is_shadowed() -> None:
    assert FACTORS[-1].pattern == "*"
    assert len({factor.pattern for factor in FACTORS}) == len(FACTORS)
    graded = differences(circumstances(node_record(), node_record().points[0]), {})
    assert all(item.because for item in graded)


def test_flat_leaves_out_what_is_not_set_and_dots_what_is_nested() -> None:
    fields = flat(smoke_record().plan.training)
    assert fields["optimizer.betas"] == "0.9, 0.95"
    assert "repository" not in flat(smoke_record().plan.data)


def test_another_recipe_is_refused() -> None:
    original = smoke_record()
    other = original.model_copy(update={"plan": original.plan.model_copy(update={"recipe": "another"})})
    with pytest.raises(InputError, match="different recipes") as refused:
        compare(original, other)
    assert refused.value.exit_code == 2


def test_another_formula_is_refused() -> None:
    with pytest.raises(InputError, match="different formulas") as refused:
        compare(smoke_record(), with_formula(smoke_record(), "hardware-flops"))
    assert "hardware-flops" in str(refused.value)


def test_a_record_of_two_formulas_is_refused() -> None:
    point = smoke_record().points[0]
    mixed = with_point(smoke_record(), 0, model_flops=ModelFlops(rate=point.model_flops.rate, formula="x"))
    with pytest.raises(InputError, match="different formulas"):
        compare(mixed, mixed)


@pytest.mark.parametrize("changes", [{"unit": "GFLOP/s"}, {"per": "card"}])
def test_other_units_are_refused(changes: dict[str, str]) -> None:
    flops = smoke_record().points[0].model_flops
    other = smoke_record(rates={1: 5000.0})
    rate = flops.model_copy(update={"rate": flops.rate.model_copy(update=changes)})
    with pytest.raises(InputError, match="different units"):
        compare(smoke_record(rates={1: 5000.0}), with_point(other, 0, model_flops=rate))


def test_a_record_without_points_is_refused() -> None:
    empty = smoke_record().model_copy(update={"points": ()})
    with pytest.raises(InputError, match="no point"):
        compare(smoke_record(), empty)


def test_the_comparison_survives_json() -> None:
    found = compare(smoke_record(), record(scale="smoke", gpu=None, rates={1: 4000.0}, device_name="other"))
    assert Comparison.model_validate_json(json.dumps(found.model_dump(mode="json"))) == found
