"""Restatements: they hold, they fail, and they are not asked where nothing could answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.records import PROJECT, bench_record, judge, measurement, replaced, training_record, verdict_on
from twinrun.results.conditions import Findings
from twinrun.results.judge import verdicts_on
from twinrun.results.record import Record
from twinrun.results.verdicts import FAILURES, RestatementVerdict

ONE, MANY, KEPT = "throughput-1-node", "throughput-32-nodes", "efficiency-1-to-32-nodes"
NODE: dict[str, Any] = {"scale": "node", "gpu": "h200", "settings": ("model=mpt-1b",)}
# TFLOP/s of a device that are exactly the restated shares of an H200's dense peak.
SHARE_1, SHARE_32 = 0.4586 * 989.5, 0.4392 * 989.5
BYTES, COPY = 353232896.0, 4.2e12


def rejudged(record: Record) -> Record:
    published = PROJECT.recipe(record.plan.recipe).published
    return record.model_copy(update={"verdicts": judge(record, published, PROJECT)})


def here(record: Record, claim: str) -> RestatementVerdict:
    found = verdict_on(record, claim).here
    assert found
    return found


def h200(rates: dict[str, float], **options: Any) -> Record:
    """Return a record of H200s whose every planned point has a rate."""
    record = training_record(rates, **(NODE | options))
    points = tuple(point for point in record.plan.points if point.id in rates)
    plan = record.plan.model_copy(update={"points": points})
    return rejudged(record.model_copy(update={"plan": plan}))


def kernel(share: float, **changes: Any) -> Record:
    """Return a scan on an H200 at a share of its roofline bound, and a baseline as fast."""
    bound = BYTES / COPY * 1e3
    times = {name: [bound / share] * 20 for name in ("scan-forward-fp16", "scan-forward-fp16@mamba_ssm")}
    record = bench_record(times, gpu="h200", facts={"scan-forward-fp16 work copy": BYTES})
    point = record.points[0]
    peak = measurement(record, point.id, "scan-forward-fp16").model_copy(
        update={
            "id": "peak-rate@copy",
            "metric": "peak-rate",
            "unit": "B/s",
            "median": COPY,
            "low": COPY,
            "high": COPY,
            "labels": {"resource": "copy"},
        }
    )
    measured = tuple(one for one in point.measurements if "/" not in one.id)
    point = point.model_copy(update={"measurements": (*measured, peak), **changes})
    derived = record.workload.derived(record.plan.part, point, record.gpu)
    whole = replaced(record, point.id, measurements=(*point.measurements, *derived))
    return rejudged(whole)


def test_the_verdict_as_published_is_kept_beside_the_restated_one() -> None:
    found = verdict_on(h200({"devices=1": SHARE_1}), ONE)
    assert (found.outcome, found.final) == ("not-comparable", "holds-here")


def test_what_was_judged_as_published_is_not_restated() -> None:
    record = training_record({"nodes=1": 83.0, "nodes=32": 79.5})
    assert all(one.here is None for one in rejudged(record).verdicts)


def test_the_reason_names_what_differs_and_the_published_value() -> None:
    found = here(h200({"devices=1": SHARE_1, "devices=2": SHARE_1 * 1.1}), ONE)
    for part in (
        "Here 45.9 % MFU at devices=1, the worst of 2",
        "published 45.9 % MFU = 166 / 362",
        "2.0% worse is allowed because",
    ):
        assert part in found.reason
    for departure in (
        "GPU NVIDIA H200 SXM, published AMD Instinct MI250",
        "points devices=1, devices=2, published nodes=1",
        "parameters 1,315,950,592, published 6,658,859,008",
        "global_batch 64, published 1,536",
    ):
        assert departure in found.departures


@pytest.mark.parametrize(
    ("rates", "claim", "outcome"),
    [
        ({"devices=1": SHARE_1}, ONE, "holds-here"),
        ({"devices=1": SHARE_1 * 0.981}, ONE, "holds-here"),
        ({"devices=1": SHARE_1 * 0.979}, ONE, "fails-here"),
        ({"devices=1": SHARE_1, "devices=2": SHARE_1 * 0.9}, ONE, "fails-here"),
        ({"devices=1": SHARE_1 * 0.5, "devices=2": SHARE_32}, MANY, "holds-here"),
        ({"devices=1": SHARE_1, "devices=2": SHARE_32 * 0.97}, MANY, "fails-here"),
        ({"devices=1": SHARE_1}, MANY, "not-comparable"),
        ({"devices=2": 500.0, "devices=4": 500 * 0.9914}, KEPT, "holds-here"),
        ({"devices=2": 500.0, "devices=4": 500 * 0.985}, KEPT, "fails-here"),
        ({"devices=2": 500.0, "devices=8": 500 * 0.9914**2}, KEPT, "holds-here"),
        ({"devices=2": 500.0, "devices=8": 500 * 0.985**2}, KEPT, "fails-here"),
        # One device shards nothing: what the step to two costs is no part of the published sweep.
        ({"devices=1": 600.0, "devices=2": 500.0, "devices=4": 500 * 0.9914}, KEPT, "holds-here"),
        ({"devices=1": 500.0, "devices=2": 500.0}, KEPT, "not-comparable"),
        ({"devices=2": 500.0}, KEPT, "not-comparable"),
    ],
)
def test_the_worst_point_decides(rates: dict[str, float], claim: str, outcome: str) -> None:
    assert here(h200(rates), claim).outcome == outcome


def test_the_published_points_are_taken_where_the_run_has_them() -> None:
    record = training_record({"nodes=1": SHARE_1 * 1.2, "nodes=32": SHARE_32}, gpu="h200")
    plan = record.plan
    points = tuple(one for one in plan.points if one.id in ("nodes=1", "nodes=32"))
    record = rejudged(record.model_copy(update={"plan": plan.model_copy(update={"points": points})}))
    assert here(record, ONE).measured == pytest.approx(1.2 * 45.86)
    assert here(record, MANY).measured == pytest.approx(43.92)


SLOWER = random.Random(18)


@pytest.mark.parametrize("number", range(50))
def test_a_slower_run_never_holds(number: int) -> None:
    """10 % and more under the restated value beyond tolerance, at all points or at one of them."""
    low = SHARE_1 * 0.98 * SLOWER.uniform(0.4, 0.9)
    high = SHARE_1 * SLOWER.uniform(1.0, 1.8)
    one, other = [(low, low), (low, high), (high, low)][number % 3]
    record = h200({"devices=1": one, "devices=2": other}, spread=0.001)
    assert verdict_on(record, ONE).final == "fails-here"
    assert "holds-here" not in {verdict_on(record, name).final for name in (ONE,)}
    assert any(found.final in FAILURES for found in rejudged(record).verdicts)


@pytest.mark.parametrize("number", range(20))
def test_a_slower_kernel_never_holds(number: int) -> None:
    found = kernel(0.1096 * 0.95 * (0.9 - number / 50))
    assert verdict_on(found, "scan-forward-mi250").final == "fails-here"


def test_a_kernel_is_judged_by_its_bound() -> None:
    found = kernel(0.4)
    assert here(found, "scan-forward-mi250").measured == pytest.approx(40.0)
    assert "Weaker than published" in here(found, "scan-forward-mi250").reason
    assert verdict_on(found, "scan-forward-mi250").final == "holds-here"


@pytest.mark.parametrize("share", [0.1096 * 0.94, 0.2016 / 0.4563 / 5])
def test_a_kernel_just_over_the_limit_and_one_five_times_slower_than_ours_fail(share: float) -> None:
    assert verdict_on(kernel(share), "scan-forward-mi250").final == "fails-here"


def obstacle(record: Record, claim: str = ONE) -> str:
    found = here(record, claim)
    assert found.outcome == "not-comparable"
    assert verdict_on(record, claim).final in ("not-comparable", "config-mismatch")
    return found.reason


def test_a_processor_judges_no_speed() -> None:
    record = training_record({"devices=1": 0.01, "devices=2": 0.01}, gpu=None, scale="smoke")
    for claim in (ONE, MANY, KEPT):
        assert "a smoke run checks" in obstacle(record, claim)
    for claim in ("same-loss-at-every-world-size", "same-samples-at-every-world-size"):
        found = verdict_on(record, claim)
        assert (found.outcome, found.final) == ("not-comparable", "holds-here")
        assert "smoke scale" in found.departures


def test_a_gpu_without_a_peak_gives_a_reason() -> None:
    record = h200({"devices=1": SHARE_1})
    assert "has no row in images/gpus.toml" in obstacle(rejudged(record.model_copy(update={"gpu": None})))


def test_mixed_gpus_give_a_reason() -> None:
    record = h200({"devices=2": 500.0, "devices=4": 500.0})
    facts = record.points[1].facts | {"device name": "another device"}
    mixed = rejudged(replaced(record, "devices=4", facts=facts))
    for claim in (ONE, KEPT):
        assert "the run mixes GPUs: NVIDIA H200, another device" in obstacle(mixed, claim)


def test_a_failed_point_gives_a_reason() -> None:
    record = training_record({"devices=1": 500.0, "devices=2": 500.0, "devices=4": 500.0}, **NODE)
    published = PROJECT.recipe(record.plan.recipe).published
    findings = Findings.of(record, PROJECT)
    assert any("points.devices=8 is absent" in gap.words for gap in findings.gaps)
    looked_at = verdicts_on(record, published, PROJECT, findings)
    assert {one.final for one in looked_at} == {"not-comparable"}


def test_a_point_without_the_number_gives_a_reason() -> None:
    record = h200({"devices=2": 500.0, "devices=4": 500.0})
    lacking = rejudged(replaced(record, "devices=4", measurements=()))
    assert "no model-flops-share at devices=4" in obstacle(lacking)
    assert "no model-flops at" in obstacle(lacking, KEPT)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"count": 1}, "rests on a single sample"),
        ({"spread": 0.3}, "about 61 would decide"),
        ({"settings": ("model=mpt-1b", "sharding=none")}, "sharding is none, published full"),
    ],
)
def test_what_nothing_stands_behind_is_not_asked(options: dict[str, Any], reason: str) -> None:
    assert reason in obstacle(h200({"devices=1": 500.0}, **options))


def test_more_than_the_peak_is_not_asked() -> None:
    assert "1.112 ratio, more than the 1 that there can be" in obstacle(h200({"devices=1": 1100.0}))


def test_another_formula_is_not_asked() -> None:
    record = h200({"devices=1": 500.0})
    measurements = tuple(
        one.model_copy(update={"formula": "another"}) if one.formula else one
        for one in record.points[0].measurements
    )
    assert "counted by another" in obstacle(
        rejudged(replaced(record, "devices=1", measurements=measurements))
    )


def test_the_order_of_samples_is_a_claim() -> None:
    rates = {"nodes=1": 83.0, "nodes=32": 79.5}
    name = "same-samples-at-every-world-size"
    assert verdict_on(training_record(rates), name).final == "reproduced"
    assert verdict_on(training_record(rates, orders={"nodes=32": "1" * 64}), name).final == "not-reproduced"
    assert verdict_on(training_record({"nodes=1": 83.0}), name).final == "not-comparable"
