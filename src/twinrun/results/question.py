"""A claim as a question to one record: as published, or as it is said anywhere else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from twinrun.foundation.text import plain, plural
from twinrun.manifests.claims import Claim, PublishedHardware, RecordClaim
from twinrun.manifests.metrics import Metric
from twinrun.manifests.restatements import Restatement
from twinrun.protocol.measurements import Measurement
from twinrun.results.configuration import Configuration, NeutralDifference, configuration_of
from twinrun.results.evidence import JudgeContext, found_of
from twinrun.results.interval import Interval, Limits
from twinrun.results.record import Record
from twinrun.workloads.settings import Difference
from twinrun.workloads.workload import PointRecord

# A claim names a point by what it is: of a case, so many nodes, devices or cards.
PLACE = re.compile(r"(?:(?P<case>.+)@)?(?P<what>nodes|devices|cards)=(?P<count>\d+)")
QuestionKind = Literal["absolute", "ratio", "invariant", "parity", "score"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a claim asks of one record."""

    claim: Claim
    record: Record
    terms: JudgeContext
    asked: Claim | Restatement
    """Statement that is judged: the claim itself, or its restatement."""
    published: bool
    """Whether it is asked of the published run; else of any other."""
    hardware: tuple[PublishedHardware, ...]
    """Hardware of the publication; empty where a number belongs to none, as a score does."""

    @property
    def restated(self) -> Restatement | None:
        """The restatement, None where the claim itself is judged."""
        return self.asked if isinstance(self.asked, Restatement) else None

    @property
    def kind(self) -> QuestionKind:
        """The module of `results/kinds` that finds and compares the numbers."""
        if self.restated is None or self.claim.kind == "score":
            return self.claim.kind
        if self.metric.between_points:
            return "ratio"
        return "parity" if self.metric.between_curves else "absolute"

    @property
    def metric(self) -> Metric:
        """The metric of the statement that is judged."""
        return self.terms.metrics[self.asked.metric]

    @property
    def unit(self) -> str:
        """Unit in which the values are shown."""
        if self.restated is None:
            return self.claim.unit
        return "%" if "%" in self.metric.units else self.metric.unit

    @property
    def reference(self) -> float:
        """The published or derived value, in the metric's canonical unit."""
        unit = self.restated.unit or self.metric.unit if self.restated else self.claim.unit
        return self.asked.value if self.ratio_as_published else self.metric.canonical(self.asked.value, unit)

    @property
    def ratio_as_published(self) -> bool:
        """Whether the value is a plain ratio, which no unit of the metric converts."""
        return self.restated is None and self.claim.kind == "ratio"

    @property
    def better(self) -> Literal["higher", "lower", "equal"]:
        """Direction of goodness."""
        return self.restated.direction(self.metric) if self.restated else self.claim.better

    @property
    def limits(self) -> Limits:
        """The values that are no worse than the reference by more than the tolerance."""
        return Limits.of(self.reference, better=self.better, tolerance=self.asked.tolerance)

    @property
    def named(self) -> tuple[str, ...]:
        """Points that the claim names; none where it is about all."""
        return self.claim.between or ((self.claim.point,) if self.claim.point else ())

    @property
    def own(self) -> tuple[tuple[PointRecord, ...], ...]:
        """Points of the run for each that the claim names, in its order; none for one that did not run."""
        return tuple(points_called(name, self.record, self.claim.hardware, self.terms) for name in self.named)

    @property
    def places(self) -> bool:
        """Whether the claim names its points by their size alone, so that other sizes can stand for them."""
        found = [PLACE.fullmatch(name) for name in self.named]
        return all(one and one["case"] is None for one in found)

    def measured(self, point: PointRecord) -> Measurement | None:
        """Return the measurement of a point that the statement is about."""
        return found_of(self.asked, point, self.claim.formula)

    def in_unit(self, value: float) -> float:
        """Return a canonical value in the unit that is shown."""
        return value if self.ratio_as_published else self.metric.in_unit(value, self.unit)

    def configuration(self, points: tuple[PointRecord, ...]) -> Configuration:
        """Return how the points stand to the configuration that the claim is about."""
        return configuration_of(
            self.record,
            points,
            self.claim,
            recipe=self.terms.recipe,
            metrics=self.terms.metrics,
            here=not self.published,
        )

    def apart(self, points: tuple[PointRecord, ...]) -> list[Difference | NeutralDifference]:
        """Return the fields in which the points differ, whether they count or are neutral."""
        found = self.configuration(points)
        return [*found.differences, *found.neutral]


@dataclass(frozen=True, kw_only=True)
class RecordQuestion:
    """What a claim between records asks of some."""

    claim: RecordClaim
    records: Sequence[Record]
    terms: JudgeContext
    published: bool

    @property
    def restated(self) -> Restatement | None:
        """The restatement, None where the claim itself is judged."""
        return None if self.published else self.claim.here

    @property
    def asked(self) -> RecordClaim | Restatement:
        """Statement that is judged: the claim itself, or its restatement."""
        return self.restated or self.claim

    @property
    def metric(self) -> Metric:
        """The metric whose values make the ratio."""
        return self.terms.metrics[self.asked.metric]

    @property
    def reference(self) -> float:
        """The published ratio."""
        return self.asked.value

    @property
    def better(self) -> Literal["higher", "lower"]:
        """Direction of goodness."""
        return self.metric.better

    @property
    def limits(self) -> Limits:
        """The ratios that are no worse than the published one by more than the tolerance."""
        return Limits.of(self.reference, better=self.metric.better, tolerance=self.asked.tolerance)

    def in_unit(self, value: float) -> float:
        """Return a ratio as it is shown."""
        return value

    def value_of(self, record: Record, point: PointRecord) -> str:
        """Return which of the claim's values a record is of."""
        claim = self.claim
        return record.terms(point).settings[claim.setting] if claim.setting else claim.point


def points_called(
    name: str, record: Record, hardware: PublishedHardware | None, terms: JudgeContext
) -> tuple[PointRecord, ...]:
    """Return the points of a run that are what a claim calls `name`, whatever they are called.

    `nodes=2` is every point on two nodes of the published size, `devices=4` one of four devices, `cards=4`
    one of as many cards, and `CASE@nodes=2` one of that case; any other name is that of the point. A leg of
    a run is no point of its size, and the point that has the name goes before others of the size.
    """
    asked = PLACE.fullmatch(name)
    if asked is None:
        return tuple(point for point in record.points if point.id == name)
    described, cards = record.description.points, record.gpu.devices_per_card if record.gpu else 1
    found = []
    for point in record.points:
        count = int(asked["count"])
        sizes = {"nodes": point.nodes, "devices": point.devices, "cards": point.devices / cards}
        of_case = point.id.rpartition("@")[0] == (asked["case"] or "")
        if of_case and sizes[asked["what"]] == count and described[point.id].leg is None:
            found.append(point)
    exact = tuple(point for point in found if point.id == name)
    if exact or asked["what"] != "nodes" or hardware is None:
        return exact or tuple(found)
    return tuple(point for point in found if _fills_nodes(point, cards, hardware, terms))


def _fills_nodes(point: PointRecord, cards: int, hardware: PublishedHardware, terms: JudgeContext) -> bool:
    """Say whether a point has as many devices, or cards, on each node as the publication."""
    devices = hardware.devices or hardware.cards * terms.gpus[hardware.gpu].devices_per_card
    per_node = point.devices / point.nodes
    return per_node == devices / hardware.nodes or per_node / cards == hardware.cards / hardware.nodes


@dataclass(frozen=True, kw_only=True)
class QuestionValue:
    """A value that a record gives, in the metric's canonical unit, and where it was found."""

    interval: Interval
    place: str
    behind: tuple[tuple[PointRecord, Measurement], ...] = ()


def departures_of(question: Question, points: tuple[PointRecord, ...]) -> Iterator[str]:
    """Yield what differs from the published run: GPU, points, scale, fields."""
    record = question.record
    yield from elsewhere(question, points)
    named, ids = question.named, [point.id for point in points]
    if question.restated and named and set(ids) != set(named):
        yield f"points {', '.join(ids) or 'none'}, published {' and '.join(named)}"
    stated = question.terms.recipe.published.fingerprint_of(question.claim)
    for one in question.apart(points):
        if one.field in stated:
            yield f"{one.field} {plain(one.found)}, published {plain(one.published)}"
    if record.plan.scale == "smoke":
        yield "smoke scale"


def elsewhere(question: Question, points: tuple[PointRecord, ...]) -> Iterator[str]:
    """Yield how the hardware, or the number of devices and nodes, is not the published one."""
    record, terms = question.record, question.terms
    gpus = {one.gpu for one in question.hardware}
    if not gpus:
        return
    if record.gpu is None or record.gpu.id not in gpus:
        names = " or ".join(sorted(terms.gpus[name].name for name in gpus))
        yield f"GPU {gpus_of(record)}, published {names}"
    elif other := miscounted(question, points):
        yield other


def gpus_of(record: Record) -> str:
    """Name the GPUs of a record."""
    names = dict.fromkeys(device.name for device in record.machine.devices)
    return record.gpu.name if record.gpu else ", ".join(names) or "none"


def miscounted(question: Question, points: tuple[PointRecord, ...]) -> str | None:
    """Return how points are not on the published devices and nodes, whatever they are called, or None."""
    counts = {
        (one.devices or one.cards * question.terms.gpus[one.gpu].devices_per_card, one.nodes)
        for one in question.hardware
    }
    per_node = {devices / nodes for devices, nodes in counts}
    found = dict.fromkeys((point.devices, point.nodes) for point in points)
    lacking = {nodes for _, nodes in counts} - {nodes for _, nodes in found}
    as_published = not lacking and all(devices / nodes in per_node for devices, nodes in found)
    if as_published or not counts or not found:
        return None
    return f"{_counted(list(found))}, published {_counted(sorted(counts))}"


def _counted(counts: list[tuple[int, int]]) -> str:
    return " and ".join(
        f"{plural(devices, 'device')} on {plural(nodes, 'node')}" for devices, nodes in counts
    )
