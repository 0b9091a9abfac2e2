"""The claims about one record, judged as published: each kind finds its value, or says why not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.manifests.claims import Claim
from twinrun.manifests.metrics import Metric
from twinrun.manifests.published import PublishedClaims
from twinrun.planning.project import Project
from twinrun.protocol.model_source import in_words
from twinrun.results.curves import demand_trained, nothing_behind
from twinrun.results.evidence import (
    JudgeContext,
    Located,
    beyond,
    differences_of,
    doubt_of,
    few_steps,
    found_of,
    kept_per_doubling,
    mismatches,
    names_of,
    standard_error,
    unspanned,
    value_of,
)
from twinrun.results.parity import curves_of, held_within
from twinrun.results.published_run import (
    demand_hardware,
    demand_hosts,
    demand_published,
    elsewhere,
    points_of,
)
from twinrun.results.record import Record
from twinrun.results.restate import restated
from twinrun.results.verdicts import (
    Assessment,
    NotAskedError,
    RestatementVerdict,
    Unasked,
    Verdict,
    judge_claim,
    margin,
)
from twinrun.workloads.curve_distance import CurveOutcome, largest_difference, same_order, values_of
from twinrun.workloads.workload import PointRecord

# Counts up when the same record and claims are given another verdict. 2: a claim of any kind is reproduced
# on the published hardware and configuration alone, never at smoke scale. 3: every point is held against the
# reference first; curves must fall and go beyond the warm-up; cards, nodes and what is possible are judged.
RULES = 3
# Fields that say which model a score is of.
MODEL_FIELDS = ("model.repository", "parameters")
# Outcome of a claim whose parity could not be decided.
UNDECIDED: dict[CurveOutcome, Unasked] = {"other-run": "config-mismatch", "no-envelope": "not-comparable"}
Rule = Callable[[Claim, Record, JudgeContext], Assessment]


def judge(record: Record, published: PublishedClaims, project: Project) -> tuple[Verdict, ...]:
    """Judge every claim against `record`, in the published order; where that cannot be, as restated."""
    terms = JudgeContext(metrics=project.metrics, gpus=project.gpus, fingerprint=dict(published.fingerprint))
    return tuple(
        _judged(claim, record, published, terms.about(claim, published)) for claim in published.claim
    )


def _judged(claim: Claim, record: Record, published: PublishedClaims, terms: JudgeContext) -> Verdict:
    rules = {"absolute": _absolute, "ratio": _ratio, "invariant": _invariant, "parity": _parity}
    rule = {**rules, "score": _score}[claim.kind]
    if other := _untrained(claim, record) or _of_another(claim, record, terms):
        rule, claim = partial(_refuse, other), claim.model_copy(update={"here": None})
    verdict = judge_claim(
        claim,
        partial(_as_published, rule, claim, record, terms),
        partial(restated, claim, record=record, terms=terms),
    )
    return _placed(verdict, claim, "; ".join(elsewhere(claim, record, published, terms)), terms)


def _untrained(claim: Claim, record: Record) -> str:
    """Say that a run trained nothing, where a claim is about a number that only a training has."""
    model = record.description.model
    if model is None or claim.kind == "score" or any(found_of(claim, point) for point in record.points):
        return ""
    return f"nothing was trained: {in_words(model)} was there"


def _of_another(claim: Claim, record: Record, terms: JudgeContext) -> str:
    """Say that a run is not of the configuration that a claim names, where models or sequences differ."""
    if claim.configuration is None:
        return ""
    # A score is of weights, whatever the sequences are that they were trained on.
    fields = MODEL_FIELDS if claim.kind == "score" else (*MODEL_FIELDS, "sequence")
    other = [one for one in differences_of(record, (), terms) if one.field in fields]
    return f"about {claim.configuration}; {'; '.join(mismatches(other))}" if other else ""


def _refuse(reason: str, _claim: Claim, _record: Record, _terms: JudgeContext) -> Assessment:
    raise NotAskedError(reason)


def _as_published(rule: Rule, claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    """Judge a claim by the rule of its kind, once its points have what a claim about them needs."""
    points = points_of(claim, record)
    demand_trained(points, terms.metrics)
    demand_hosts(points)
    if points and (lack := unspanned(points, claim.reach.with_that_of(terms.metrics[claim.metric].evidence))):
        raise NotAskedError(lack)
    return rule(claim, record, terms)


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
        note=verdict.note,
    )
    reason = f"not the published run: {elsewhere}"
    return verdict.model_copy(update={"outcome": "not-comparable", "reason": reason, "here": here})


def claims_digest(published: PublishedClaims) -> str:
    """Return the digest of all that verdicts depend on in published.toml."""
    kept = {"claim", "fingerprint", *(["configurations"] if published.configurations else [])}
    content = published.model_dump(mode="json", include=kept)
    for claim in content["claim"]:
        # Of a score alone: records of other claims were judged before there were any.
        for field in ("configuration", "rules"):
            if not claim[field]:
                del claim[field]
    return sha256_of_bytes(canonical_json(content).encode())


def _absolute(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    assert claim.point is not None
    metric, point = terms.metrics[claim.metric], record.point(claim.point)
    found = found_of(claim, point) if point else None
    demand_hardware(claim, record, terms, (point, found) if point and found else None)
    if point is None or found is None:
        lacking = (
            f"no point {claim.point}"
            if point is None
            else f"no {claim.metric} of {claim.measurement or claim.point}"
        )
        raise NotAskedError(f"this run has {lacking}; it has {names_of(record.points)}")
    value = value_of(claim, point, found, metric, record.gpu)
    _demand_comparable(claim, record, terms, [(point, found)], value)
    return _directed(claim, value, few_steps([(point, found)], terms.metrics, record.gpu))


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
    _demand_possible(pairs, metric, terms, value)
    return _directed(claim, value, few_steps(pairs, terms.metrics, record.gpu))


def _demand_possible(pairs: Sequence[Located], metric: Metric, terms: JudgeContext, value: float) -> None:
    """Raise NotAskedError where more devices have more of a rate each than the fewer had."""
    smaller, larger = sorted(pairs, key=lambda pair: pair[0].devices)
    if metric.better == "lower" or smaller[0].devices == larger[0].devices or smaller[1].median <= 0:
        return
    for scaling in (one for one in terms.metrics.values() if one.between_points):
        if over := beyond(kept_per_doubling(smaller, larger), scaling, None, per="run"):
            raise NotAskedError(f"{scaling.title} is {over}; {smaller[0].id} is too slow", measured=value)


def _invariant(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    points = record.whole
    if len(points) < 2:
        raise NotAskedError(f"needs two world sizes; this run has {names_of(points) or 'none'}")
    return _same(claim, record, points, terms)


def _parity(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    """Judge whether curves are one but for rounding; as published on the published hardware alone."""
    metric = terms.metrics[claim.metric]
    if metric.series is None:
        points = [point for name in claim.between or () if (point := record.point(name))]
        if len(points) < 2:
            raise NotAskedError(_other_points(claim, record, metric))
        return _same(claim, record, points, terms)
    worst = held_within(claim, record)[0]
    distance, reason = worst.distance, f"{worst.b} against {worst.a}: {worst.reason}"
    demand_hardware(claim, record, terms, None, also=f"; {reason}", measured=distance)
    if claim.hardware:
        demand_published(record, record.points, terms, distance)
    if undecided := UNDECIDED.get(worst.outcome):
        raise NotAskedError(reason, outcome=undecided, measured=distance)
    held = worst.outcome == "inside"
    if held and (doubt := nothing_behind(claim, record, curves_of(claim, record), metric)):
        raise NotAskedError(doubt, measured=distance)
    return Assessment(distance, held, reason)


def _same(claim: Claim, record: Record, points: Sequence[PointRecord], terms: JudgeContext) -> Assessment:
    """Judge whether points have one fact, one curve, or one value, which is the published one."""
    metric = terms.metrics[claim.metric]
    if metric.fact:
        return _same_fact(points, metric.fact)
    if not same_order(points):
        reason = "data order: the points did not train on the same global batches"
        raise NotAskedError(reason, outcome="config-mismatch")
    if metric.series is None:
        return _same_value(claim, record, points, terms)
    return _same_curve(claim, record, points, metric)


def _same_fact(points: Sequence[PointRecord], fact: str) -> Assessment:
    found = {point.id: point.facts.get(fact) for point in points}
    if absent := [name for name, value in found.items() if not value]:
        raise NotAskedError(f"no {fact} of {', '.join(absent)}")
    apart = len(set(found.values())) > 1
    reason = f"{', '.join(found)}: the {fact} is {'not ' if apart else ''}the same at every point"
    return Assessment(float(apart), not apart, reason)


def _same_value(
    claim: Claim, record: Record, points: Sequence[PointRecord], terms: JudgeContext
) -> Assessment:
    """Hold the value of every point against the published one first, and then against each other."""
    metric = terms.metrics[claim.metric]
    pairs = [(point, one) for point in points if (one := found_of(claim, point))]
    if len(pairs) < len(points):
        raise NotAskedError(f"a point has no {claim.metric}; this run has {names_of(points)}")
    if doubt := doubt_of(pairs, terms.metrics, record.gpu, per=claim.per, tolerance=claim.tolerance):
        raise NotAskedError(doubt)
    values = {point.id: value_of(claim, point, one, metric, record.gpu) for point, one in pairs}
    stands = {
        name: margin(value, claim.value, better="equal", tolerance=claim.tolerance)
        for name, value in values.items()
    }
    worst = max(stands, key=lambda name: abs(stands[name].change))
    apart, _ = largest_difference([(value,) for value in values.values()])
    agree = apart <= claim.tolerance
    reason = (
        f"{names_of(points)}: {values[worst]:.4g} at {worst} is farthest from the reference {claim.value:g},"
        f" allowed {claim.tolerance:g}; the points are {apart:.2g} apart"
    )
    return Assessment(values[worst], stands[worst].holds and agree, reason)


def _same_curve(claim: Claim, record: Record, points: Sequence[PointRecord], metric: Metric) -> Assessment:
    """Judge how far the curves of points are apart."""
    curves = [values_of(point, claim.metric) for point in points]
    if not all(curves):
        raise NotAskedError(f"a point has no {claim.metric}; this run has {names_of(points)}")
    value, step = largest_difference(curves)
    if math.isnan(value):
        return Assessment(None, False, f"the {claim.metric} is not a finite number at step {step}")
    held = margin(value, claim.value, better=claim.better, tolerance=claim.tolerance).holds
    if held and (doubt := nothing_behind(claim, record, points, metric)):
        raise NotAskedError(doubt, measured=value)
    reason = (
        f"{names_of(points)}: largest relative difference {value:.2g} at step {step} of"
        f" {len(curves[0])}, allowed {claim.tolerance:g}; same batches in the same order"
    )
    return Assessment(value, held, reason)


def _score(claim: Claim, record: Record, terms: JudgeContext) -> Assessment:
    """Judge what a model gets on a task, whatever computes it, at the point that is worst for the claim."""
    metric = terms.metrics[claim.metric]
    pairs = [(point, one) for point in record.points if (one := found_of(claim, point))]
    if not pairs:
        raise NotAskedError(f"this run has no {claim.metric} of {claim.measurement}")
    values = [value_of(claim, point, one, metric, record.gpu) for point, one in pairs]
    apart = [value - claim.value for value in values]
    worst = {"higher": min(apart), "lower": max(apart)}.get(claim.better, max(apart, key=abs)) + claim.value
    _demand_comparable(claim, record, terms, pairs, worst)
    return _directed(claim, worst, standard_error(pairs))


def _directed(claim: Claim, value: float, note: str) -> Assessment:
    """Compare with the published value in its direction of goodness."""
    stands = margin(value, claim.value, better=claim.better, tolerance=claim.tolerance)
    allowed = (
        f"{claim.tolerance:.0%} apart"
        if claim.better == "equal"
        else (f"{claim.better} is better, {claim.tolerance:.0%} worse")
    )
    reason = (
        f"{abs(stands.change):.1%} {stands.side} the published value;"
        f" {allowed} is allowed because {claim.because}"
    )
    return Assessment(value, stands.holds, f"{reason}; {note}" if note else reason, note)


def _demand_comparable(
    claim: Claim, record: Record, terms: JudgeContext, pairs: Sequence[Located], value: float
) -> None:
    """Raise NotAskedError for another configuration, and where nothing stands behind the numbers."""
    demand_published(record, [point for point, _ in pairs], terms, value)
    if doubt := doubt_of(pairs, terms.metrics, record.gpu, per=claim.per, tolerance=claim.tolerance):
        raise NotAskedError(doubt, measured=value)


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
