"""Curves of two records, as of two sites, held against each other: the command's verdict, table and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.records import PROJECT, committed
from twinrun.foundation.errors import InputError
from twinrun.report.comparison import parity_view, windows_table, write_parity_page
from twinrun.results.parity import METRIC, CurveParity, held_between
from twinrun.results.record import Record
from twinrun.workloads.training.numbers import CONTROL
from twinrun.workloads.workload import PointRecord


def mirrored(record: Record) -> Record:
    """Return a record with twice as many control runs: each again, as far from its run on the other side."""

    def doubled(point: PointRecord) -> PointRecord:
        run = point.one_series("loss")
        controls = [one for one in point.series if one.id.startswith(CONTROL)]
        assert run
        others = tuple(
            one.model_copy(
                update={
                    "id": f"{CONTROL}{len(controls) + number}",
                    "values": tuple(2 * a - b for a, b in zip(run.values, one.values, strict=True)),
                }
            )
            for number, one in enumerate(controls, start=1)
        )
        return point.model_copy(update={"series": (*point.series, *others)})

    return record.model_copy(update={"points": tuple(doubled(point) for point in record.points)})


HERE = mirrored(committed("mpt1b-convergence", "h200x1_cuda12.6-torch2.7_2026-11-24"))
ANOTHER = committed("mpt-throughput", "h200x1_cuda12.6-torch2.7_2026-11-23-1")


def held(a: Record, b: Record, **options: Any) -> tuple[CurveParity, ...]:
    """Hold two records against each other by the metric of the loss."""
    return held_between(a, b, metric=PROJECT.metrics[METRIC], **options)


def elsewhere(*, apart: float, controls: bool = True, data: str | None = None, since: int = 0) -> Record:
    """Return the record as another site would have it, its losses `apart` from those here since a step."""

    facts = {"data hash": data} if data else {}

    def moved(point: PointRecord) -> PointRecord:
        series = tuple(
            one.model_copy(
                update={
                    "values": tuple(
                        value * (1 + apart * (step >= since)) for step, value in enumerate(one.values)
                    )
                }
            )
            for one in point.series
            if controls or one.id == "loss"
        )
        # Another machine takes another time.
        times = tuple(
            one.model_copy(update={"low": one.low * 0.99}) if one.id == "step-time" else one
            for one in point.measurements
        )
        changed = {"series": series, "facts": point.facts | facts, "measurements": times}
        return point.model_copy(update=changed)

    machine = HERE.machine.model_copy(update={"host": "elsewhere"})
    points = tuple(moved(point) for point in HERE.points)
    return HERE.model_copy(update={"machine": machine, "points": points, "run": "elsewhere"})


def test_two_sites_have_one_curve_inside_the_control_runs_of_both() -> None:
    found = held(HERE, elsewhere(apart=3e-7))
    assert [one.parity.outcome for one in found] == ["inside", "inside"]
    assert [(one.a.name[:13], one.b.name[:13]) for one in found] == [
        ("A: devices=1,", "B: devices=1,"),
        ("A: leg=last, ", "B: leg=last, "),
    ]
    # Those of the undisturbed runs, which the legs repeat too.
    assert {len(window.controls) for one in found for window in one.parity.windows} == {20}
    assert [window.steps for window in found[0].parity.windows] == [120, 100]


def test_runs_that_are_the_same_bit_for_bit_show_rounding_once() -> None:
    for one in held(HERE, HERE):
        assert {len(window.controls) for window in one.parity.windows} == {10}


def constant(record: Record) -> Record:
    """Return the record with losses that never fall."""
    points = tuple(
        point.model_copy(
            update={
                "series": tuple(
                    one.model_copy(update={"values": (4.0 + number / 1e7,) * len(one.values)})
                    for number, one in enumerate(point.series)
                )
            }
        )
        for point in record.points
    )
    return record.model_copy(update={"points": points})


def cut(record: Record, steps: int) -> Record:
    """Return the record with the first steps of its curves alone."""
    points = tuple(
        point.model_copy(
            update={
                "series": tuple(one.model_copy(update={"values": one.values[:steps]}) for one in point.series)
            }
        )
        for point in record.points
    )
    return record.model_copy(update={"points": points})


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (HERE, HERE, "a run and itself"),
        (HERE, HERE.model_copy(update={"run": "copied"}), "a run and itself"),
        (constant(HERE), constant(elsewhere(apart=0.0)), "nothing was learned"),
        (cut(HERE, 12), cut(elsewhere(apart=0.0), 12), "show no curve"),
    ],
    ids=["itself", "copied", "constant", "within the warm-up"],
)
def test_curves_that_show_no_training_are_not_one(a: Record, b: Record, why: str) -> None:
    found = held(a, b, points=("devices=1", "devices=1"))
    assert [one.parity.outcome for one in found] == ["no-evidence"]
    assert why in found[0].parity.reason


def test_without_a_claim_the_metric_bounds_the_envelope() -> None:
    bound = PROJECT.metrics[METRIC].evidence.bounds[HERE.plan.part.training.precision]
    (one, _) = held(HERE, elsewhere(apart=3e-7))
    assert max(window.envelope for window in one.parity.windows) <= bound


def test_a_curve_that_leaves_the_envelope_is_another() -> None:
    (_, legs) = held(HERE, elsewhere(apart=0.0, controls=False))
    assert legs.parity.outcome == "inside"
    (undisturbed, _) = held(HERE, elsewhere(apart=1e-5, controls=False))
    assert undisturbed.parity.outcome == "start"
    (switched,) = held(HERE, HERE, points=("devices=1", "leg=last"))
    assert (switched.parity.outcome, switched.parity.windows[0].step) == ("inside", 70)
    (late, _) = held(HERE, elsewhere(apart=1e-4, controls=False, since=60))
    assert (late.parity.outcome, late.parity.windows[0].step > 60) == ("outside", True)


def test_the_narrowest_bound_of_the_claims_holds_between_records() -> None:
    claims = PROJECT.recipe("mpt1b-convergence").published.claim
    bounds = [claim.bounds for claim in claims if claim.bounds]
    assert bounds == [{"fp32": 3e-5, "bf16": 2e-3}]
    (one, _) = held(HERE, HERE, claims=claims)
    assert max(window.envelope for window in one.parity.windows) <= bounds[0]["fp32"]
    narrow = [claim.model_copy(update={"bounds": {"fp32": 1e-6}}) for claim in claims]
    (one, _) = held(HERE, HERE, claims=narrow)
    assert one.parity.outcome == "no-envelope"


def test_a_first_step_that_differs_names_what_it_started_from() -> None:
    (one, _) = held(HERE, elsewhere(apart=1e-2, data="e" * 64))
    assert one.parity.outcome == "start"
    assert f"data {str(HERE.points[0].facts['data hash'])[:12]} and {'e' * 12}" in one.parity.reason


def test_control_runs_of_another_experiment_do_not_count() -> None:
    with pytest.raises(InputError, match="no control runs"):
        held(HERE, HERE, controls=[elsewhere(apart=0.0, controls=False)])
    other = elsewhere(apart=0.0, data="e" * 64)
    with pytest.raises(InputError, match="of another experiment") as caught:
        held(HERE, HERE, controls=[other])
    assert "data " in str(caught.value.found)
    (one, *_) = held(HERE, ANOTHER)
    assert one.parity.outcome == "start"
    assert {len(window.controls) for window in one.parity.windows} == {10}


@pytest.mark.parametrize("points", [("devices=1",), ("devices=1", "leg=7"), ("a", "b", "c")])
def test_points_that_are_not_there_are_refused(points: tuple[str, ...]) -> None:
    with pytest.raises(InputError):
        held(HERE, HERE, points=points)


def test_the_page_draws_curves_difference_and_envelope_whole_and_at_first(tmp_path: Path) -> None:
    other = elsewhere(apart=3e-7)
    found = held(HERE, other)
    write_parity_page(tmp_path / "page.html", found, a=HERE, b=other)
    text = (tmp_path / "page.html").read_text()
    # Two pairs, two windows, two pictures each.
    assert text.count("<svg") == 8
    for words in ("whole curve", "first 100 steps", "How far they are apart", "elsewhere"):
        assert words in text
    assert "<script" not in text
    assert len(windows_table(found[0]).rows) == 2
    assert parity_view(found).renderables
