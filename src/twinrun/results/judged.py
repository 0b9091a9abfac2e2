"""A record with all that is computed of it: the only thing that pages, exports and comparisons get."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from twinrun.foundation.signatures import UNSIGNED
from twinrun.foundation.text import plural
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.planning.configuration import differences_of_plan
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.predict.calibration import Run
from twinrun.protocol.allocation import NodeDevice, NodeReport
from twinrun.results.record import SENT_IN, Environment, Record
from twinrun.results.verdicts import Verdict
from twinrun.workloads import load_workload
from twinrun.workloads.settings import Difference, Fingerprint
from twinrun.workloads.workload import (
    ComparisonTerms,
    Finding,
    MeasuredPoint,
    PlanDescription,
    PointRecord,
    RecordView,
    Workload,
    whole,
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A record, its numbers, what stands against them, and the verdicts on the claims of its recipe."""

    record: Record
    project: Project = dataclasses.field(compare=False, repr=False)
    recipe: LoadedRecipe
    workload: Workload
    gpu: Gpu | None
    """Row of images/gpus.toml that the plan names; None on a processor, and for a GPU that has no row."""
    points: tuple[MeasuredPoint, ...]
    """In the order of the plan."""
    refusals: tuple[Finding, ...] = ()
    """What breaks physics, completeness or the plan: no claim that it concerns has a verdict."""
    doubts: tuple[str, ...] = ()
    """What stands beside every verdict in words, and takes `reproduced` away."""
    verdicts: tuple[Verdict, ...] = ()
    """On the claims about one record, in the published order."""
    signer: str = UNSIGNED
    """Who signed the digest of the file, in words."""

    @property
    def plan(self) -> Plan:
        """What was planned."""
        return self.record.plan

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.record.run

    @property
    def created(self) -> str:
        """When the run ended, UTC, ISO 8601."""
        return self.record.created

    @property
    def environment(self) -> Environment:
        """The software as found."""
        return self.record.environment

    @property
    def description(self) -> PlanDescription:
        """What follows from the plan."""
        return self.record.plan.description

    @property
    def node(self) -> NodeReport:
        """What the first node is; empty where no rank has said it."""
        allocation = self.record.allocation
        return allocation.reports.get(allocation.nodes[0], NodeReport())

    @property
    def devices(self) -> tuple[NodeDevice, ...]:
        """Devices of the first node, as its ranks see them."""
        return self.node.devices

    @cached_property
    def whole(self) -> tuple[MeasuredPoint, ...]:
        """The points whose curve reaches to the end of the run, undisturbed ones first."""
        return whole(self.points, lambda one: self.description.points[one.id].leg)

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Where the run is not the published configuration."""
        return differences_of_plan(self.recipe, self.plan)

    @cached_property
    def known(self) -> dict[object, dict[str, Difference]]:
        """What claims have found out of its configuration, for the next that asks it."""
        return {}

    def runs(self, gpu: Gpu, network: float | None = None) -> tuple[Run, ...]:
        """Return its trainings on `gpu`; without bytes a second of a node, those of one node."""
        points = self.points if self.gpu and self.gpu.id == gpu.id else ()
        return tuple(run for one in points if (run := self.terms(one).timed(gpu, network)))

    def terms(self, point: MeasuredPoint) -> ComparisonTerms:
        """Return what a point is compared by."""
        return self.workload.terms(self.plan.part, point)

    def settings(self, point: MeasuredPoint) -> Fingerprint:
        """Return every setting that decides what a point measures."""
        return self.workload.settings.of(self.plan.part, point.planned)

    def point(self, name: str) -> MeasuredPoint | None:
        """Return the point called `name`, if the run has it."""
        return next((point for point in self.points if point.id == name), None)

    @cached_property
    def view(self) -> RecordView:
        """The record as its workload shows it."""
        return RecordView(
            label=hardware(self),
            run=self.run,
            made=f"{self.created[:10]}, {self.plan.stack}",
            part=self.plan.part,
            gpu=self.gpu,
            points=self.points,
        )


def measured_points(plan: Plan, sent: tuple[PointRecord, ...], gpu: Gpu | None) -> tuple[MeasuredPoint, ...]:
    """Return the points that came back, in the order of the plan, each with its numbers; pure."""
    workload, described = load_workload(plan.workload), plan.description.points
    by_id, found = {one.id: one for one in sent}, []
    for planned in (one for one in plan.points if one.id in by_id):
        leg, one = described[planned.id].leg, by_id[planned.id]
        on = None if leg and leg.processor else gpu
        numbers = workload.numbers(plan.part, planned, one.result, on)
        cards, rest = divmod(planned.world_size, on.devices_per_card) if on else (0, 1)
        found.append(MeasuredPoint(planned=planned, sent=one, cards=None if rest else cards, **vars(numbers)))
    return tuple(found)


def hardware(found: Judged) -> str:
    """Name what the largest point ran on, and that only its sender says so where that is so."""
    most, gpu, sent = most_devices(found), found.gpu, found.record.evidence == SENT_IN
    name = f"{plural(most, 'rank')} on {found.node.cpu}"
    if gpu is not None and gpu.devices_per_card > 1:
        name = f"{plural(most, 'device')} of {gpu.name}, {gpu.devices_per_card} to a card"
    elif gpu is not None or found.devices:
        name = f"{most} x {gpu.name if gpu else found.devices[0].name}"
    return f"{name}, {SENT_IN}" if sent else name


def most_devices(found: Judged) -> int:
    """Return the devices of the largest point, 0 where there is none."""
    return max((point.devices for point in found.points), default=0)


def gpus_of(found: Judged) -> str:
    """Name the GPUs of a record."""
    names = dict.fromkeys(device.name for device in found.devices)
    return found.gpu.name if found.gpu else ", ".join(names) or "none"


def file_name(found: Judged) -> str:
    """Return the name under which a record is committed."""
    model = found.gpu.id if found.gpu else found.plan.vendor
    return f"{model}x{most_devices(found)}_{found.plan.stack}_{found.created[:10]}.json"
