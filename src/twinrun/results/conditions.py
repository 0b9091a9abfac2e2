"""The conditions of a claim: what must be so before its number says anything, each with what was seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twinrun.foundation.text import plain, plural
from twinrun.manifests.claims import Claim, RecordClaim, placeholders_of
from twinrun.protocol.model_source import in_words
from twinrun.results.bounds import beyond, demand_trained, limit_of, untrained
from twinrun.results.configuration import apart_from, sides_apart
from twinrun.results.judged import gpus_of, hardware
from twinrun.results.kinds import KINDS, Asked
from twinrun.results.question import BETWEEN, AnyClaim, Value, elsewhere, names_of
from twinrun.results.verdicts import CONDITIONS, Condition, NotAskedError
from twinrun.workloads.curve_distance import ORDER, values_of
from twinrun.workloads.workload import Finding, FindingKind

# Fields that say which model a number is of; a score is of weights, whatever the sequences were.
MODEL_FIELDS = ("model.repository", "parameters")
# More findings than a reader looks at.
SHOWN = 3


def conditions_of(question: Asked) -> tuple[Condition, ...]:
    """Return the conditions of a question; those behind one that gives no value are not reached."""
    found = [written(question.claim)]
    if found[0].met:
        sides = _answer(question, "hardware", _machines)
        found += before(question) if sides.met else [sides]
    if any(one.name == "points" and one.met for one in found):
        found.append(_answer(question, "measured", _measured))
        if found[-1].met and question.values:
            found += [_answer(question, *one) for one in BEHIND.items()]
            standing, seen = question.comparison[:2]
            found.append(Condition(name="direction", met=standing == "holds", seen=seen))
    return tuple(sorted(found, key=lambda one: CONDITIONS.index(one.name)))


def written(claim: AnyClaim) -> Condition:
    """Return whether somebody has written a claim that the template baked."""
    if unwritten := list(placeholders_of(claim.model_dump(), f"claim.{claim.id}")):
        seen = f"published.toml still contains the template's placeholder in: {', '.join(unwritten)}"
        return Condition(name="written", met=False, seen=seen)
    return Condition(name="written", met=True, seen="in published.toml")


def before(question: Asked) -> list[Condition]:
    """Return the conditions that can be asked before a value is known."""
    return [_answer(question, *one) for one in BEFORE.items()]


def _answer(question: Asked, name: str, check: Callable[[Asked], str]) -> Condition:
    """Return the answer to a condition; a check raises NotAskedError, which may be of another condition."""
    try:
        return Condition(name=name, met=True, seen=check(question))
    except NotAskedError as refusal:
        return Condition(name=refusal.condition, met=False, seen=str(refusal))


def _machines(question: Asked) -> str:
    return " and ".join(dict.fromkeys(hardware(one.record) for one in question.places))


def _subject(question: Asked) -> str:
    """Demand a training where the number is one of training, and the model that the claim names."""
    claim, record = question.claim, question.record
    if isinstance(claim, RecordClaim):
        return _two_sides(question, claim)
    model = record.description.model
    measured = (question.found_of(question.asked, point) for point in record.points)
    if model and question.kind != "score" and not any(measured):
        raise NotAskedError(f"nothing was trained: {in_words(model)} was there", condition="subject")
    if claim.configuration is None:
        return "the recipe's own experiment"
    fields = MODEL_FIELDS if claim.kind == "score" else (*MODEL_FIELDS, "sequence")
    if other := [one for one in question.apart.every if one.field in fields]:
        apart = "; ".join(f"{one.field} is {one.found}, published {one.published}" for one in other)
        raise NotAskedError(f"about {claim.configuration}; {apart}", condition="subject")
    return claim.configuration


def _two_sides(question: Asked, claim: RecordClaim) -> str:
    """Demand records of two runs: one and its copy under another name compare nothing."""
    over, under = ([one for one in question.places if one.side == side] for side in (0, 1))
    for a in over:
        if any(a.record.run == b.record.run or a.point.measurements == b.point.measurements for b in under):
            raise NotAskedError(f"both sides have the numbers of {a.record.run}", condition="subject")
    machines = sorted({hardware(one.record) for one in question.places})
    if claim.over.gpu == claim.under.gpu and len(machines) > 1:
        raise NotAskedError(f"the sides are of {' and '.join(machines)}", condition="subject")
    return "two sides, each of its own runs"


def _stable(question: Asked) -> str:
    """Demand curves that are finite and did not rise for good."""
    try:
        return _fell(question)
    except NotAskedError as refusal:
        if refusal.condition == "stable":
            raise
    return "no loss diverged"


def _fell(question: Asked) -> str:
    points = [place.point for place in question.places]
    demand_trained(points, question.project.metrics)
    return "no loss diverged" if any(point.series for point in points) else "nothing was trained"


def _hardware(question: Asked) -> str:
    """Demand the published hardware, or for a speed anywhere else one whose peak rates are known."""
    record, repeated, why = question.record, question.metric.repeated, ""
    if question.kind == BETWEEN:
        return _machines(question)
    names = {one.name for report in record.record.allocation.reports.values() for one in report.devices}
    smoke = record.plan.scale == "smoke"
    if question.published:
        other = [*elsewhere(question, question.places), *(["smoke scale"] if smoke else [])]
        why = f"not the published run: {'; '.join(other)}" if other else ""
    elif repeated and smoke:
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


def _account(question: Asked) -> str:
    """Demand records without a gap."""
    if found := _refused(question, "account"):
        raise NotAskedError(_words(found), condition="account")
    return "every planned point, step, check and document is there once"


def _refused(question: Asked, kind: FindingKind) -> list[Finding]:
    return [one for record in question.records for one in record.refusals if one.kind == kind]


def _words(found: Sequence[Finding]) -> str:
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(one.words for one in found[:SHOWN]) + more


def _points(question: Asked) -> str:
    """Demand the points of the claim, and as many sizes and kinds of hardware as its statement speaks of."""
    claim, lacks = question.claim, KINDS[question.kind].lacking(question, question.places)
    if not lacks and isinstance(claim, Claim):
        places = [place.point for place in question.places]
        reach = claim.reach if question.restated else claim.reach.with_that_of(question.metric.evidence)
        points = question.record.points if question.restated else places
        sizes = sorted({point.devices for point in points}) or [0]
        kinds = sorted({point.result.device_name for point in points})
        shown = " and ".join(plural(size, "device") for size in sizes)
        if sizes[-1] < reach.devices:
            lacks = f"needs a point of {plural(reach.devices, 'device')}, this run has {shown}"
        elif len(sizes) < reach.world_sizes:
            lacks = f"needs {reach.world_sizes} world sizes, this run has {shown} alone"
        elif len(kinds) < reach.hardware_kinds:
            kind = " and ".join(kinds) or "one"
            lacks = f"needs {reach.hardware_kinds} kinds of hardware, this run has {kind}"
    if lacks:
        raise NotAskedError(lacks, condition="points")
    return names_of(question.places)


def _configured(question: Asked) -> str:
    """Demand the published configuration, but for what is neutral for the claim."""
    if isinstance(question.claim, RecordClaim):
        return _sides_configured(question, question.claim)
    if question.apart.differences:
        raise NotAskedError(question.apart.words, condition="configuration")
    neutral = question.apart.neutral[:SHOWN]
    return "; ".join(f"{one.field} {one.found}, neutral" for one in neutral) or "as published"


def _sides_configured(question: Asked, claim: RecordClaim) -> str:
    """Demand that every record is as published, and that the sides are equal in all that counts."""
    for place in question.places:
        record, planned, side = place.record, [place.point.planned], (claim.over, claim.under)[place.side]
        here, setting = not question.published, place.setting
        apart = apart_from(claim, record, planned, meant=claim.point, here=here, setting=setting, side=side)
        if found := apart.words:
            where = f"{record.run} at {place.point.id}"
            raise NotAskedError(f"{where}: {found}", condition="configuration")
    for over, under in question.pairs:
        a, b = (one.record.settings(one.point) for one in (over, under))
        if other := sides_apart(a, b, claim, question.record):
            fields = "; ".join(f"{field} {plain(mine)} and {plain(theirs)}" for field, mine, theirs in other)
            raise NotAskedError(f"the sides differ in {fields}", condition="configuration")
    return "both sides are as published, and equal in all that counts"


def _order(question: Asked) -> str:
    """Demand that points whose training is held against each other worked through the same batches."""
    trained, metric = [one.point for one in question.places if one.point.series], question.metric
    compared = question.kind != BETWEEN and (question.claim.kind in ("invariant", "parity") or metric.series)
    if not compared or metric.fact or len(trained) < 2:
        return "no curves are held against each other"
    orders = {point.id: point.digests.get(ORDER) for point in trained}
    if absent := [name for name, order in orders.items() if not order]:
        raise NotAskedError(f"no {ORDER} of {', '.join(absent)}", condition="order")
    if len(set(orders.values())) > 1:
        raise NotAskedError("the points did not train on the same global batches", condition="order")
    return "same batches in the same order"


def _measured(question: Asked) -> str:
    return "; ".join(one.place for one in question.values[:SHOWN])


def _training(question: Asked) -> str:
    """Demand curves that fell; of curves that coincide, that they go beyond the warm-up."""
    claim, seen = question.claim, _fell(question)
    metric, distance = question.project.metrics[claim.metric], claim.kind in ("invariant", "parity")
    if distance and metric.series and question.comparison.standing != "fails":
        for record, point, *_ in question.places:
            rising, curve = record.description.points[point.id].rising_steps, values_of(point, metric.id)
            if why := untrained(curve, metric, rising=rising, place=point.id, least_fall=claim.tolerance):
                raise NotAskedError(why, condition="training")
    return seen


def _correct(question: Asked, kind: FindingKind = "correctness") -> str:
    """Demand that no finding concerns the values: of their points, and of the baselines of their calls.

    A claim that holds numbers from both sides is failed by them itself.
    """
    points = {"", *(place.point.id for place in question.places)}
    behind = [one for value in question.values for _, one in value.behind]
    own = {one.id for one in behind} if question.claim.kind in ("invariant", "parity") else set()
    baselines = {"", *(f"{one.labels.get('call')}@{one.labels.get('baseline')}" for one in behind)}
    found = [
        one
        for one in _refused(question, kind)
        if one.point in points
        and one.number not in own
        and (kind != "correctness" or one.number in baselines)
    ]
    if found:
        raise NotAskedError(_words(found), condition=kind)
    return "every result is as right as is allowed"


def _bounded(question: Asked) -> str:
    """Demand that no number of the points, and no value that follows, is more than there can be."""
    _correct(question, "bounds")
    most = limit_of(question.metric, question.record.gpu, per="run")
    for one in question.values if question.metric.between_points else ():
        if excess := beyond(one.interval.value, question.metric, most):
            raise NotAskedError(f"at {one.place} it is {excess}", condition="bounds")
    return "inside what the device can do"


def _samples(question: Asked) -> str:
    """Demand samples whose interval lies on one side of the limit; nothing fails on few steps."""
    behind = [pair for one in question.values for pair in one.behind]
    few, (standing, _, found, _) = few_steps(question, question.values), question.comparison
    for place, one in behind:
        if question.project.metrics[one.metric].repeated and one.count < 2:
            raise NotAskedError(f"{one.id} at {place.point.id} rests on a single sample", condition="samples")
    shown = plural(behind[0][1].count, "sample") if behind else "it is counted, not sampled"
    if found.low != found.high:
        ends = " to ".join(f"{question.in_unit(end):.4g}" for end in (found.low, found.high))
        shown = f"the 99 % interval of {plural(found.samples, 'sample')} is {ends}"
    if standing == "undecided":
        needed = question.limits.samples(found)
        more = f"about {needed} would decide" if needed else "no number would decide"
        raise NotAskedError(f"undecided: {shown} and reaches over the limit; {more}", condition="samples")
    if standing == "fails" and few:
        raise NotAskedError(f"undecided: {shown}, and nothing fails on {few}", condition="samples")
    return f"{shown}{f', {few}' if few else ''}"


def few_steps(question: Asked, values: Sequence[Value]) -> str:
    """Return the words that belong beside a number of too few timed steps; empty where there are enough."""
    metrics = question.project.metrics
    least = [(one.count, metrics[one.metric].evidence.steps) for value in values for _, one in value.behind]
    short = [pair for pair in least if pair[0] < pair[1]]
    return f"few steps: {min(short)[0]} of {min(short)[1]}" if short else ""


BEFORE: dict[str, Callable[[Asked], str]] = {
    "subject": _subject,
    "stable": _stable,
    "hardware": _hardware,
    "account": _account,
    "points": _points,
    "configuration": _configured,
    "order": _order,
}
BEHIND: dict[str, Callable[[Asked], str]] = {
    "training": _training,
    "correctness": _correct,
    "bounds": _bounded,
    "samples": _samples,
}
