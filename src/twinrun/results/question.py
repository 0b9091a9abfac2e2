"""A claim as a question to one record, or to several: as published, or as it is said anywhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from twinrun.foundation.text import plural
from twinrun.manifests.claims import Claim, PublishedHardware, RecordClaim
from twinrun.manifests.metrics import RATIO, Metric
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.restatements import Restatement
from twinrun.planning.project import Project
from twinrun.protocol.intervals import Interval, Limits, interval_of, quotient
from twinrun.protocol.measurements import Measurement, Per
from twinrun.results.judged import Judged, gpus_of
from twinrun.results.verdicts import NotAskedError
from twinrun.workloads.workload import MeasuredPoint

# A claim names a point by what it is: of a case, so many nodes, devices or cards.
PLACE = re.compile(r"(?:(?P<case>.+)@)?(?P<what>nodes|devices|cards)=(?P<count>\d+)")
BETWEEN: Literal["between records"] = "between records"
QuestionKind = Literal["absolute", "ratio", "invariant", "parity", "score", "between records"]
AnyClaim = Claim | RecordClaim


class Place(NamedTuple):
    """A point of a record, and for a claim between records the side and the setting that it stands for."""

    record: Judged
    point: MeasuredPoint
    side: int = 0
    """0 for what is over, 1 for what is under."""
    setting: str = ""


Located = tuple[Place, Measurement]


class Value(NamedTuple):
    """A value that records give, in the metric's canonical unit, and where it was found."""

    interval: Interval
    place: str
    behind: tuple[Located, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a claim asks of records: of one, or for a claim between records of several."""

    claim: AnyClaim
    records: tuple[Judged, ...]
    asked: AnyClaim | Restatement
    """Statement that is judged: the claim itself, or its restatement."""
    published: bool
    """Whether it is asked of the published run; else of any other."""

    @property
    def record(self) -> Judged:
        """The record that is asked, the first of several."""
        return self.records[0]

    @property
    def project(self) -> Project:
        """The project whose metrics and GPUs count."""
        return self.record.project

    @property
    def recipe(self) -> LoadedRecipe:
        """The recipe, with the published numbers."""
        return self.record.recipe

    @property
    def restated(self) -> Restatement | None:
        """The restatement, None where the claim itself is judged."""
        return self.asked if isinstance(self.asked, Restatement) else None

    @property
    def kind(self) -> QuestionKind:
        """The row of `twinrun.results.kinds.KINDS` that finds and compares the numbers."""
        if isinstance(self.claim, RecordClaim):
            return BETWEEN
        if self.restated is None or self.claim.kind == "score":
            return self.claim.kind
        if self.metric.between_points:
            return "ratio"
        return "parity" if self.metric.between_curves else "absolute"

    @property
    def metric(self) -> Metric:
        """The metric of the statement that is judged."""
        return self.project.metrics[self.asked.metric]

    @property
    def hardware(self) -> tuple[PublishedHardware, ...]:
        """Hardware of the claim, else of all claims; none of a score, which belongs to weights."""
        if isinstance(self.claim, RecordClaim) or self.claim.kind == "score":
            return ()
        every = (self.claim,) if self.claim.hardware else self.recipe.published.claim
        return tuple(one.hardware for one in every if one.hardware)

    @property
    def of_curves(self) -> bool:
        """Whether the claim is about a metric that has a value at each step."""
        return self.project.metrics[self.claim.metric].series is not None

    @property
    def unit(self) -> str:
        """Unit in which the values are shown."""
        if self.kind == BETWEEN:
            return RATIO
        if self.restated is None:
            return self.claim.unit
        return "%" if "%" in self.metric.units else self.metric.unit

    @property
    def is_ratio(self) -> bool:
        """Whether the value is a plain ratio, which no unit of the metric converts."""
        return self.kind == BETWEEN or (self.restated is None and self.claim.kind == "ratio")

    @property
    def reference(self) -> float:
        """The published or derived value, in the metric's canonical unit."""
        unit = self.restated.unit or self.metric.unit if self.restated else self.claim.unit
        return self.asked.value if self.is_ratio else self.metric.canonical(self.asked.value, unit)

    @property
    def better(self) -> Literal["higher", "lower", "equal"]:
        """Direction of goodness."""
        if self.kind == BETWEEN:
            return self.metric.better
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
    def least_devices(self) -> int:
        """Points of fewer devices are left out."""
        return self.restated.least_devices if self.restated else 1

    @property
    def own(self) -> list[tuple[Place, ...]]:
        """Points of the run for each that the claim names, in its order; none for one that did not run."""
        return [tuple(points_called(name, self.record, self.claim.hardware)) for name in self.named]

    @property
    def by_size(self) -> bool:
        """Whether the claim names its points by their size alone, so that other sizes can stand for them."""
        found = [PLACE.fullmatch(name) for name in self.named]
        return all(one and one["case"] is None for one in found)

    def found_of(self, asked: AnyClaim | Restatement, point: MeasuredPoint) -> Measurement | None:
        """Return the measurement of a point that a claim, or its restatement, is about."""
        found = [one for one in point.measurements if one.metric == asked.metric]
        if asked.measurement:
            return next((one for one in found if one.id == asked.measurement), None)
        wanted = asked.formula or self.claim.formula
        return next((one for one in found if one.formula == wanted), found[0] if found else None)

    def located(self, asked: AnyClaim | Restatement, place: Place, *, per: Per | None) -> Located:
        """Return the measurement of a place that can be judged; raises NotAskedError.

        Args:
            per: what the claim counts; None where it takes the numbers as they are measured.
        """
        one, where = self.found_of(asked, place.point), f"at {place.point.id}"
        if len(self.records) > 1:
            where += f" of {place.record.run}"
        if one is None:
            raise NotAskedError(f"no {asked.measurement or asked.metric} {where}")
        metric = self.project.metrics[one.metric]
        sums = ("card", "node", "run") if metric.additive else ("card",)
        if per and one.per != per and not (one.per == "device" and per in sums):
            raise NotAskedError(f"{where} {one.id} is measured per {one.per}, the claim is per {per}")
        if not math.isfinite(one.median) or one.median < 0 or (metric.repeated and not one.median):
            raise NotAskedError(f"{where} {one.id} is {one.median:g}, no number to judge")
        return place, one

    def in_unit(self, value: float) -> float:
        """Return a canonical value in the unit that is shown."""
        return value if self.is_ratio else self.metric.in_unit(value, self.unit)


def counted(place: Place, found: Measurement, metric: Metric, *, per: Per) -> Interval:
    """Return a measurement in its metric's unit, summed over the devices of what `per` names."""
    one = interval_of(found).times(metric.canonical(1.0, found.unit))
    if not metric.additive or found.per != "device":
        return one
    point, gpu = place.point, place.record.gpu
    cards = gpu.devices_per_card if gpu else 1
    counts = {"card": cards, "node": point.devices / point.nodes, "run": point.devices}
    return one.times(counts.get(per, 1))


def kept_per_doubling(smaller: Located, larger: Located) -> Interval:
    """Return what a device keeps of its throughput whenever the devices double."""
    (few, under), (many, over) = smaller, larger
    power = 1 / math.log2(many.point.devices / few.point.devices)
    return quotient(interval_of(over), interval_of(under), power=power)


def points_called(name: str, record: Judged, hardware: PublishedHardware | None) -> Iterator[Place]:
    """Yield the points of a run that are what a claim calls `name`, whatever they are called.

    `nodes=2` is every point on two nodes of the published size, `devices=4` one of four devices, `cards=4`
    one of as many cards, and `CASE@nodes=2` one of that case; any other name is that of the point. A leg of
    a run is no point of its size, and the point that has the name goes before others of the size.
    """
    asked = PLACE.fullmatch(name)
    exact = [Place(record, point) for point in record.points if point.id == name]
    if asked is None or exact:
        yield from exact
        return
    described, cards = record.description.points, record.gpu.devices_per_card if record.gpu else 1
    for point in record.points:
        sizes = {"nodes": point.nodes, "devices": point.devices, "cards": point.devices / cards}
        of_case = point.id.rpartition("@")[0] == (asked["case"] or "")
        if not of_case or sizes[asked["what"]] != int(asked["count"]) or described[point.id].leg:
            continue
        if asked["what"] != "nodes" or hardware is None or _fills_nodes(point, cards, hardware, record):
            yield Place(record, point)


def _fills_nodes(point: MeasuredPoint, cards: int, hardware: PublishedHardware, record: Judged) -> bool:
    """Say whether a point has as many devices, or cards, on each node as the publication."""
    devices = hardware.devices or hardware.cards * record.project.gpus[hardware.gpu].devices_per_card
    per_node = point.devices / point.nodes
    return per_node == devices / hardware.nodes or per_node / cards == hardware.cards / hardware.nodes


def names_of(places: Sequence[Place | MeasuredPoint]) -> str:
    """Name points."""
    points = (one.point if isinstance(one, Place) else one for one in places)
    return ", ".join(point.id for point in points) or "none"


def elsewhere(question: Question, places: Sequence[Place]) -> Iterator[str]:
    """Yield how the hardware, or the number of devices and nodes, is not the published one."""
    gpus, known = {one.gpu for one in question.hardware}, question.project.gpus
    if not gpus:
        return
    if question.record.gpu is None or question.record.gpu.id not in gpus:
        names = " or ".join(sorted(known[name].name for name in gpus))
        yield f"GPU {gpus_of(question.record)}, published {names}"
    elif other := _miscounted(question, places):
        yield other


def _miscounted(question: Question, places: Sequence[Place]) -> str:
    """Return how points are not on the published devices and nodes, whatever they are called."""
    hardware, gpus = question.hardware, question.project.gpus
    counts = {(one.devices or one.cards * gpus[one.gpu].devices_per_card, one.nodes) for one in hardware}
    per_node = {devices / nodes for devices, nodes in counts}
    found = dict.fromkeys((one.point.devices, one.point.nodes) for one in places)
    lacking = {nodes for _, nodes in counts} - {nodes for _, nodes in found}
    as_published = not lacking and all(devices / nodes in per_node for devices, nodes in found)
    if as_published or not found:
        return ""
    shown = (
        " and ".join(f"{plural(devices, 'device')} on {plural(nodes, 'node')}" for devices, nodes in some)
        for some in (found, sorted(counts))
    )
    return ", published ".join(shown)
