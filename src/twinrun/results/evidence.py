"""The evidence for a verdict: the numbers that a claim is about, and the rules that they must meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import percent
from twinrun.manifests.claims import Claim, RecordClaim
from twinrun.manifests.metrics import Metric
from twinrun.manifests.published import Accepted
from twinrun.manifests.restatements import Restatement
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.record import Record
from twinrun.workloads.settings import Difference
from twinrun.workloads.workload import PointRecord

# Fewer steps than this show no curve; the shortest committed record of an invariant has as many.
LEAST_STEPS = 4
# A peak is nominal, and so is a clock: what is above it by no more than this is rounding.
PEAK_SLACK = 1.02


class JudgeContext(Frozen):
    """What claims are judged by beside the record."""

    metrics: dict[str, Metric]
    gpus: dict[str, Gpu]
    fingerprint: Mapping[str, Accepted]


def found_of(asked: Claim | RecordClaim | Restatement, point: PointRecord) -> Measurement | None:
    """Return the measurement of a point that a claim, or its restatement, is about."""
    if asked.measurement:
        return point.measurement(asked.measurement)
    return next((one for one in point.measurements if one.metric == asked.metric), None)


def value_of(claim: Claim, point: PointRecord, found: Measurement, metric: Metric, gpu: Gpu | None) -> float:
    """Return a measurement of a point in the claim's unit, and per what the claim counts."""
    value = counted(point, found, metric, gpu, per=claim.per)
    return value if claim.kind == "ratio" else metric.in_unit(value, claim.unit)


def counted(point: PointRecord, found: Measurement, metric: Metric, gpu: Gpu | None, *, per: Per) -> float:
    """Return a measurement in its metric's unit, summed over the devices of what `per` names."""
    value = metric.canonical(found.median, found.unit)
    if not metric.additive or found.per != "device":
        return value
    cards = gpu.devices_per_card if gpu else 1
    return value * {"card": cards, "node": point.devices / point.nodes, "run": point.devices}.get(per, 1)


def doubt_of(
    found: Sequence[Measurement], metric: Metric, gpu: Gpu | None, *, per: Per, tolerance: float
) -> str | None:
    """Return why measured numbers cannot carry a verdict, or None."""
    for one in found:
        sums = ("card", "node", "run") if metric.additive else ("card",)
        if one.per != per and not (one.per == "device" and per in sums):
            return f"{one.id} is measured per {one.per}, the claim is per {per}"
        if metric.repeated and one.count < 2:
            return f"{one.id} rests on a single sample"
        if metric.repeated and one.spread > tolerance:
            return f"the samples of {one.id} spread by ±{percent(one.spread)}, more than the tolerance"
        if over := _beyond(one, metric, gpu):
            return over
    return None


def _beyond(found: Measurement, metric: Metric, gpu: Gpu | None) -> str | None:
    """Return that a number is more than the device can do, or None."""
    value = metric.canonical(found.median, found.unit)
    cards = gpu.devices_per_card if gpu and found.per == "card" else 1
    limits = {"one": 1.0}
    if gpu:
        limits["peak"] = cards * gpu.device_peak_flops / 1e12
        limits["bandwidth"] = cards * gpu.device_bandwidth_bytes_s / 1e9
    limit = limits.get(metric.bound or "")
    if limit is None or value <= limit * PEAK_SLACK:
        return None
    return f"{found.id} is {value:.4g} {metric.unit}, more than the {limit:.4g} that the device can do"


def nothing_behind(claim: Claim, curves: Sequence[Sequence[float]]) -> str | None:
    """Return why curves that coincide show nothing, or None."""
    steps = min(len(curve) for curve in curves)
    if steps < LEAST_STEPS:
        return f"{steps} steps show no curve; {LEAST_STEPS} are needed"
    fall = min((curve[0] - min(curve)) / abs(curve[0]) if curve[0] else 0.0 for curve in curves)
    if fall <= claim.tolerance:
        return (
            f"the {claim.metric} fell by {fall:.2g} of its start, no more than the tolerance:"
            " nothing was learned"
        )
    return None


def differences_of(
    record: Record, points: Sequence[PointRecord], terms: JudgeContext
) -> tuple[Difference, ...]:
    """Return where the run, or the points that a claim is about, are not the published configuration."""
    described = record.description.points
    of_points = [described[point.id].differences(terms.fingerprint) for point in points]
    if None in of_points:
        return record.plan.differences
    return next((found for found in of_points if found), ())


def mismatches(differences: Sequence[Difference]) -> list[str]:
    """Return in words where a run is not the published configuration."""
    return [f"{one.field} is {one.found}, published {one.published}" for one in differences]


def names_of(points: Sequence[PointRecord]) -> str:
    return ", ".join(point.id for point in points)
