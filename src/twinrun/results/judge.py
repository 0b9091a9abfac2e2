"""Verdicts: each published claim against one record, and the reason in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import percent
from twinrun.manifests.claims import Claim, Published
from twinrun.manifests.metrics import Metric
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.record import Outcome, Record, Verdict
from twinrun.workloads.fingerprint import Difference
from twinrun.workloads.series import largest_difference, same_order, values_of
from twinrun.workloads.workload import PointRecord

# Fewer steps than this show no curve; the shortest committed record of an invariant has as many.
LEAST_STEPS = 4
# A peak is nominal, and so is a clock: what is above it by no more than this is rounding.
PEAK_SLACK = 1.02


class Terms(Frozen):
    """What claims are judged by beside the record."""

    metrics: dict[str, Metric]
    gpus: dict[str, Gpu]
    fingerprint: Mapping[str, object]


def judge(record: Record, published: Published, project: Project) -> tuple[Verdict, ...]:
    """Judge every claim against `record`, in the published order."""
    terms = Terms(metrics=project.metrics, gpus=project.gpus, fingerprint=dict(published.fingerprint))
    rules = {"absolute": _absolute, "ratio": _ratio, "invariant": _invariant, "parity": _parity}
    return tuple(rules[claim.kind](claim, record, terms) for claim in published.claim)


def claims_digest(published: Published) -> str:
    """Return the digest of all that verdicts depend on in published.toml."""
    content = published.model_dump(mode="json", include={"claim", "fingerprint"})
    return sha256_of_bytes(canonical_json(content).encode())


def found_of(claim: Claim, point: PointRecord) -> Measurement | None:
    """Return the measurement of a point that a claim is about."""
    if claim.measurement:
        return point.measurement(claim.measurement)
    return next((one for one in point.measurements if one.metric == claim.metric), None)


def value_of(claim: Claim, found: Measurement, metric: Metric, gpu: Gpu | None) -> float:
    """Return a measurement in the claim's unit, and per what the claim counts."""
    value = metric.canonical(found.median, found.unit)
    if gpu and (found.per, claim.per) == ("device", "card"):
        value = metric.per_card(value, devices_per_card=gpu.devices_per_card)
    return value if claim.kind == "ratio" else metric.in_unit(value, claim.unit)


def _absolute(claim: Claim, record: Record, terms: Terms) -> Verdict:
    assert claim.hardware is not None
    assert claim.point is not None
    published_gpu, metric = terms.gpus[claim.hardware.gpu], terms.metrics[claim.metric]
    point = record.point(claim.point)
    found = found_of(claim, point) if point else None
    if record.gpu is None or record.gpu.id != published_gpu.id:
        return _verdict(claim, "not-comparable", _other_hardware(claim, record, published_gpu, found, metric))
    if point is None or found is None:
        lacking = (
            f"no point {claim.point}"
            if point is None
            else f"no {claim.metric} of {claim.measurement or claim.point}"
        )
        return _verdict(claim, "not-comparable", f"this run has {lacking}; it has {_names(record.points)}")
    value = value_of(claim, found, metric, record.gpu)
    if apart := _differences(record, [point], terms):
        return _verdict(claim, "config-mismatch", _mismatch(apart), value)
    if doubt := _doubt(claim, [found], metric, record.gpu):
        return _verdict(claim, "not-comparable", doubt, value)
    return _directed(claim, value)


def _ratio(claim: Claim, record: Record, terms: Terms) -> Verdict:
    assert claim.between is not None
    metric = terms.metrics[claim.metric]
    points = [point for name in claim.between if (point := record.point(name))]
    found = [one for point in points if (one := found_of(claim, point))]
    if len(found) < 2:
        return _verdict(claim, "not-comparable", _other_points(claim, record, metric))
    over, under = (value_of(claim, one, metric, record.gpu) for one in found)
    value = over / under if under else math.inf
    if apart := _differences(record, points, terms):
        return _verdict(claim, "config-mismatch", _mismatch(apart), value)
    if doubt := _doubt(claim, found, metric, record.gpu):
        return _verdict(claim, "not-comparable", doubt, value)
    return _directed(claim, value)


def _invariant(claim: Claim, record: Record, terms: Terms) -> Verdict:
    if len(record.points) < 2:
        names = _names(record.points) or "none"
        return _verdict(claim, "not-comparable", f"needs two world sizes; this run has {names}")
    return _distance(claim, record.points, terms, allowed=claim.tolerance)


def _parity(claim: Claim, record: Record, terms: Terms) -> Verdict:
    assert claim.between is not None
    points = [point for name in claim.between if (point := record.point(name))]
    if len(points) < 2:
        return _verdict(claim, "not-comparable", _other_points(claim, record, terms.metrics[claim.metric]))
    controls = [points[0], *(point for name in claim.controls if (point := record.point(name)))]
    envelope, _ = (
        largest_difference([_curve(claim, point) for point in controls]) if len(controls) > 1 else (0.0, 1)
    )
    return _distance(claim, points, terms, allowed=max(claim.tolerance, envelope))


def _distance(claim: Claim, points: Sequence[PointRecord], terms: Terms, *, allowed: float) -> Verdict:
    """Judge how far the curves, or the values, of `points` are apart."""
    curves = [_curve(claim, point) for point in points]
    if not all(curves):
        return _verdict(
            claim, "not-comparable", f"a point has no {claim.metric}; this run has {_names(points)}"
        )
    if not same_order(points):
        reason = "data order: the points did not train on the same global batches"
        return _verdict(claim, "config-mismatch", reason)
    value, step = largest_difference(curves)
    if math.isnan(value):
        return _verdict(claim, "not-reproduced", f"the {claim.metric} is not a finite number at step {step}")
    held = value <= allowed
    if held and terms.metrics[claim.metric].series and (doubt := _nothing_behind(claim, curves)):
        return _verdict(claim, "not-comparable", doubt, value)
    reason = (
        f"{_names(points)}: largest relative difference {value:.2g} at step {step} of"
        f" {len(curves[0])}, allowed {allowed:g}; same batches in the same order"
    )
    return _verdict(claim, "reproduced" if held else "not-reproduced", reason, value)


def _curve(claim: Claim, point: PointRecord) -> tuple[float, ...]:
    """Return the series of a claim's metric at a point, or its one value."""
    found = found_of(claim, point)
    return values_of(point, claim.metric) or ((found.median,) if found else ())


def _nothing_behind(claim: Claim, curves: Sequence[tuple[float, ...]]) -> str | None:
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


def _doubt(claim: Claim, found: Sequence[Measurement], metric: Metric, gpu: Gpu | None) -> str | None:
    """Return why measured numbers cannot carry a verdict, or None."""
    for one in found:
        if one.per != claim.per and (one.per, claim.per) != ("device", "card"):
            return f"{one.id} is measured per {one.per}, the claim is per {claim.per}"
        if metric.repeated and one.count < 2:
            return f"{one.id} rests on a single sample"
        if metric.repeated and one.spread > claim.tolerance:
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


def _directed(claim: Claim, value: float) -> Verdict:
    """Compare with the published value in its direction of goodness."""
    change = value / claim.value - 1
    worse = -change if claim.better == "higher" else change
    outcome: Outcome = "reproduced" if worse <= claim.tolerance else "not-reproduced"
    reason = (
        f"{abs(change):.1%} {'above' if change >= 0 else 'below'} the published value;"
        f" {claim.better} is better, {claim.tolerance:.0%} worse is allowed because {claim.because}"
    )
    return _verdict(claim, outcome, reason, value)


def _verdict(claim: Claim, outcome: Outcome, reason: str, measured: float | None = None) -> Verdict:
    return Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome=outcome,
        reason=reason,
        published=claim.value,
        measured=measured,
        unit=claim.unit,
        per=claim.per,
    )


def _differences(record: Record, points: Sequence[PointRecord], terms: Terms) -> tuple[Difference, ...]:
    """Return where the run, or the points that a claim is about, are not the published configuration."""
    of_points = [record.workload.point_differences(point, dict(terms.fingerprint)) for point in points]
    if None in of_points:
        return record.plan.differences
    return next((found for found in of_points if found), ())


def _other_hardware(
    claim: Claim, record: Record, published_gpu: Gpu, found: Measurement | None, metric: Metric
) -> str:
    here = record.gpu.name if record.gpu else f"{record.machine.vendor}, no GPU in images/gpus.toml"
    reason = f"published on {published_gpu.name}, this run is on {here}"
    if metric.bound == "peak":
        peak = published_gpu.peak_bf16_tflops / (1 if claim.per == "card" else published_gpu.devices_per_card)
        shares = [
            f"{share.median:.1%} at {point.id}"
            for point in record.points
            if (share := point.measurement(f"{claim.metric}-share"))
        ]
        return (
            f"{reason}; MFU {metric.canonical(claim.value, claim.unit) / peak:.1%} published,"
            f" {', '.join(shares) or 'unknown'} here ({claim.formula}, dense bf16 peaks)"
        )
    return (
        f"{reason}; {value_of(claim, found, metric, record.gpu):.3g} {claim.unit} here" if found else reason
    )


def _other_points(claim: Claim, record: Record, metric: Metric) -> str:
    """Say which points a ratio lacks, and what the run's own first and last points give."""
    assert claim.between is not None
    reason = f"needs the points {' and '.join(claim.between)}; this run has {_names(record.points) or 'none'}"
    found = [(point, one) for point in record.points if (one := found_of(claim, point))]
    if claim.kind != "ratio" or len(found) < 2 or record.gpu is None:
        return reason
    (first, under), (last, over) = found[0], found[-1]
    own = value_of(claim, over, metric, record.gpu) / value_of(claim, under, metric, record.gpu)
    return f"{reason}, and from {first.id} to {last.id} it keeps {own:.3f}"


def _mismatch(differences: Sequence[Difference]) -> str:
    fields = (f"{item.field} is {item.found}, published {item.published}" for item in differences)
    return "not the published configuration: " + "; ".join(fields)


def _names(points: Sequence[PointRecord]) -> str:
    return ", ".join(point.id for point in points)
