"""Verdicts: each published claim against one record, and the reason in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.manifests.claims import Claim
from twinrun.manifests.metrics import Metric
from twinrun.manifests.published import PublishedClaims
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.curves import held
from twinrun.results.evidence import JudgeContext, differences_of, doubt_of, found_of, names_of, value_of
from twinrun.results.record import AsPublished, Record, Verdict
from twinrun.results.restate import restated
from twinrun.workloads.fingerprint import Difference
from twinrun.workloads.parity import Outcome
from twinrun.workloads.series import largest_difference, same_order, values_of
from twinrun.workloads.workload import PointRecord

PARITY: dict[Outcome, AsPublished] = {
    "inside": "reproduced",
    "outside": "not-reproduced",
    "start": "not-reproduced",
    "other-run": "config-mismatch",
    "no-envelope": "not-comparable",
}
# Fewer steps than this show no curve; the shortest committed record of an invariant has as many.
LEAST_STEPS = 4


def judge(record: Record, published: PublishedClaims, project: Project) -> tuple[Verdict, ...]:
    """Judge every claim against `record`, in the published order; where that cannot be, as restated."""
    terms = JudgeContext(metrics=project.metrics, gpus=project.gpus, fingerprint=dict(published.fingerprint))
    return tuple(_judged(claim, record, terms) for claim in published.claim)


def _judged(claim: Claim, record: Record, terms: JudgeContext) -> Verdict:
    rules = {"absolute": _absolute, "ratio": _ratio, "invariant": _invariant, "parity": _parity}
    verdict = rules[claim.kind](claim, record, terms)
    if claim.here is None or verdict.outcome not in ("not-comparable", "config-mismatch"):
        return verdict
    return verdict.model_copy(update={"here": restated(claim, claim.here, record, terms)})


def claims_digest(published: PublishedClaims) -> str:
    """Return the digest of all that verdicts depend on in published.toml."""
    content = published.model_dump(mode="json", include={"claim", "fingerprint"})
    return sha256_of_bytes(canonical_json(content).encode())


def _absolute(claim: Claim, record: Record, terms: JudgeContext) -> Verdict:
    assert claim.hardware is not None
    assert claim.point is not None
    published_gpu, metric = terms.gpus[claim.hardware.gpu], terms.metrics[claim.metric]
    point = record.point(claim.point)
    found = found_of(claim, point) if point else None
    if record.gpu is None or record.gpu.id != published_gpu.id:
        measured = (point, found) if point and found else None
        other = _other_hardware(claim, record, published_gpu, measured, metric)
        return _verdict(claim, "not-comparable", other)
    if point is None or found is None:
        lacking = (
            f"no point {claim.point}"
            if point is None
            else f"no {claim.metric} of {claim.measurement or claim.point}"
        )
        return _verdict(claim, "not-comparable", f"this run has {lacking}; it has {names_of(record.points)}")
    value = value_of(claim, point, found, metric, record.gpu)
    if apart := differences_of(record, [point], terms):
        return _verdict(claim, "config-mismatch", _mismatch(apart), value)
    if doubt := _doubt(claim, [found], metric, record):
        return _verdict(claim, "not-comparable", doubt, value)
    return _directed(claim, value)


def _ratio(claim: Claim, record: Record, terms: JudgeContext) -> Verdict:
    assert claim.between is not None
    metric = terms.metrics[claim.metric]
    points = [point for name in claim.between if (point := record.point(name))]
    pairs = [(point, one) for point in points if (one := found_of(claim, point))]
    if len(pairs) < 2:
        return _verdict(claim, "not-comparable", _other_points(claim, record, metric))
    over, under = (value_of(claim, point, one, metric, record.gpu) for point, one in pairs)
    value = over / under if under else math.inf
    if apart := differences_of(record, points, terms):
        return _verdict(claim, "config-mismatch", _mismatch(apart), value)
    if doubt := _doubt(claim, [one for _, one in pairs], metric, record):
        return _verdict(claim, "not-comparable", doubt, value)
    return _directed(claim, value)


def _invariant(claim: Claim, record: Record, terms: JudgeContext) -> Verdict:
    points = record.workload.whole(record.points)
    if len(points) < 2:
        names = names_of(points) or "none"
        return _verdict(claim, "not-comparable", f"needs two world sizes; this run has {names}")
    if fact := terms.metrics[claim.metric].fact:
        return _same_fact(claim, points, fact)
    return _distance(claim, points, terms, allowed=claim.tolerance)


def _same_fact(claim: Claim, points: Sequence[PointRecord], fact: str) -> Verdict:
    found = {point.id: point.facts.get(fact) for point in points}
    if absent := [name for name, value in found.items() if value is None]:
        return _verdict(claim, "not-comparable", f"no {fact} of {', '.join(absent)}")
    apart = len(set(found.values())) > 1
    reason = f"{', '.join(found)}: the {fact} is {'not ' if apart else ''}the same at every point"
    return _verdict(claim, "not-reproduced" if apart else "reproduced", reason, float(apart))


def _parity(claim: Claim, record: Record, terms: JudgeContext) -> Verdict:
    """Judge whether curves are one but for rounding; as published on the published hardware alone."""
    if terms.metrics[claim.metric].series is None:
        return _same_value(claim, record, terms)
    found = held(claim, record)
    if isinstance(found, str):
        return _verdict(claim, "not-comparable", found)
    worst = found[0]
    distance, reason = worst.distance, f"{worst.b} against {worst.a}: {worst.reason}"
    if claim.hardware and (record.gpu is None or record.gpu.id != claim.hardware.gpu):
        published_gpu, metric = terms.gpus[claim.hardware.gpu], terms.metrics[claim.metric]
        other = _other_hardware(claim, record, published_gpu, None, metric)
        return _verdict(claim, "not-comparable", f"{other}; {reason}", distance)
    if claim.hardware and (apart := differences_of(record, record.points, terms)):
        return _verdict(claim, "config-mismatch", _mismatch(apart), distance)
    if worst.outcome == "inside" and (doubt := _nothing_behind(claim, _curves(claim, record))):
        return _verdict(claim, "not-comparable", doubt, distance)
    return _verdict(claim, PARITY[worst.outcome], reason, distance)


def _same_value(claim: Claim, record: Record, terms: JudgeContext) -> Verdict:
    """Judge whether two points have one value, which no control run widens."""
    points = [point for name in claim.between or () if (point := record.point(name))]
    if len(points) < 2:
        return _verdict(claim, "not-comparable", _other_points(claim, record, terms.metrics[claim.metric]))
    return _distance(claim, points, terms, allowed=claim.tolerance)


def _curves(claim: Claim, record: Record) -> list[tuple[float, ...]]:
    """Return the whole curves of a claim's metric."""
    return [_curve(claim, point) for point in record.workload.whole(record.points)]


def _distance(claim: Claim, points: Sequence[PointRecord], terms: JudgeContext, *, allowed: float) -> Verdict:
    """Judge how far the curves, or the values, of `points` are apart."""
    curves = [_curve(claim, point) for point in points]
    if not all(curves):
        return _verdict(
            claim, "not-comparable", f"a point has no {claim.metric}; this run has {names_of(points)}"
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
        f"{names_of(points)}: largest relative difference {value:.2g} at step {step} of"
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


def _doubt(claim: Claim, found: Sequence[Measurement], metric: Metric, record: Record) -> str | None:
    return doubt_of(found, metric, record.gpu, per=claim.per, tolerance=claim.tolerance)


def _directed(claim: Claim, value: float) -> Verdict:
    """Compare with the published value in its direction of goodness."""
    change = value / claim.value - 1
    worse = -change if claim.better == "higher" else change
    outcome: AsPublished = "reproduced" if worse <= claim.tolerance else "not-reproduced"
    reason = (
        f"{abs(change):.1%} {'above' if change >= 0 else 'below'} the published value;"
        f" {claim.better} is better, {claim.tolerance:.0%} worse is allowed because {claim.because}"
    )
    return _verdict(claim, outcome, reason, value)


def _verdict(claim: Claim, outcome: AsPublished, reason: str, measured: float | None = None) -> Verdict:
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


def _other_hardware(
    claim: Claim,
    record: Record,
    published_gpu: Gpu,
    measured: tuple[PointRecord, Measurement] | None,
    metric: Metric,
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
    if measured is None:
        return reason
    return f"{reason}; {value_of(claim, *measured, metric, record.gpu):.3g} {claim.unit} here"


def _other_points(claim: Claim, record: Record, metric: Metric) -> str:
    """Say which points a ratio lacks, and what the run's own first and last points give."""
    assert claim.between is not None
    reason = (
        f"needs the points {' and '.join(claim.between)}; this run has {names_of(record.points) or 'none'}"
    )
    found = [(point, one) for point in record.points if (one := found_of(claim, point))]
    if claim.kind != "ratio" or len(found) < 2 or record.gpu is None:
        return reason
    (first, under), (last, over) = found[0], found[-1]
    own = value_of(claim, last, over, metric, record.gpu) / value_of(claim, first, under, metric, record.gpu)
    return f"{reason}, and from {first.id} to {last.id} it keeps {own:.3f}"


def _mismatch(differences: Sequence[Difference]) -> str:
    fields = (f"{item.field} is {item.found}, published {item.published}" for item in differences)
    return "not the published configuration: " + "; ".join(fields)
