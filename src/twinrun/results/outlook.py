"""Before a run: which claims it will answer, and which condition the others will lack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.claims import Claim
from twinrun.manifests.restatements import Restatement
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation
from twinrun.protocol.job import Result
from twinrun.results.conditions import before, written
from twinrun.results.judged import Judged
from twinrun.results.kinds import Asked
from twinrun.results.record import Record
from twinrun.results.verdicts import CONDITIONS, Condition
from twinrun.workloads import load_workload
from twinrun.workloads.curve_distance import LEAST_CONTROLS
from twinrun.workloads.workload import MeasuredPoint, PointRecord


class ClaimOutlook(Frozen):
    """What a run will say of one claim."""

    claim: str
    answered: bool
    how: str
    """`as published` or `here`; else the condition that will be missing, in words."""


def outlook(plan: Plan, project: Project) -> tuple[ClaimOutlook, ...]:
    """Return for each claim whether a run of a plan will answer it; runs nothing."""
    record = planned(plan, project)
    alone = [_of_claim(claim, record) for claim in record.recipe.published.claim]
    for claim in record.recipe.published.between_records:
        how = f"needs records of {claim.over} and of {claim.under}: `invoke compare --claims A B`"
        alone.append(ClaimOutlook(claim=claim.id, answered=False, how=how))
    return tuple(alone)


def planned(plan: Plan, project: Project) -> Judged:
    """Return the record that a plan will have, without a number."""
    points = []
    for point in plan.points:
        leg = plan.description.points[point.id].leg
        name = "a processor" if leg and leg.processor else plan.gpu or plan.vendor
        result = Result(point=point.id, device_name=name, libraries={})
        points.append(MeasuredPoint(planned=point, sent=PointRecord(id=point.id, hosts=(), result=result)))
    nodes = Allocation(scheduler=plan.scheduler, nodes=("a node",))
    return Judged(
        record=Record.model_construct(**dict[str, Any](plan=plan, allocation=nodes, points=())),
        project=project,
        recipe=project.recipe(plan.recipe),
        workload=load_workload(plan.workload),
        gpu=project.gpus.get(plan.gpu) if plan.gpu else None,
        points=tuple(points),
    )


def _of_claim(claim: Claim, record: Judged) -> ClaimOutlook:
    asked: dict[str, Claim | Restatement] = {"as published": claim}
    if claim.here is not None or claim.hardware is None:
        asked["here"] = claim.here or claim
    missing: list[Condition] = []
    for how, statement in asked.items():
        question = Asked(claim=claim, records=(record,), asked=statement, published=how != "here")
        missing = [one for one in _conditions(question) if not one.met]
        if not missing:
            return ClaimOutlook(claim=claim.id, answered=True, how=how)
    first = min(missing, key=lambda one: CONDITIONS.index(one.name))
    return ClaimOutlook(claim=claim.id, answered=False, how=first.seen)


def _conditions(question: Asked) -> Iterator[Condition]:
    """Yield the conditions that a plan decides; the points of a score are there where its task is."""
    record, metric = question.record, question.project.metrics[question.claim.metric]
    yield written(question.claim)
    yield from (one for one in before(question) if question.kind != "score" or one.name != "points")
    if question.claim.kind not in ("invariant", "parity") or not metric.series:
        return
    described, needed = record.description.points, metric.evidence.trained_steps
    for place in question.places:
        of = described[place.point.id]
        if of.steps - of.rising_steps < needed:
            seen = f"{of.steps} steps, of which the learning rate rises in the first {of.rising_steps}"
            more = f"{needed} after them are needed: --set steps={of.rising_steps + needed}"
            yield Condition(name="training", met=False, seen=f"{seen}; {more}")
    controls = sum(getattr(place.point.part, "controls", 0) for place in question.places)
    if question.claim.kind == "parity" and controls < LEAST_CONTROLS:
        seen = f"an envelope needs --controls {LEAST_CONTROLS}, and the plan has {controls}"
        yield Condition(name="samples", met=False, seen=seen)
