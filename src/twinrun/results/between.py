"""The claims between records, judged: ratios of two GPUs, or two stacks, of the same settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from twinrun.foundation.text import plain
from twinrun.manifests.claims import RecordClaim
from twinrun.manifests.metrics import RATIO
from twinrun.planning.project import Project
from twinrun.results.conditions import (
    Answer,
    Findings,
    asked,
    compared,
    demand_bounds,
    demand_correct,
    demand_hosts,
    demand_stable,
    demand_training,
    demand_whole,
)
from twinrun.results.configuration import apart, configuration_of
from twinrun.results.evidence import JudgeContext, few_steps
from twinrun.results.kinds import between
from twinrun.results.kinds.between import Side, SidePoint
from twinrun.results.question import QuestionValue, RecordQuestion
from twinrun.results.record import Record, hardware
from twinrun.results.verdicts import (
    Condition,
    NotAskedError,
    RestatementVerdict,
    Verdict,
    as_published,
    as_restated,
)

Sides = tuple[Side, Side]


def judge_between(records: Sequence[Record], project: Project) -> tuple[Verdict, ...]:
    """Judge the claims between records of the recipe that `records` are of, in the published order."""
    return verdicts_between(records, project, {one.run: Findings.of(one, project) for one in records})


def verdicts_between(
    records: Sequence[Record], project: Project, findings: Mapping[str, Findings]
) -> tuple[Verdict, ...]:
    """Judge the claims between records, each of which was looked at before, by its run."""
    if not records:
        return ()
    recipe = project.recipe(records[0].plan.recipe)
    terms = JudgeContext(metrics=project.metrics, gpus=project.gpus, recipe=recipe)
    return tuple(_judged(claim, records, terms, findings) for claim in recipe.published.between_records)


def _judged(
    claim: RecordClaim, records: Sequence[Record], terms: JudgeContext, findings: Mapping[str, Findings]
) -> Verdict:
    asked_of = partial(RecordQuestion, claim=claim, records=records, terms=terms)
    answer, _ = _answered(asked_of(published=True), findings)
    verdict = Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome=as_published(answer.conditions),
        reason=answer.reason,
        published=claim.value,
        measured=answer.value,
        unit=claim.unit,
        per=claim.per,
        note=answer.note,
        conditions=answer.conditions,
    )
    if claim.here is None or verdict.outcome not in ("not-comparable", "config-mismatch"):
        return verdict
    return verdict.model_copy(update={"here": _verdict_here(asked_of(published=False), findings)})


def _verdict_here(question: RecordQuestion, findings: Mapping[str, Findings]) -> RestatementVerdict:
    answer, sides = _answered(question, findings)
    here, metric = question.restated, question.metric
    assert here
    reason = f"Not asked, because {answer.reason}."
    if answer.decided and answer.comparison:
        said = answer.reason[:1].upper() + answer.reason[1:]
        reason = (
            f"Here {answer.value:.3f}, {answer.comparison.place}; published {here.value:g} ="
            f" {here.derivation}, {here.basis}. {said}."
        )
        reason += f" Weaker than published: {here.weaker}." if here.weaker else ""
    return RestatementVerdict(
        statement=here.statement,
        outcome=as_restated(answer.conditions),
        reason=reason,
        published=here.value,
        measured=answer.value if answer.decided else None,
        metric=here.metric,
        title=f"of the other side's {metric.title}",
        unit=RATIO,
        note=answer.note,
        conditions=answer.conditions,
        departures=tuple(_departures(question, sides)) if sides else (),
    )


def _answered(question: RecordQuestion, findings: Mapping[str, Findings]) -> tuple[Answer, Sides | None]:
    """Ask every condition of both sides; without them, and without a value, the rest is not reached."""
    sides: list[Sides] = []

    def find() -> str:
        sides.append(between.points(question))
        return " and ".join(dict.fromkeys(hardware(one.record) for one in _all(sides[0])))

    hardware_found = asked("hardware", find)
    if not sides:
        return Answer(conditions=(hardware_found,)), None
    places = _all(sides[0])
    whole = Findings.joined([findings[one.record.run] for one in places])
    points = [one.point for one in places]
    found: list[QuestionValue] = []
    conditions = [
        hardware_found,
        asked("subject", partial(_two_sides, question, sides[0])),
        asked("stable", partial(demand_stable, points, question.terms.metrics)),
        asked("account", partial(demand_whole, whole)),
        asked("points", partial(_places, places)),
        asked("configuration", partial(_configuration, question, sides[0])),
        Condition(name="order", met=True, seen="no curves are held against each other"),
    ]
    conditions.append(asked("measured", partial(_measured, question, sides[0], found)))
    comparison = between.compare(question, found) if found else None
    if comparison:
        conditions += [
            asked("training", partial(demand_training, points, question.terms.metrics)),
            asked("correctness", partial(demand_correct, whole, points)),
            asked("bounds", partial(demand_bounds, whole, points)),
            *compared(question, found, comparison),
        ]
    behind = [pair for one in found for pair in one.behind]
    note = few_steps(behind, question.terms.metrics)
    return Answer.of(conditions, points=points, comparison=comparison, note=note), sides[0]


def _all(sides: Sides) -> list[SidePoint]:
    return [one for side in sides for one in side.values()]


def _two_sides(question: RecordQuestion, sides: Sides) -> str:
    """Demand records of two runs: one and its copy under another name compare nothing."""
    over, under = ([(one.record.run, one.point.measurements) for one in side.values()] for side in sides)
    if copied := [run for run, numbers in over if any(run == a or numbers == b for a, b in under)]:
        raise NotAskedError(f"both sides have the numbers of {', '.join(copied)}", condition="subject")
    machines = {hardware(one.record) for one in _all(sides)}
    if question.claim.over.gpu == question.claim.under.gpu and len(machines) > 1:
        raise NotAskedError(f"the sides are of {' and '.join(sorted(machines))}", condition="subject")
    return "two sides, each of its own runs"


def _places(places: Sequence[SidePoint]) -> str:
    for record, point in places:
        demand_hosts([point], record)
    return ", ".join(dict.fromkeys(one.point.id for one in places))


def _configuration(question: RecordQuestion, sides: Sides) -> str:
    """Demand that every record is as published, and that the sides are equal in all that counts."""
    claim, terms = question.claim, question.terms
    places = zip((claim.over, claim.under), sides, strict=True)
    for of, name, record, point in ((of, name, *one) for of, side in places for name, one in side.items()):
        found = configuration_of(
            record,
            [point],
            claim,
            recipe=terms.recipe,
            metrics=terms.metrics,
            here=not question.published,
            value=name if claim.setting else None,
            side=of,
        )
        if not found.equal:
            raise NotAskedError(f"{record.run} at {point.id}: {found.words}", condition="configuration")
        if question.published and not record.environment.as_locked:
            packages = sorted(record.environment.lock_differences | record.environment.changed_files)[:3]
            why = f"{name} did not run on {record.plan.stack}: other versions of {', '.join(packages)}"
            raise NotAskedError(why, condition="configuration")
    over, under = sides
    for name in over:
        published = terms.recipe.published
        if other := apart(over[name], under[name], claim, published=published, metrics=terms.metrics):
            fields = "; ".join(f"{field} {plain(a)} and {plain(b)}" for field, a, b in other)
            raise NotAskedError(f"the sides differ in {fields}", condition="configuration")
    return "both sides are as published, and equal in all that counts"


def _measured(question: RecordQuestion, sides: Sides, found: list[QuestionValue]) -> str:
    found.extend(between.values(question, sides))
    return "; ".join(one.place for one in found)


def _departures(question: RecordQuestion, sides: Sides) -> Iterator[str]:
    """Yield what differs from the published comparison: machines, settings, fields."""
    claim = question.claim
    for side, published in zip(sides, (claim.over, claim.under), strict=True):
        one = next(iter(side.values())).record
        yield f"{hardware(one)} with {one.plan.stack}, published {published}"
    if absent := [name for name in claim.values if name not in sides[0]]:
        yield f"without {claim.setting} {', '.join(absent)}"
    apart_of = {one.field: one for place in _all(sides) for one in place.record.plan.differences}
    yield from (
        f"{one.field} {plain(one.found)}, published {plain(one.published)}" for one in apart_of.values()
    )
