"""The conditions that a question asks of a record, each answered with what was seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from twinrun.foundation.text import plural
from twinrun.manifests.metrics import Metric
from twinrun.planning.project import Project
from twinrun.protocol.model_source import in_words
from twinrun.results.account import gaps
from twinrun.results.bounds import beyond, excesses
from twinrun.results.correctness import ERROR, faults
from twinrun.results.curves import demand_trained, untrained
from twinrun.results.evidence import DEVICE, Located, few_steps, names_of, standard_error, unspanned
from twinrun.results.kinds import absolute, invariant, parity, ratio, score
from twinrun.results.kinds.comparison import ValueComparison
from twinrun.results.question import Question, QuestionKind, QuestionValue, RecordQuestion, elsewhere, gpus_of
from twinrun.results.record import Record
from twinrun.results.verdicts import CONDITIONS, Condition, ConditionName, NotAskedError
from twinrun.workloads.curve_distance import ORDER, values_of
from twinrun.workloads.workload import Gap, PointRecord

KINDS: dict[QuestionKind, ModuleType] = {
    "absolute": absolute,
    "ratio": ratio,
    "invariant": invariant,
    "parity": parity,
    "score": score,
}
# Fields that say which model a number is of; a score is of weights, whatever the sequences were.
MODEL_FIELDS = ("model.repository", "parameters")
# More gaps than a reader looks at.
SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found of a record before any claim was asked of it."""

    gaps: tuple[Gap, ...] = ()
    """Where the account of the record is not complete."""
    faults: tuple[Gap, ...] = ()
    """Where what was computed is wrong, or nobody measured whether it is right."""
    excesses: tuple[Gap, ...] = ()
    """Where a number is more than its hardware can do."""

    @classmethod
    def of(cls, record: Record, project: Project) -> Findings:
        """Look at a whole record once."""
        return cls(
            gaps=gaps(record, project), faults=faults(record, project), excesses=excesses(record, project)
        )

    def without(self, measurements: Set[str]) -> Findings:
        """Return what was found but for some measurements."""
        faults, excesses = (
            tuple(gap for gap in found if gap.path.partition(".measurements.")[2] not in measurements)
            for found in (self.faults, self.excesses)
        )
        return Findings(gaps=self.gaps, faults=faults, excesses=excesses)

    @classmethod
    def joined(cls, found: Sequence[Findings]) -> Findings:
        """Return what was found of several records."""
        return cls(
            gaps=tuple(gap for one in found for gap in one.gaps),
            faults=tuple(gap for one in found for gap in one.faults),
            excesses=tuple(gap for one in found for gap in one.excesses),
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a record says to a question."""

    conditions: tuple[Condition, ...]
    points: tuple[PointRecord, ...] = ()
    comparison: ValueComparison | None = None
    """What the values showed, None where there are none."""
    note: str = ""
    """The words that belong beside the value."""

    @classmethod
    def of(
        cls,
        conditions: Iterable[Condition],
        *,
        points: Sequence[PointRecord] = (),
        comparison: ValueComparison | None = None,
        note: str = "",
    ) -> Answer:
        """Return an answer whose conditions are in the order in which they decide."""
        ordered = sorted(conditions, key=lambda one: CONDITIONS.index(one.name))
        return cls(conditions=tuple(ordered), points=tuple(points), comparison=comparison, note=note)

    @property
    def unmet(self) -> Condition | None:
        """The condition that decides, None where all are met."""
        return next((one for one in self.conditions if not one.met), None)

    @property
    def decided(self) -> bool:
        """Whether a value was held against the reference, even if its samples decide nothing."""
        return self.unmet is None or self.unmet.name in ("samples", "direction")

    @property
    def value(self) -> float | None:
        """The value that is worst for the claim, in the metric's canonical unit; None where there is none."""
        interval = self.comparison and self.comparison.interval
        return interval.value if interval and math.isfinite(interval.value) else None

    @property
    def reason(self) -> str:
        """What was seen of the condition that decides, and beside a value how few its samples are."""
        if self.unmet and self.unmet.name != "direction":
            return self.unmet.seen
        seen = self.comparison.seen if self.comparison else ""
        return f"{seen}; {self.note}" if self.note else seen


def answered(question: Question, findings: Findings) -> Answer:
    """Ask every condition of a question; those behind one that gives no value are not reached."""
    kind = KINDS[question.kind]
    points: tuple[PointRecord, ...] = kind.points(question)
    metrics = question.terms.metrics
    conditions = [
        asked("subject", partial(_subject, question, points)),
        asked("stable", partial(demand_stable, points, metrics)),
        asked("hardware", partial(_hardware, question, points)),
        asked("account", partial(demand_whole, findings)),
        asked("points", partial(_points, question, points, kind)),
        asked("configuration", partial(_configuration, question, points)),
        asked("order", partial(_order, question, points)),
    ]
    found: list[QuestionValue] = []
    if conditions[4].met:
        conditions.append(asked("measured", partial(_measured, question, points, kind, found)))
    comparison = kind.compare(question, found) if found else None
    behind = [pair for one in found for pair in one.behind]
    if comparison:
        if question.claim.is_distance:
            # It holds these numbers from both sides, so that they fail it, and are no obstacle to it.
            findings = findings.without({one.id for value in found for _, one in value.behind})
        conditions += [
            asked("training", partial(_training, question, points, comparison)),
            asked("correctness", partial(demand_correct, findings, points, behind)),
            asked("bounds", partial(_bounds, question, points, findings, found)),
            *compared(question, found, comparison),
        ]
    note = few_steps(behind, metrics) or standard_error(behind)
    return Answer.of(conditions, points=points, comparison=comparison, note=note)


def compared(
    question: Question | RecordQuestion, values: Sequence[QuestionValue], comparison: ValueComparison
) -> Iterator[Condition]:
    """Yield the last two conditions: that the samples decide, and that they decide for the claim."""
    yield asked("samples", partial(_samples, question, values, comparison))
    yield Condition(name="direction", met=comparison.standing == "holds", seen=comparison.seen)


def asked(name: ConditionName, check: Callable[[], str]) -> Condition:
    """Return the answer to a condition; a check raises NotAskedError, which may be of another condition."""
    try:
        return Condition(name=name, met=True, seen=check())
    except NotAskedError as refusal:
        return Condition(name=refusal.condition, met=False, seen=str(refusal))


def _subject(question: Question, points: Sequence[PointRecord]) -> str:
    """Demand a training where the number is one of training, and the model that the claim names."""
    claim, record = question.claim, question.record
    model = record.description.model
    if model and claim.kind != "score" and not any(question.measured(point) for point in record.points):
        raise NotAskedError(f"nothing was trained: {in_words(model)} was there", condition="subject")
    if claim.configuration is None:
        return "the recipe's own experiment"
    fields = MODEL_FIELDS if claim.kind == "score" else (*MODEL_FIELDS, "sequence")
    other = [one for one in question.apart(tuple(points)) if one.field in fields]
    if other:
        apart = "; ".join(f"{one.field} is {one.found}, published {one.published}" for one in other)
        raise NotAskedError(f"about {claim.configuration}; {apart}", condition="subject")
    return claim.configuration


def demand_stable(points: Sequence[PointRecord], metrics: Mapping[str, Metric]) -> str:
    """Demand curves that are finite and did not rise for good."""
    try:
        return demand_training(points, metrics)
    except NotAskedError as refusal:
        if refusal.condition == "stable":
            raise
    return "no loss diverged"


def demand_training(points: Sequence[PointRecord], metrics: Mapping[str, Metric]) -> str:
    """Demand curves that are finite and fell."""
    demand_trained(points, metrics)
    return "no loss diverged" if any(point.series for point in points) else "nothing was trained"


def _hardware(question: Question, points: Sequence[PointRecord]) -> str:
    """Demand the published hardware, or for a speed anywhere else one whose peak rates are known."""
    record, repeated = question.record, question.metric.repeated
    why = ""
    for names in (
        {device.name for device in record.machine.devices},
        {str(name) for point in record.points if (name := point.facts.get(DEVICE))},
    ):
        if repeated and len(names) > 1:
            why = f"the run mixes GPUs: {', '.join(sorted(names))}"
    if question.published:
        other = [
            *elsewhere(question, tuple(points)),
            *(["smoke scale"] if record.plan.scale == "smoke" else []),
        ]
        if other:
            why = f"not the published run: {'; '.join(other)}{_beside(question, points)}"
    elif repeated and record.plan.scale == "smoke":
        why = "a smoke run checks, and its speed says nothing"
    elif repeated and record.gpu is None:
        why = (
            f"{gpus_of(record)} has no row in images/gpus.toml, so its dense peak is unknown"
            if record.machine.devices
            else "the run is on a processor, whose speed says nothing of a GPU"
        )
    if why:
        raise NotAskedError(why, condition="hardware")
    return record.gpu.name if record.gpu else record.machine.cpu


def _beside(question: Question, points: Sequence[PointRecord]) -> str:
    """Return in words what the run measured on its own hardware, where known as a share of its peak."""
    metric, share = question.metric, f"{question.metric.id}-share"
    places = points or question.record.points
    shares = [f"{one.median:.1%} at {point.id}" for point in places if (one := point.measurement(share))]
    if metric.evidence.most == "peak" and shares and question.claim.hardware:
        gpu = question.terms.gpus[question.claim.hardware.gpu]
        peak = gpu.peak_bf16_tflops / (1 if question.claim.per == "card" else gpu.devices_per_card)
        here = f"{', '.join(shares)} here ({question.claim.formula})"
        return f"; MFU {question.reference / peak:.1%} published, {here}"
    found = [one for point in points if (one := question.measured(point))]
    if question.claim.is_distance:
        return ""
    return f"; {question.in_unit(found[0].median):.3g} {question.unit} here" if len(found) == 1 else ""


def demand_whole(findings: Findings) -> str:
    """Demand a record without a gap."""
    if findings.gaps:
        raise NotAskedError(_words(findings.gaps), condition="account")
    return "every planned point, step, check and document is there once"


def _words(gaps: Sequence[Gap]) -> str:
    more = f"; and {len(gaps) - SHOWN} more" if len(gaps) > SHOWN else ""
    return "; ".join(gap.words for gap in gaps[:SHOWN]) + more


def _points(question: Question, points: Sequence[PointRecord], kind: ModuleType) -> str:
    """Demand the points of the claim, on as many hosts as they have nodes."""
    if lack := kind.lacking(question, points):
        raise NotAskedError(lack, condition="points")
    record = question.record
    demand_hosts(points, record)
    reach = question.claim.reach
    if question.restated is None:
        reach = reach.with_that_of(question.metric.evidence)
    if lack := unspanned(points if question.restated is None else record.points, reach) or _unjoined(record):
        raise NotAskedError(lack, condition="points")
    return names_of(points)


def demand_hosts(points: Sequence[PointRecord], record: Record) -> None:
    """Raise NotAskedError where the ranks of a point reported fewer hosts than it has nodes."""
    for point in points:
        hosts = len(set(point.hosts))
        # Records from before ranks reported their hosts are of one node.
        if hosts < point.nodes and (point.hosts or point.nodes > 1 or record.allocation):
            found = f"{point.id} is {plural(point.nodes, 'node')} and ran on {plural(hosts, 'host')}"
            raise NotAskedError(found, condition="points")


def _unjoined(record: Record) -> str:
    """Return which leg of a run does not go on where the one before ended, empty where all do."""
    described = record.description.points
    legs = {found.number: point for point in record.points if (found := described[point.id].leg)}
    for number, point in legs.items():
        before, leg = legs.get(number - 1), described[point.id].leg
        if before is None or leg is None:
            continue
        curve, start = values_of(point, "loss"), values_of(before, "loss")
        if curve[: leg.begin] != start:
            return f"{point.id} does not go on from the curve of {before.id}"
    return ""


def _configuration(question: Question, points: Sequence[PointRecord]) -> str:
    """Demand the published configuration, but for what is neutral for the claim."""
    found = question.configuration(tuple(points))
    if not found.equal:
        raise NotAskedError(found.words, condition="configuration")
    return "; ".join(f"{one.field} {one.found}, neutral" for one in found.neutral[:SHOWN]) or "as published"


def _order(question: Question, points: Sequence[PointRecord]) -> str:
    """Demand that points whose training is held against each other worked through the same batches."""
    trained = [point for point in points if point.series]
    compared = question.claim.is_distance or question.metric.series
    if not compared or question.metric.fact or len(trained) < 2:
        return "no curves are held against each other"
    orders = {point.id: point.facts.get(ORDER) for point in trained}
    if absent := [name for name, order in orders.items() if not order]:
        raise NotAskedError(f"no {ORDER} of {', '.join(absent)}", condition="order")
    if len(set(orders.values())) > 1:
        raise NotAskedError("the points did not train on the same global batches", condition="order")
    return "same batches in the same order"


def _measured(
    question: Question, points: Sequence[PointRecord], kind: ModuleType, found: list[QuestionValue]
) -> str:
    found.extend(kind.values(question, points))
    return "; ".join(one.place for one in found[:SHOWN])


def _training(question: Question, points: Sequence[PointRecord], comparison: ValueComparison) -> str:
    """Demand curves that fell; of curves that coincide, that they go beyond the warm-up."""
    seen = demand_training(points, question.terms.metrics)
    metric = question.terms.metrics[question.claim.metric]
    compared = question.claim.is_distance and metric.series and comparison.standing != "fails"
    described, least = question.record.description.points, question.claim.tolerance
    for point in points if compared else ():
        curve, rising = values_of(point, metric.id), described[point.id].rising_steps
        if doubt := untrained(curve, metric, rising=rising, place=point.id, least_fall=least):
            raise NotAskedError(doubt, condition="training")
    return seen


def demand_correct(findings: Findings, points: Sequence[PointRecord], behind: Sequence[Located] = ()) -> str:
    """Demand results of the points that are right, and of the baselines that a number is held against."""
    baselines = {
        f"{one.labels.get('call')}/{ERROR}@{one.labels.get('baseline', one.labels.get('implementation'))}"
        for _, one in behind
    }
    own = [
        gap
        for gap in _of_points(findings.faults, points)
        if f"/{ERROR}@" not in gap.path or gap.path.partition(".measurements.")[2] in baselines
    ]
    if own:
        raise NotAskedError(_words(own), condition="correctness")
    return "every result is as right as is allowed"


def _of_points(found: Sequence[Gap], points: Sequence[PointRecord]) -> list[Gap]:
    ids = {"", *(point.id for point in points)}
    return [gap for gap in found if gap.point in ids]


def _bounds(
    question: Question, points: Sequence[PointRecord], findings: Findings, values: Sequence[QuestionValue]
) -> str:
    """Demand that no number of the points, and no value that follows, is more than there can be."""
    seen, gpu = demand_bounds(findings, points), question.record.gpu
    for one in values:
        if question.metric.between_points and (
            excess := beyond(one.interval.value, question.metric, gpu, per="run")
        ):
            raise NotAskedError(f"at {one.place} it is {excess}", condition="bounds")
    return seen


def demand_bounds(findings: Findings, points: Sequence[PointRecord]) -> str:
    """Demand numbers of the points that the hardware can give."""
    if own := _of_points(findings.excesses, points):
        raise NotAskedError(_words(own), condition="bounds")
    return "inside what the device can do"


def _samples(
    question: Question | RecordQuestion, values: Sequence[QuestionValue], comparison: ValueComparison
) -> str:
    """Demand samples whose interval lies on one side of the limit; nothing fails on few steps."""
    behind = [pair for one in values for pair in one.behind]
    metrics = question.terms.metrics
    for point, one in behind:
        if metrics[one.metric].repeated and one.count < 2:
            raise NotAskedError(f"{one.id} at {point.id} rests on a single sample", condition="samples")
    found = comparison.interval
    if found is None or found.low == found.high:
        shown = "it is counted, not sampled" if not behind else plural(behind[0][1].count, "sample")
    else:
        ends = " to ".join(f"{question.in_unit(end):.4g}" for end in (found.low, found.high))
        shown = f"the 99 % interval of {plural(found.samples, 'sample')} is {ends}"
    few = few_steps(behind, metrics)
    if comparison.standing == "undecided" and found:
        needed = question.limits.samples(found)
        more = f"about {needed} would decide" if needed else "no number would decide"
        raise NotAskedError(f"undecided: {shown} and reaches over the limit; {more}", condition="samples")
    if comparison.standing == "fails" and few:
        raise NotAskedError(f"undecided: {shown}, and nothing fails on {few}", condition="samples")
    return f"{shown}{f', {few}' if few else ''}"
