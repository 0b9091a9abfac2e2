"""The claims about records, judged as published, and where that cannot be asked, as said anywhere else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from twinrun.foundation.signatures import UNSIGNED
from twinrun.foundation.text import plain
from twinrun.manifests.claims import RecordClaim
from twinrun.planning.project import Project
from twinrun.results.conditions import conditions_of, few_steps
from twinrun.results.judged import Judged, hardware, measured_points
from twinrun.results.kinds import Asked, Comparison
from twinrun.results.question import BETWEEN, AnyClaim, Place, Value, elsewhere
from twinrun.results.record import Record
from twinrun.results.rules import doubts, refusals
from twinrun.results.verdicts import Verdict, measured_here, outcome_of, published_here
from twinrun.workloads import load_workload


def judged(record: Record, project: Project, signer: str = UNSIGNED) -> Judged:
    """Return a record with its numbers and the verdicts on the claims of its recipe, in the published order.

    Raises:
        InputError: no such recipe.
    """
    plan, recipe = record.plan, project.recipe(record.plan.recipe)
    gpu = project.gpus.get(plan.gpu) if plan.gpu else None
    found = Judged(
        record=record,
        project=project,
        recipe=recipe,
        workload=load_workload(plan.workload),
        gpu=gpu,
        points=measured_points(plan, record.points, gpu),
        signer=signer,
    )
    found = dataclasses.replace(found, refusals=tuple(refusals(found)), doubts=tuple(doubts(found)))
    verdicts = tuple(_verdict_on(claim, (found,)) for claim in recipe.published.claim)
    return dataclasses.replace(found, verdicts=verdicts)


def judge_between(records: Sequence[Judged]) -> tuple[Verdict, ...]:
    """Judge the claims between records of the recipe that `records` are of, in the published order."""
    claims = records[0].recipe.published.between_records if records else ()
    return tuple(_verdict_on(claim, tuple(records)) for claim in claims)


def _verdict_on(claim: AnyClaim, records: tuple[Judged, ...]) -> Verdict:
    """Return the verdict on a claim, and inside what becomes of it anywhere else."""
    verdict = _answered(Asked(claim=claim, records=records, asked=claim, published=True))
    # Of the published hardware alone: a claim that says nothing elsewhere.
    here_too = claim.here or not (isinstance(claim, RecordClaim) or claim.hardware)
    asked = verdict.outcome in ("not-comparable", "config-mismatch") and verdict.conditions[0].met
    if not (asked and here_too):
        return verdict
    here = Asked(claim=claim, records=records, asked=claim.here or claim, published=False)
    return verdict.model_copy(update={"here": _answered(here)})


def _answered(question: Asked) -> Verdict:
    """Return the verdict of a question; a value of other hardware stands in the reason alone."""
    claim, metric, conditions = question.claim, question.metric, conditions_of(question)
    reached = {one.name for one in conditions}
    places = question.places if "account" in reached else []
    found = question.values if "direction" in reached else []
    comparison = question.comparison if found else None
    unmet = next((one for one in conditions if not one.met), None)
    decided = unmet is None or unmet.name in ("samples", "direction")
    shown = decided if not question.published else unmet is None or unmet.name != "hardware"
    value = comparison.interval.value if comparison and shown else None
    value = value if value is not None and math.isfinite(value) else None
    note, seen = _note(question, found), comparison.seen if comparison else ""
    reason = unmet.seen if unmet and unmet.name != "direction" else f"{seen}; {note}" if note else seen
    factor = _factor(question, comparison) if question.published and comparison and unmet is None else None
    doubted = _doubts(question, places)
    verdict = Verdict(
        claim=claim.id,
        statement=question.asked.statement,
        outcome=outcome_of(conditions, published=question.published, exceeds=bool(factor), doubts=doubted),
        reason=reason,
        published=question.in_unit(question.reference),
        measured=None if value is None else question.in_unit(value),
        metric=metric.id,
        title=f"of the other side's {metric.title}" if question.kind == BETWEEN else metric.title,
        unit=question.unit,
        per=claim.per,
        note=note if value is not None else "",
        factor=factor,
        conditions=conditions,
        points=tuple(dict.fromkeys(place.point.id for place in places)),
        departures=() if question.published else tuple(_departures(question, places)),
        doubts=doubted,
    )
    if (here := question.restated) is None:
        return verdict
    # The reason of a restatement says what it was derived from.
    if not decided or not comparison:
        return verdict.model_copy(update={"reason": f"Not asked, because {reason}."})
    where = f"Here {measured_here(verdict)} at {comparison.place}; published {published_here(verdict)}"
    weaker = f" Weaker than published: {here.weaker}." if here.weaker else ""
    said = f"{where} = {here.derivation}, {here.basis}. {reason[:1].upper()}{reason[1:]}.{weaker}"
    return verdict.model_copy(update={"reason": said})


def _note(question: Asked, values: Sequence[Value]) -> str:
    """Return the words that belong beside a value: how few its steps are, or the error of a score."""
    behind = [pair for value in values for pair in value.behind]
    errors = [error for place, one in behind if (error := place.point.measurement(f"{one.id}/error"))]
    largest = max((one.median for one in errors), default=None) if question.kind == "score" else None
    return few_steps(question, values) or ("" if largest is None else f"standard error {largest:.3f}")


def _factor(question: Asked, comparison: Comparison) -> float | None:
    """Return how many times as good a value is, where all of it is better by more than the tolerance."""
    found, reference, tolerance = comparison.interval, question.reference, question.asked.tolerance
    if not reference or not found.value:
        return None
    if question.better == "higher" and found.low > reference * (1 + tolerance):
        return found.value / reference
    if question.better == "lower" and found.high < reference * (1 - tolerance):
        return reference / found.value
    return None


def _doubts(question: Asked, places: Sequence[Place]) -> tuple[str, ...]:
    """Return what casts a doubt on the records of a question, and what one side of a claim has alone."""
    if question.kind != BETWEEN:
        return question.record.doubts
    records = {one.record.run: one.record for one in places}
    found = [f"{run}: {one}" for run, record in records.items() for one in record.doubts]
    for pair in question.pairs if places else ():
        sides = [one.record.environment.variables for one in pair]
        names = sorted(name for name in {*sides[0], *sides[1]} if sides[0].get(name) != sides[1].get(name))
        found += [f"{name} is {' and '.join(side.get(name, 'not set') for side in sides)}" for name in names]
    return tuple(dict.fromkeys(found))


def _departures(question: Asked, places: Sequence[Place]) -> Iterator[str]:
    """Yield what differs from the published run, or of two sides from the published comparison."""
    claim = question.claim
    if not isinstance(claim, RecordClaim):
        yield from elsewhere(question, places)
        named, ids = question.named, [place.point.id for place in places]
        if question.restated and named and set(ids) != set(named):
            yield f"points {', '.join(ids) or 'none'}, published {' and '.join(named)}"
        stated = question.recipe.published.fingerprint_of(claim)
        for item in question.apart.every:
            if item.field in stated:
                yield f"{item.field} {plain(item.found)}, published {plain(item.published)}"
        if question.record.plan.scale == "smoke":
            yield "smoke scale"
        return
    for pair in question.pairs[:1] if places else ():
        for one, published in zip(pair, (claim.over, claim.under), strict=True):
            yield f"{hardware(one.record)} with {one.record.plan.stack}, published {published}"
    if absent := [name for name in claim.values if places and name not in {one.setting for one in places}]:
        yield f"without {claim.setting} {', '.join(absent)}"
    differences = {one.field: one for place in places for one in place.record.differences}
    for differs in differences.values():
        yield f"{differs.field} {plain(differs.found)}, published {plain(differs.published)}"
