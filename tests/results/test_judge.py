"""Verdicts: every claim kind on every workload, and no verdict where nothing stands behind it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.records import (
    BENCH,
    PROJECT,
    TRAINING,
    bench_record,
    judge,
    replaced,
    training_record,
    verdict_on,
    warmed,
)
from twinrun.manifests.claims import Claim
from twinrun.manifests.published import PublishedClaims
from twinrun.protocol.bench import COPY
from twinrun.protocol.measurements import Check, sampled
from twinrun.results.judge import claims_digest
from twinrun.results.record import Record
from twinrun.results.verdicts import Verdict
from twinrun.workloads.checks import WORKLOAD as CHECKS

PUBLISHED = PROJECT.recipe(TRAINING).published
SOURCE = {"document": "002", "where": "nowhere", "how": "read from text"}
# Of a device; a card of MI250 has two.
HALF = {"nodes=1": 83.0, "nodes=32": 79.5}


def claim_of(**fields: Any) -> Claim:
    base = {"id": "a-claim", "statement": "it is so", "tolerance": 0.05, "because": "x", "source": SOURCE}
    base |= {} if "here" in fields else {"why_none": "x"}
    return Claim.model_validate(base | fields, strict=False)


def one_verdict(record: Record, claim: Claim, recipe: str = TRAINING) -> Verdict:
    published = PROJECT.recipe(recipe).published
    (found,) = judge(record, published.model_copy(update={"claim": (claim,)}), PROJECT)
    return found


def test_the_published_numbers_reproduce() -> None:
    outcomes = {one.claim: one.outcome for one in judge(training_record(HALF), PUBLISHED)}
    assert set(outcomes.values()) == {"reproduced"}


@pytest.mark.parametrize(
    ("rates", "claim", "outcome", "measured"),
    [
        ({"nodes=1": 83.0 * 0.981}, "throughput-1-node", "reproduced", 166 * 0.981),
        ({"nodes=1": 83.0 * 0.979}, "throughput-1-node", "not-reproduced", 166 * 0.979),
        ({"nodes=1": 83.0 * 1.2}, "throughput-1-node", "reproduced", 166 * 1.2),
        ({"nodes=1": 83.0, "nodes=32": 83.0 * 0.94}, "efficiency-1-to-32-nodes", "reproduced", 0.94),
        ({"nodes=1": 83.0, "nodes=32": 83.0 * 0.93}, "efficiency-1-to-32-nodes", "not-reproduced", 0.93),
    ],
)
def test_a_number_is_judged_in_its_direction(
    rates: dict[str, float], claim: str, outcome: str, measured: float
) -> None:
    found = verdict_on(training_record(rates), claim)
    assert found.outcome == outcome
    assert found.measured == pytest.approx(measured)


def test_a_slower_time_never_passes() -> None:
    outcomes = {}
    for milliseconds in (0.1, 2.7, 2.8, 2.84, 9.0):
        record = bench_record({"scan-forward-fp16": [milliseconds] * 20})
        outcomes[milliseconds] = verdict_on(record, "scan-forward-mi250").outcome
    assert outcomes == {
        0.1: "reproduced",
        2.7: "reproduced",
        2.8: "reproduced",
        2.84: "not-reproduced",
        9.0: "not-reproduced",
    }


def test_worse_by_exactly_the_tolerance_is_allowed() -> None:
    (claim,) = (one for one in PROJECT.recipe(BENCH).published.claim if one.id == "scan-forward-mi250")
    claim = claim.model_copy(update={"value": 2.0, "tolerance": 0.25})
    for milliseconds, outcome in ((2.5, "reproduced"), (2.51, "not-reproduced")):
        record = bench_record({"scan-forward-fp16": [milliseconds] * 20})
        assert one_verdict(record, claim, BENCH).outcome == outcome


def test_other_hardware_is_not_comparable_and_says_what_is_known() -> None:
    found = verdict_on(training_record({"nodes=1": 400.0}, gpu="h200"), "throughput-1-node")
    assert (found.outcome, found.measured) == ("not-comparable", None)
    assert "MFU 45.9% published, 40.4% at nodes=1 here" in found.reason
    found = verdict_on(bench_record({"scan-forward-fp16": [0.4, 0.4]}, gpu="h200"), "scan-forward-mi250")
    published = "GPU NVIDIA H200 SXM, published AMD Instinct MI250; 0.4 ms here"
    assert found.reason == f"not the published run: {published}"


@pytest.mark.parametrize(("second", "outcome"), [(10.4, "reproduced"), (10.6, "not-reproduced")])
def test_a_parity_of_values_is_held_to_its_tolerance(second: float, outcome: str) -> None:
    record, sizes = training_record(HALF), {"nodes=1": 10.0, "nodes=32": second}
    for point in record.points:
        size = sampled("peak-memory", [sizes[point.id]], metric="peak-memory", unit="GiB", per="device")
        rest = tuple(one for one in point.measurements if one.id != size.id)
        record = replaced(record, point.id, measurements=(*rest, size))
    fields = {"kind": "parity", "metric": "peak-memory", "unit": "GiB", "per": "device", "better": "equal"}
    claim = claim_of(between=("nodes=1", "nodes=32"), value=10.0, **fields)
    assert one_verdict(record, claim).outcome == outcome
    assert one_verdict(training_record({"nodes=1": 83.0}), claim).outcome == "not-comparable"


def test_a_processor_is_not_the_published_hardware() -> None:
    on_a_processor = training_record(HALF).model_copy(update={"gpu": None})
    (found,) = (one for one in judge(on_a_processor, PUBLISHED, PROJECT) if one.claim == "throughput-1-node")
    assert found.outcome == "not-comparable"
    assert found.reason.startswith("not the published run: GPU")


def test_another_configuration_names_the_field() -> None:
    found = verdict_on(
        training_record({"nodes=1": 83.0}, settings=("global_batch=3072",)), "throughput-1-node"
    )
    assert found.outcome == "config-mismatch"
    assert "global_batch is 3072, published 1536" in found.reason


def test_another_configuration_is_asked_as_restated() -> None:
    record = training_record(HALF, settings=("global_batch=3072",))
    found = verdict_on(record, "throughput-1-node")
    assert found.outcome == "config-mismatch"
    assert found.here
    assert "global_batch 3,072, published 1,536" in found.departures
    assert verdict_on(record, "efficiency-1-to-32-nodes").outcome == "config-mismatch"


def test_what_verdicts_depend_on_is_in_the_digest_of_the_claims() -> None:
    other = PUBLISHED.model_copy(update={"fingerprint": PUBLISHED.fingerprint | {"global_batch": 1}})
    assert claims_digest(other) != claims_digest(PUBLISHED)


def test_a_missing_point_is_named() -> None:
    found = verdict_on(training_record({"nodes=1": 83.0}), "throughput-32-nodes")
    assert found.outcome == "not-comparable"
    assert "no point nodes=32; it has nodes=1" in found.reason
    found = verdict_on(training_record({"nodes=1": 83.0, "nodes=2": 80.0}), "efficiency-1-to-32-nodes")
    assert "from nodes=1 to nodes=2 it keeps 0.964" in found.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"count": 1}, "single sample"),
        (
            {"spread": 0.1},
            "of 20 samples is 156.2 to 175.8 and reaches over the limit; about 174 would decide",
        ),
    ],
)
def test_doubtful_samples_carry_no_verdict(options: dict[str, Any], reason: str) -> None:
    found = verdict_on(training_record(HALF, **options), "throughput-1-node")
    assert found.outcome == "not-comparable"
    assert reason in found.reason


def test_more_than_the_device_can_do_is_no_verdict() -> None:
    found = verdict_on(training_record({"nodes=1": 190.0}), "throughput-1-node")
    assert found.outcome == "not-comparable"
    assert "190 TFLOP/s, more than the 181" in found.reason


@pytest.mark.parametrize(("share", "outcome"), [(0.9, "reproduced"), (1.1, "not-comparable")])
def test_more_than_the_memory_gives_is_no_verdict(share: float, outcome: str) -> None:
    moved = share * PROJECT.gpus["mi250"].device_bandwidth_bytes_s * 2e-3
    record = bench_record({"scan": [2.0, 2.0]}, facts={f"scan work {COPY}": moved})
    (point,) = record.points
    fields = {"metric": "bandwidth", "unit": "GB/s", "per": "device", "value": 1000.0, "better": "higher"}
    claim = claim_of(point=point.id, measurement="scan/bandwidth", **(ABSOLUTE | {"hardware": DIE}), **fields)
    assert one_verdict(record, claim, BENCH).outcome == outcome


@pytest.mark.parametrize(
    ("losses", "outcome", "reason"),
    [
        (warmed(4.0, 3.0, 2.5, 2.2), "reproduced", "largest relative difference 0"),
        (
            warmed(4.0, 3.0, 2.5),
            "not-comparable",
            "103 steps at nodes=1, of which the learning rate rises in the first 100",
        ),
        ((4.0, 3.0, 2.5, 2.2, 2.0, 1.8, 1.7, 1.6), "not-comparable", "8 steps at nodes=1, of which"),
        (warmed(4.0, 4.5, 4.9, 4.99), "not-comparable", "fell from 5 to 4 and ends at 4.99: it diverged"),
        ((4.0,) * 104, "not-comparable", "nothing was learned"),
        (warmed(4.0, 4.1, 4.2, 5.01), "not-comparable", "nothing was learned"),
        (warmed(4.0, 3.0, 2.5, 1e4), "failed", "training diverged at nodes=1: the loss rose from 5 to 1e+04"),
    ],
)
def test_an_invariant_needs_a_curve_that_fell_after_the_warm_up(
    losses: tuple[float, ...], outcome: str, reason: str
) -> None:
    found = verdict_on(training_record(HALF, losses=losses), "same-loss-at-every-world-size")
    assert found.outcome == outcome
    assert reason in found.reason


@pytest.mark.parametrize(
    ("other", "outcome"),
    [
        (warmed(4.0, 3.0, 2.5, 2.2, 2.0), "reproduced"),
        (warmed(4.0, 3.0, 2.5, 2.2, 2.005), "reproduced"),
        (warmed(4.0, 3.0, 2.5, 2.2, 2.007), "not-reproduced"),
        (warmed(4.0, 3.0, 2.5, 2.2), "not-reproduced"),
        (warmed(4.0, 3.0, 2.5, 2.2, math.inf), "failed"),
    ],
)
def test_an_invariant_holds_at_every_step(other: tuple[float, ...], outcome: str) -> None:
    record = training_record(HALF)
    point = record.point("nodes=32")
    assert point
    series = point.series[0].model_construct(**{**point.series[0].model_dump(), "values": other})
    changed = replaced(record, "nodes=32", series=(series,))
    found = {one.claim: one for one in judge(changed, PUBLISHED, PROJECT)}
    assert found["same-loss-at-every-world-size"].outcome == outcome


def test_other_batches_are_a_mismatch() -> None:
    record = training_record(HALF, orders={"nodes=32": "1" * 64})
    assert verdict_on(record, "same-loss-at-every-world-size").outcome == "config-mismatch"


def test_one_point_decides_no_invariant() -> None:
    found = verdict_on(training_record({"nodes=1": 83.0}), "same-loss-at-every-world-size")
    assert (found.outcome, "needs two world sizes" in found.why) == ("not-comparable", True)


DIE = {"gpu": "mi250", "cards": 1, "nodes": 1, "devices": 1, "software": "x"}
ABSOLUTE = {"kind": "absolute", "hardware": {"gpu": "mi250", "cards": 4, "nodes": 1, "software": "x"}}
PARITY = {
    "kind": "parity",
    "metric": "loss",
    "unit": "nats/token",
    "per": "run",
    "value": 0.0,
    "better": "equal",
}


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        (
            {"metric": "loss", "unit": "nats/token", "per": "run", "value": 2.0, "better": "lower"},
            "reproduced",
        ),
        (
            {"metric": "loss", "unit": "bits/token", "per": "run", "value": 2.885, "better": "lower"},
            "reproduced",
        ),
        (
            {"metric": "loss", "unit": "nats/token", "per": "run", "value": 1.5, "better": "lower"},
            "not-reproduced",
        ),
        (
            {"metric": "step-time", "unit": "ms", "per": "run", "value": 1.0, "better": "lower"},
            "not-reproduced",
        ),
        (
            {"metric": "peak-memory", "unit": "GiB", "per": "device", "value": 60.0, "better": "lower"},
            "reproduced",
        ),
        (
            {"metric": "model-flops-share", "unit": "%", "per": "device", "value": 45.9, "better": "higher"},
            "reproduced",
        ),
        (
            {"metric": "model-flops", "unit": "GFLOP/s", "per": "device", "value": 83e3, "better": "higher"},
            "reproduced",
        ),
    ],
)
def test_an_absolute_claim_works_on_every_metric(fields: dict[str, Any], outcome: str) -> None:
    claim = claim_of(point="nodes=1", **ABSOLUTE, **fields)
    assert one_verdict(training_record(HALF), claim).outcome == outcome


def test_a_ratio_works_on_times() -> None:
    record = bench_record({"scan-forward-fp16": [2.0, 2.0]})
    claim = claim_of(
        kind="ratio",
        metric="time",
        unit="ratio",
        per="device",
        measurement="scan-forward-fp16",
        between=("2x4096x5376x16", "elsewhere"),
        value=1.0,
        better="lower",
    )
    assert one_verdict(record, claim, BENCH).outcome == "not-comparable"


def test_an_invariant_works_on_facts() -> None:
    (claim,) = (one for one in PUBLISHED.claim if one.metric == "sample-order")
    for other, outcome in (("a", "reproduced"), ("b", "not-reproduced")):
        record = training_record(HALF, orders={"nodes=1": "a", "nodes=32": other})
        assert one_verdict(record, claim).outcome == outcome


def test_every_curve_must_have_learned() -> None:
    (claim,) = (one for one in PUBLISHED.claim if one.id == "same-loss-at-every-world-size")
    claim = claim.model_copy(update={"tolerance": 0.05})
    slow = (4.0,) * 100 + (3.96, 3.92, 3.88, 3.88)
    faster = (4.0,) * 100 + (3.9, 3.8, 3.76, 3.76)
    record = training_record(HALF, losses={"nodes=1": faster, "nodes=32": slow})
    found = one_verdict(record, claim)
    assert (found.outcome, "nothing was learned" in found.reason) == ("not-comparable", True)


def test_an_invariant_works_on_values() -> None:
    claim = claim_of(
        kind="invariant", metric="peak-memory", unit="GiB", per="device", value=60.0, better="equal"
    )
    assert one_verdict(training_record(HALF), claim).outcome == "reproduced"
    for value in (30.0, 120.0):
        wrong_everywhere = one_verdict(training_record(HALF), claim.model_copy(update={"value": value}))
        assert wrong_everywhere.outcome == "not-reproduced"
        assert "farthest from the reference" in wrong_everywhere.reason


def test_checks_are_judged_by_the_share_that_passed() -> None:
    record = training_record({"nodes=1": 83.0})
    point = record.points[0].model_copy(
        update={
            "checks": (
                Check(id="gpus", outcome="pass", place="node-0", reason="8 of 8"),
                Check(id="mpi", outcome="fail", place="node-0", reason="no answer", remedy="start it"),
            )
        }
    )
    (share,) = CHECKS.derived(record.plan.part, point, None)
    assert share == sampled("checks-passed", [0.5], metric="checks-passed", unit="ratio", per="run")
    checked = record.model_copy(update={"points": (point.model_copy(update={"measurements": (share,)}),)})
    claim = claim_of(
        point="nodes=1", metric="checks-passed", unit="%", per="run", value=100.0, better="higher", **ABSOLUTE
    )
    found = one_verdict(checked, claim)
    assert found.outcome == "not-reproduced"
    assert found.measured == pytest.approx(50.0)


def test_claims_are_judged_in_their_order() -> None:
    published: PublishedClaims = PUBLISHED
    assert [one.claim for one in judge(training_record(HALF), PUBLISHED)] == [
        one.id for one in published.claim
    ]
