"""The claims about records, judged as published, and where that cannot be asked, as said anywhere else."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from twinrun.foundation.signatures import UNSIGNED
from twinrun.foundation.text import plain, plural
from twinrun.manifests.claims import Claim, RecordClaim, placeholders_of
from twinrun.planning.project import Project
from twinrun.protocol.model_source import in_words
from twinrun.results.bounds import beyond
from twinrun.results.configuration import apart_from, sides_apart
from twinrun.results.curves import demand_trained, untrained
from twinrun.results.judged import Judged, gpus_of, hardware, measured_points
from twinrun.results.kinds import KINDS, Comparison
from twinrun.results.question import (
    BETWEEN,
    AnyClaim,
    Place,
    Question,
    Value,
    departures_of,
    elsewhere,
    names_of,
)
from twinrun.results.record import Record
from twinrun.results.rules import doubts, refusals
from twinrun.results.verdicts import (
    CONDITIONS,
    Condition,
    ConditionName,
    NotAskedError,
    Verdict,
    measured_here,
    outcome_of,
    published_here,
)
from twinrun.workloads import load_workload
from twinrun.workloads.curve_distance import ORDER, values_of
from twinrun.workloads.workload import Finding, FindingKind

# Fields that say which model a number is of; a score is of weights, whatever the sequences were.
MODEL_FIELDS = ("model.repository", "parameters")
# More findings than a reader looks at.
SHOWN = 3


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
    found = found.replaced(refusals=tuple(refusals(found)), doubts=tuple(doubts(found)))
    return found.replaced(verdicts=tuple(_verdict_on(claim, (found,)) for claim in recipe.published.claim))


def judge_between(records: Sequence[Judged]) -> tuple[Verdict, ...]:
    """Judge the claims between records of the recipe that `records` are of, in the published order."""
    claims = records[0].recipe.published.between_records if records else ()
    return tuple(_verdict_on(claim, tuple(records)) for claim in claims)


def _verdict_on(claim: AnyClaim, records: tuple[Judged, ...]) -> Verdict:
    """Return the verdict on a claim, and inside what becomes of it anywhere else."""
    verdict = _answered(Question(claim=claim, records=records, asked=claim, published=True))
    if verdict.outcome not in ("not-comparable", "config-mismatch"):
        return verdict
    # Of the published hardware alone: a claim that says nothing elsewhere.
    if claim.here is None and (isinstance(claim, RecordClaim) or claim.hardware is not None):
        return verdict
    if not verdict.conditions[0].met:
        return verdict
    here = Question(claim=claim, records=records, asked=claim.here or claim, published=False)
    return verdict.model_copy(update={"here": _answered(here)})


def written(claim: AnyClaim) -> Condition:
    """Return whether somebody has written a claim that the template baked."""
    if unwritten := list(placeholders_of(claim.model_dump(), f"claim.{claim.id}")):
        seen = f"published.toml still contains the template's placeholder in: {', '.join(unwritten)}"
        return Condition(name="written", met=False, seen=seen)
    return Condition(name="written", met=True, seen="in published.toml")


def _answered(question: Question) -> Verdict:
    """Ask every condition of a question; those behind one that gives no value are not reached."""
    kind, claim = KINDS[question.kind], question.claim
    places, found = list[Place](), list[Value]()

    def find() -> str:
        places.extend(kind.places(question))
        return " and ".join(dict.fromkeys(hardware(one.record) for one in places))

    conditions, comparison = [written(claim)], None
    if conditions[0].met:
        sides = asked("hardware", find)
        conditions += before(question, places) if sides.met else [sides]
        points = next((one for one in conditions if one.name == "points"), None)
        if points and points.met:
            conditions.append(asked("measured", lambda: _measured(question, places, found)))
        if found:
            comparison = kind.compare(question, found)
            conditions += _behind(question, places, found, comparison)
    conditions.sort(key=lambda one: CONDITIONS.index(one.name))
    return _verdict(question, tuple(conditions), places, found, comparison)


def asked(name: ConditionName, check: Callable[[], str]) -> Condition:
    """Return the answer to a condition; a check raises NotAskedError, which may be of another condition."""
    try:
        return Condition(name=name, met=True, seen=check())
    except NotAskedError as refusal:
        return Condition(name=refusal.condition, met=False, seen=str(refusal))


def before(question: Question, places: Sequence[Place]) -> Iterator[Condition]:
    """Yield the conditions that can be asked before a value is known."""
    several = question.kind == BETWEEN
    yield asked("subject", partial(_two_sides if several else _subject, question, places))
    yield asked("stable", partial(_stable, question, places))
    yield asked("hardware", partial(_hardware, question, places))
    yield asked("account", partial(_account, question))
    yield asked("points", partial(_points, question, places))
    yield asked("configuration", partial(_sides_configured if several else _configured, question, places))
    yield asked("order", partial(_order, question, places))


def _behind(
    question: Question, places: Sequence[Place], found: Sequence[Value], comparison: Comparison
) -> Iterator[Condition]:
    """Yield the conditions of the values."""
    yield asked("training", partial(_training, question, places, comparison))
    yield asked("correctness", partial(_correct, question, places, found))
    yield asked("bounds", partial(_bounded, question, places, found))
    yield asked("samples", partial(_samples, question, found, comparison))
    yield Condition(name="direction", met=comparison.standing == "holds", seen=comparison.seen)


def _subject(question: Question, places: Sequence[Place]) -> str:
    """Demand a training where the number is one of training, and the model that the claim names."""
    claim, record = question.claim, question.record
    model = record.description.model
    if model and question.kind != "score" and not any(question.measured(point) for point in record.points):
        raise NotAskedError(f"nothing was trained: {in_words(model)} was there", condition="subject")
    if not isinstance(claim, Claim) or claim.configuration is None:
        return "the recipe's own experiment"
    fields = MODEL_FIELDS if claim.kind == "score" else (*MODEL_FIELDS, "sequence")
    if other := [one for one in question.apart(places).every if one.field in fields]:
        apart = "; ".join(f"{one.field} is {one.found}, published {one.published}" for one in other)
        raise NotAskedError(f"about {claim.configuration}; {apart}", condition="subject")
    return claim.configuration


def _two_sides(question: Question, places: Sequence[Place]) -> str:
    """Demand records of two runs: one and its copy under another name compare nothing."""
    claim = question.claim
    assert isinstance(claim, RecordClaim)
    over, under = ([one for one in places if one.side == side] for side in (0, 1))
    for a in over:
        if any(a.record.run == b.record.run or a.point.measurements == b.point.measurements for b in under):
            raise NotAskedError(f"both sides have the numbers of {a.record.run}", condition="subject")
    machines = sorted({hardware(one.record) for one in places})
    if claim.over.gpu == claim.under.gpu and len(machines) > 1:
        raise NotAskedError(f"the sides are of {' and '.join(machines)}", condition="subject")
    return "two sides, each of its own runs"


def _stable(question: Question, places: Sequence[Place]) -> str:
    """Demand curves that are finite and did not rise for good."""
    try:
        return _fell(question, places)
    except NotAskedError as refusal:
        if refusal.condition == "stable":
            raise
    return "no loss diverged"


def _fell(question: Question, places: Sequence[Place]) -> str:
    points = [place.point for place in places]
    demand_trained(points, question.project.metrics)
    return "no loss diverged" if any(point.series for point in points) else "nothing was trained"


def _hardware(question: Question, places: Sequence[Place]) -> str:
    """Demand the published hardware, or for a speed anywhere else one whose peak rates are known."""
    record, repeated, why = question.record, question.metric.repeated, ""
    if question.kind == BETWEEN:
        return " and ".join(dict.fromkeys(hardware(one.record) for one in places))
    names = {one.name for report in record.record.allocation.reports.values() for one in report.devices}
    if question.published:
        other = [*elsewhere(question, places), *(["smoke scale"] if record.plan.scale == "smoke" else [])]
        why = f"not the published run: {'; '.join(other)}{_beside(question, places)}" if other else ""
    elif repeated and record.plan.scale == "smoke":
        why = "a smoke run's speed says nothing"
    elif repeated and record.gpu is None:
        why = "the run is on a processor, whose speed says nothing of a GPU"
        if names:
            why = f"{gpus_of(record)} has no row in images/gpus.toml, so its dense peak is unknown"
    if not why and repeated and record.gpu is None and len(names) > 1:
        why = f"the run mixes GPUs: {', '.join(sorted(names))}"
    if why:
        raise NotAskedError(why, condition="hardware")
    return record.gpu.name if record.gpu else record.node.cpu


def _beside(question: Question, places: Sequence[Place]) -> str:
    """Return in words what the run measured on its own hardware, where known as a share of its peak."""
    claim, metric, share = question.claim, question.metric, f"{question.metric.id}-share"
    points = [place.point for place in places] or question.record.points
    shares = [f"{one.median:.1%} at {point.id}" for point in points if (one := point.measurement(share))]
    if metric.evidence.most == "peak" and shares and claim.hardware:
        gpu = question.project.gpus[claim.hardware.gpu]
        peak = gpu.peak_bf16_tflops / (1 if claim.per == "card" else gpu.devices_per_card)
        return f"; MFU {question.reference / peak:.1%} published, {', '.join(shares)} here ({claim.formula})"
    found = [one for place in places if (one := question.measured(place.point))]
    if question.kind in ("invariant", "parity") or len(found) != 1:
        return ""
    return f"; {question.in_unit(found[0].median):.3g} {question.unit} here"


def _account(question: Question) -> str:
    """Demand records without a gap."""
    if found := _refused(question, "account"):
        raise NotAskedError(_words(found), condition="account")
    return "every planned point, step, check and document is there once"


def _refused(question: Question, kind: FindingKind) -> list[Finding]:
    return [one for record in question.records for one in record.refusals if one.kind == kind]


def _words(found: Sequence[Finding]) -> str:
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(one.words for one in found[:SHOWN]) + more


def _points(question: Question, places: Sequence[Place]) -> str:
    """Demand the points of the claim, and as many sizes and kinds of hardware as its statement speaks of."""
    claim = question.claim
    if lack := KINDS[question.kind].lacking(question, places):
        raise NotAskedError(lack, condition="points")
    if isinstance(claim, Claim):
        reach = claim.reach if question.restated else claim.reach.with_that_of(question.metric.evidence)
        points = question.record.points if question.restated else [place.point for place in places]
        sizes = sorted({point.devices for point in points}) or [0]
        kinds = sorted({point.result.device_name for point in points})
        shown = " and ".join(plural(size, "device") for size in sizes)
        lack = ""
        if sizes[-1] < reach.devices:
            lack = f"needs a point of {plural(reach.devices, 'device')}, this run has {shown}"
        elif len(sizes) < reach.world_sizes:
            lack = f"needs {reach.world_sizes} world sizes, this run has {shown} alone"
        elif len(kinds) < reach.hardware_kinds:
            lack = (
                f"needs {reach.hardware_kinds} kinds of hardware, this run has {' and '.join(kinds) or 'one'}"
            )
        if lack:
            raise NotAskedError(lack, condition="points")
    return names_of(places)


def _configured(question: Question, places: Sequence[Place]) -> str:
    """Demand the published configuration, but for what is neutral for the claim."""
    found = question.apart(places)
    if found.differences:
        raise NotAskedError(found.words, condition="configuration")
    return "; ".join(f"{one.field} {one.found}, neutral" for one in found.neutral[:SHOWN]) or "as published"


def _sides_configured(question: Question, places: Sequence[Place]) -> str:
    """Demand that every record is as published, and that the sides are equal in all that counts."""
    claim, recipe, project = question.claim, question.recipe, question.project
    assert isinstance(claim, RecordClaim)
    for record, point, side, setting in places:
        found = apart_from(
            claim,
            recipe,
            record.plan,
            [point.planned],
            project,
            here=not question.published,
            setting=setting if claim.setting else None,
            side=(claim.over, claim.under)[side],
        )
        if found.differences:
            raise NotAskedError(f"{record.run} at {point.id}: {found.words}", condition="configuration")
    for over, under in _pairs(places):
        a, b = (one.record.settings(one.point) for one in (over, under))
        if other := sides_apart(a, b, claim, recipe, project):
            fields = "; ".join(f"{field} {plain(mine)} and {plain(theirs)}" for field, mine, theirs in other)
            raise NotAskedError(f"the sides differ in {fields}", condition="configuration")
    return "both sides are as published, and equal in all that counts"


def _pairs(places: Sequence[Place]) -> list[tuple[Place, Place]]:
    under = {one.setting: one for one in places if one.side == 1}
    return [(one, under[one.setting]) for one in places if one.side == 0]


def _order(question: Question, places: Sequence[Place]) -> str:
    """Demand that points whose training is held against each other worked through the same batches."""
    trained, metric = [one.point for one in places if one.point.series], question.metric
    compared = question.kind != BETWEEN and (question.claim.kind in ("invariant", "parity") or metric.series)
    if not compared or metric.fact or len(trained) < 2:
        return "no curves are held against each other"
    orders = {point.id: point.digests.get(ORDER) for point in trained}
    if absent := [name for name, order in orders.items() if not order]:
        raise NotAskedError(f"no {ORDER} of {', '.join(absent)}", condition="order")
    if len(set(orders.values())) > 1:
        raise NotAskedError("the points did not train on the same global batches", condition="order")
    return "same batches in the same order"


def _measured(question: Question, places: Sequence[Place], found: list[Value]) -> str:
    found.extend(KINDS[question.kind].values(question, places))
    return "; ".join(one.place for one in found[:SHOWN])


def _training(question: Question, places: Sequence[Place], comparison: Comparison) -> str:
    """Demand curves that fell; of curves that coincide, that they go beyond the warm-up."""
    claim, seen = question.claim, _fell(question, places)
    metric = question.project.metrics[claim.metric]
    compared = claim.kind in ("invariant", "parity") and metric.series and comparison.standing != "fails"
    for record, point, *_ in places if compared else ():
        rising, curve = record.description.points[point.id].rising_steps, values_of(point, metric.id)
        if why := untrained(curve, metric, rising=rising, place=point.id, least_fall=claim.tolerance):
            raise NotAskedError(why, condition="training")
    return seen


def _of_values(
    question: Question, kind: FindingKind, places: Sequence[Place], found: Sequence[Value]
) -> list[Finding]:
    """Return what was found of the points that values are from.

    A claim that holds numbers from both sides is failed by them; an error of a baseline concerns only what is
    held against that baseline.
    """
    points = {"", *(place.point.id for place in places)}
    behind = [one for value in found for _, one in value.behind]
    judged_numbers = {one.id for one in behind} if question.claim.kind in ("invariant", "parity") else set()
    baselines = {f"{one.labels.get('call')}@{one.labels.get('baseline')}" for one in behind}
    return [
        one
        for one in _refused(question, kind)
        if one.point in points
        and one.number not in judged_numbers
        and (kind != "correctness" or one.number in ("", *baselines))
    ]


def _correct(question: Question, places: Sequence[Place], found: Sequence[Value]) -> str:
    """Demand results of the points that are right, and of the baselines that a number is held against."""
    if wrong := _of_values(question, "correctness", places, found):
        raise NotAskedError(_words(wrong), condition="correctness")
    return "every result is as right as is allowed"


def _bounded(question: Question, places: Sequence[Place], found: Sequence[Value]) -> str:
    """Demand that no number of the points, and no value that follows, is more than there can be."""
    if outside := _of_values(question, "bounds", places, found):
        raise NotAskedError(_words(outside), condition="bounds")
    for one in found if question.metric.between_points else ():
        if excess := beyond(one.interval.value, question.metric, question.record.gpu, per="run"):
            raise NotAskedError(f"at {one.place} it is {excess}", condition="bounds")
    return "inside what the device can do"


def _samples(question: Question, values: Sequence[Value], comparison: Comparison) -> str:
    """Demand samples whose interval lies on one side of the limit; nothing fails on few steps."""
    behind = [pair for one in values for pair in one.behind]
    metrics, few, found = question.project.metrics, _few_steps(question, values), comparison.interval
    for place, one in behind:
        if metrics[one.metric].repeated and one.count < 2:
            raise NotAskedError(f"{one.id} at {place.point.id} rests on a single sample", condition="samples")
    if found.low == found.high:
        shown = "it is counted, not sampled" if not behind else plural(behind[0][1].count, "sample")
    else:
        ends = " to ".join(f"{question.in_unit(end):.4g}" for end in (found.low, found.high))
        shown = f"the 99 % interval of {plural(found.samples, 'sample')} is {ends}"
    if comparison.standing == "undecided":
        needed = question.limits.samples(found)
        more = f"about {needed} would decide" if needed else "no number would decide"
        raise NotAskedError(f"undecided: {shown} and reaches over the limit; {more}", condition="samples")
    if comparison.standing == "fails" and few:
        raise NotAskedError(f"undecided: {shown}, and nothing fails on {few}", condition="samples")
    return f"{shown}{f', {few}' if few else ''}"


def _few_steps(question: Question, values: Sequence[Value]) -> str:
    """Return the words that belong beside a number of too few timed steps; empty where there are enough."""
    metrics = question.project.metrics
    least = [(one.count, metrics[one.metric].evidence.steps) for value in values for _, one in value.behind]
    short = [pair for pair in least if pair[0] < pair[1]]
    return f"few steps: {min(short)[0]} of {min(short)[1]}" if short else ""


def _note(question: Question, values: Sequence[Value]) -> str:
    """Return the words that belong beside a value: how few its steps are, or the error of a score."""
    behind = [pair for value in values for pair in value.behind]
    errors = [error for place, one in behind if (error := place.point.measurement(f"{one.id}/error"))]
    largest = max((one.median for one in errors), default=None) if question.kind == "score" else None
    return _few_steps(question, values) or ("" if largest is None else f"standard error {largest:.3f}")


def _doubts(question: Question, places: Sequence[Place]) -> tuple[str, ...]:
    """Return what casts a doubt on the records of a question, and what one side of a claim has alone."""
    if question.kind != BETWEEN:
        return question.record.doubts
    records = {one.record.run: one.record for one in places}
    found = [f"{run}: {one}" for run, record in records.items() for one in record.doubts]
    for over, under in _pairs(places):
        sides = [{**one.record.environment.variables} for one in (over, under)]
        names = sorted(name for name in {*sides[0], *sides[1]} if sides[0].get(name) != sides[1].get(name))
        found += [f"{name} is {' and '.join(side.get(name, 'not set') for side in sides)}" for name in names]
    return tuple(dict.fromkeys(found))


def _verdict(
    question: Question,
    conditions: tuple[Condition, ...],
    places: Sequence[Place],
    found: Sequence[Value],
    comparison: Comparison | None,
) -> Verdict:
    """Return the verdict of a question; a value of other hardware stands in the reason alone."""
    claim, metric = question.claim, question.metric
    unmet = next((one for one in conditions if not one.met), None)
    decided = unmet is None or unmet.name in ("samples", "direction")
    shown = decided if not question.published else unmet is None or unmet.name != "hardware"
    value = comparison.interval.value if comparison and shown else None
    value = value if value is not None and math.isfinite(value) else None
    note = _note(question, found)
    seen = comparison.seen if comparison else ""
    reason = unmet.seen if unmet and unmet.name != "direction" else f"{seen}; {note}" if note else seen
    factor = _factor(question, comparison) if question.published and comparison and unmet is None else None
    doubted = _doubts(question, places)
    verdict = Verdict(
        claim=claim.id,
        statement=question.asked.statement,
        outcome=outcome_of(
            conditions, published=question.published, exceeds=factor is not None, doubts=doubted
        ),
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
    return verdict if question.restated is None else _restated(question, verdict, comparison, decided=decided)


def _factor(question: Question, comparison: Comparison) -> float | None:
    """Return how many times as good a value is, where all of it is better by more than the tolerance."""
    found, reference = comparison.interval, question.reference
    if question.better == "equal" or not reference or not found.value:
        return None
    tolerance = question.asked.tolerance
    if question.better == "higher":
        return found.value / reference if found.low > reference * (1 + tolerance) else None
    return reference / found.value if found.high < reference * (1 - tolerance) else None


def _departures(question: Question, places: Sequence[Place]) -> Iterator[str]:
    """Yield what differs from the published run, or of two sides from the published comparison."""
    claim = question.claim
    if not isinstance(claim, RecordClaim):
        yield from departures_of(question, places)
        return
    for over, under in _pairs(places)[:1]:
        for one, published in zip((over, under), (claim.over, claim.under), strict=True):
            yield f"{hardware(one.record)} with {one.record.plan.stack}, published {published}"
    if absent := [name for name in claim.values if places and name not in {one.setting for one in places}]:
        yield f"without {claim.setting} {', '.join(absent)}"
    apart_of = {item.field: item for place in places for item in place.record.differences}
    for item in apart_of.values():
        yield f"{item.field} {plain(item.found)}, published {plain(item.published)}"


def _restated(
    question: Question, verdict: Verdict, comparison: Comparison | None, *, decided: bool
) -> Verdict:
    """Return the verdict on a restatement, whose reason says what it was derived from."""
    here = question.restated
    assert here
    if not decided or not comparison:
        return verdict.model_copy(update={"reason": f"Not asked, because {verdict.reason}."})
    found = f"Here {measured_here(verdict)} at {comparison.place}; published {published_here(verdict)}"
    said = verdict.reason[:1].upper() + verdict.reason[1:]
    weaker = f" Weaker than published: {here.weaker}." if here.weaker else ""
    reason = f"{found} = {here.derivation}, {here.basis}. {said}.{weaker}"
    return verdict.model_copy(update={"reason": reason})
