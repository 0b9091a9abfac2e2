"""The claims about one record, judged as published: each kind finds its value, or says why not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.text import plain
from twinrun.manifests.claims import Claim
from twinrun.manifests.metrics import Metric
from twinrun.manifests.published import PublishedClaims
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement
from twinrun.results.evidence import (
    JudgeContext,
    differences_of,
    doubt_of,
    found_of,
    mismatches,
    names_of,
    nothing_behind,
    value_of,
)
from twinrun.results.parity import held_within
from twinrun.results.record import Record
from twinrun.results.restate import restated
from twinrun.results.verdicts import (
    Assessment,
    NotAskedError,
    RestatementVerdict,
    Verdict,
    judge_claim,
    margin,
)
from twinrun.workloads.parity import CurveOutcome, largest_difference, same_order, values_of
from twinrun.workloads.workload import PointRecord

# Counts up when the same record and claims are given another verdict. 2: a claim of any kind is reproduced
# on the published hardware and configuration alone, never at smoke scale.
RULES = 2
# What a parity that could not be decided makes of its claim.
UNDECIDED: dict[CurveOutcome, Literal["not-comparable", "config-mismatch"]] = {
    "other-run": "config-mismatch",
    "no-envelope": "not-comparable",
}


def judge(record: Record, published: PublishedClaims, project: Project) -> tuple[Verdict, ...]:
    """Judge every claim against `record`, in the published order; where that cannot be, as restated."""
    terms = JudgeContext(metrics=project.metrics, gpus=project.gpus, fingerprint=dict(published.fingerprint))
    rules = {"absolute": _absolute, "ratio": _ratio, "invariant": _invariant, "parity": _parity}
    verdicts = (
        judge_claim(
            claim,
            partial(rules[claim.kind], claim, record, terms),
            partial(restated, claim, record=record, terms=terms),
        )
        for claim in published.claim
    )
    elsewhere = "; ".join(_elsewhere(record, published, terms))
    return tuple(
        _placed(verdict, claim, elsewhere, terms)
        for verdict, claim in zip(verdicts, published.claim, strict=True)
    )


def _elsewhere(record: Record, published: PublishedClaims, terms: JudgeContext) -> Iterator[str]:
    """Yield in what a run is not the published one: GPU, smoke scale, fields of the fingerprint."""
    gpus = {claim.hardware.gpu for claim in published.claim if claim.hardware}
    if gpus and (record.gpu is None or record.gpu.id not in gpus):
        names = " or ".join(sorted(terms.gpus[name].name for name in gpus))
        yield f"GPU {record.gpu.name if record.gpu else 'none'}, published {names}"
    if record.plan.scale == "smoke":
        yield "smoke scale"
    for one in record.plan.differences:
        yield f"{one.field} {plain(one.found)}, published {plain(one.published)}"


def _placed(verdict: Verdict, claim: Claim, elsewhere: str, terms: JudgeContext) -> Verdict:
    """Return a verdict that was reached away from the published run as one that holds, or fails, here."""
    if not elsewhere or verdict.outcome not in ("reproduced", "not-reproduced"):
        return verdict
    metric = terms.metrics[claim.metric]
    here = RestatementVerdict(
        statement=claim.statement,
        outcome="holds-here" if verdict.outcome == "reproduced" else "fails-here",
        reason=f"{verdict.reason}. Run: {elsewhere}.",
        published=verdict.published,
        measured=verdict.measured,
        metric=metric.id,
        title=metric.title,
        unit=verdict.unit,
    )
    reason = f"not the published run: {elsewhere}"
    return verdict.model_copy(update={"outcome": "not-comparable", "reason": reason, "here": here})


def claims_digest(published: PublishedClaims) -> str:
    """Return the digest of all that verdicts depend on in published.toml."""
    content = published.model_dump(mode="json", include={"claim", "fingerprint"})
    return sha256_of_bytes(canonical_json(content).encode())


def _absolute(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    assert claim.point is not None
    metric, point = terms.metrics[claim.metric], record.point(claim.point)
    found = found_of(claim, point) if point else None
    _demand_hardware(claim, record, terms, (point, found) if point and found else None)
    if point is None or found is None:
        lacking = (
            f"no point {claim.point}"
            if point is None
            else f"no {claim.metric} of {claim.measurement or claim.point}"
        )
        raise NotAskedError(f"this run has {lacking}; it has {names_of(record.points)}")
    value = value_of(claim, point, found, metric, record.gpu)
    _demand_comparable(claim, record, terms, [(point, found)], value)
    return _directed(claim, value)


def _ratio(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    assert claim.between is not None
    metric = terms.metrics[claim.metric]
    points = [point for name in claim.between if (point := record.point(name))]
    pairs = [(point, one) for point in points if (one := found_of(claim, point))]
    if len(pairs) < 2:
        raise NotAskedError(_other_points(claim, record, metric))
    over, under = (value_of(claim, point, one, metric, record.gpu) for point, one in pairs)
    value = over / under if under else math.inf
    _demand_comparable(claim, record, terms, pairs, value)
    return _directed(claim, value)


def _invariant(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    points = record.whole
    if len(points) < 2:
        raise NotAskedError(f"needs two world sizes; this run has {names_of(points) or 'none'}")
    if fact := terms.metrics[claim.metric].fact:
        return _same_fact(points, fact)
    return _distance(claim, points, terms)


def _same_fact(points: Sequence[PointRecord], fact: str) -> Assessment:
    found = {point.id: point.facts.get(fact) for point in points}
    if absent := [name for name, value in found.items() if value is None]:
        raise NotAskedError(f"no {fact} of {', '.join(absent)}")
    apart = len(set(found.values())) > 1
    reason = f"{', '.join(found)}: the {fact} is {'not ' if apart else ''}the same at every point"
    return Assessment(float(apart), not apart, reason)


def _parity(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    """Judge whether curves are one but for rounding; as published on the published hardware alone."""
    if terms.metrics[claim.metric].series is None:
        return _same_value(claim, record, terms)
    worst = held_within(claim, record)[0]
    distance, reason = worst.distance, f"{worst.b} against {worst.a}: {worst.reason}"
    _demand_hardware(claim, record, terms, None, also=f"; {reason}", measured=distance)
    if claim.hardware:
        _demand_published(record, record.points, terms, distance)
    if undecided := UNDECIDED.get(worst.outcome):
        raise NotAskedError(reason, outcome=undecided, measured=distance)
    held = worst.outcome == "inside"
    curves = [_curve(claim, point) for point in record.whole]
    if held and (doubt := nothing_behind(claim, curves)):
        raise NotAskedError(doubt, measured=distance)
    return Assessment(distance, held, reason)


def _same_value(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    """Judge whether two points have one value, which no control run widens."""
    points = [point for name in claim.between or () if (point := record.point(name))]
    if len(points) < 2:
        raise NotAskedError(_other_points(claim, record, terms.metrics[claim.metric]))
    return _distance(claim, points, terms)


def _distance(claim: Claim, points: Sequence[PointRecord], terms: JudgeContext) -> Assessment:
    """Judge how far the curves, or the values, of `points` are apart."""
    curves = [_curve(claim, point) for point in points]
    if not all(curves):
        raise NotAskedError(f"a point has no {claim.metric}; this run has {names_of(points)}")
    if not same_order(points):
        reason = "data order: the points did not train on the same global batches"
        raise NotAskedError(reason, outcome="config-mismatch")
    value, step = largest_difference(curves)
    if math.isnan(value):
        return Assessment(None, False, f"the {claim.metric} is not a finite number at step {step}")
    held = margin(value, claim.value, better=claim.better, tolerance=claim.tolerance).holds
    if held and terms.metrics[claim.metric].series and (doubt := nothing_behind(claim, curves)):
        raise NotAskedError(doubt, measured=value)
    reason = (
        f"{names_of(points)}: largest relative difference {value:.2g} at step {step} of"
        f" {len(curves[0])}, allowed {claim.tolerance:g}; same batches in the same order"
    )
    return Assessment(value, held, reason)


def _curve(claim: Claim, point: PointRecord) -> tuple[float, ...]:
    """Return the series of a claim's metric at a point, or its one value."""
    found = found_of(claim, point)
    return values_of(point, claim.metric) or ((found.median,) if found else ())


def _directed(claim: Claim, value: float) -> Assessment:
    """Compare with the published value in its direction of goodness."""
    stands = margin(value, claim.value, better=claim.better, tolerance=claim.tolerance)
    reason = (
        f"{abs(stands.change):.1%} {stands.side} the published value;"
        f" {claim.better} is better, {claim.tolerance:.0%} worse is allowed because {claim.because}"
    )
    return Assessment(value, stands.holds, reason)


def _demand_hardware(
    claim: Claim,
    record: Record,
    terms: JudgeContext,
    found: tuple[PointRecord, Measurement] | None,
    *,
    also: str = "",
    measured: float | None = None,
) -> None:
    """Raise NotAskedError where the run is not on the published hardware, with what it gives here."""
    published_gpu = claim.hardware and terms.gpus[claim.hardware.gpu]
    if published_gpu and (record.gpu is None or record.gpu.id != published_gpu.id):
        other = _other_hardware(claim, record, published_gpu, found, terms.metrics[claim.metric])
        raise NotAskedError(other + also, measured=measured)


def _demand_comparable(
    claim: Claim,
    record: Record,
    terms: JudgeContext,
    pairs: Sequence[tuple[PointRecord, Measurement]],
    value: float,
) -> None:
    """Raise NotAskedError for another configuration, and where nothing stands behind the numbers."""
    _demand_published(record, [point for point, _ in pairs], terms, value)
    metric = terms.metrics[claim.metric]
    found = [one for _, one in pairs]
    if doubt := doubt_of(found, metric, record.gpu, per=claim.per, tolerance=claim.tolerance):
        raise NotAskedError(doubt, measured=value)


def _demand_published(
    record: Record, points: Sequence[PointRecord], terms: JudgeContext, value: float
) -> None:
    """Raise NotAskedError where the points are not of the published configuration."""
    if apart := differences_of(record, points, terms):
        reason = f"not the published configuration: {'; '.join(mismatches(apart))}"
        raise NotAskedError(reason, outcome="config-mismatch", measured=value)


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
