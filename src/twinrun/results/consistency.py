"""What the parts of a record say of each other: plan and points, GPU and machine, numbers and metrics."""

from __future__ import annotations

from collections.abc import Mapping

from twinrun.foundation.errors import InputError
from twinrun.manifests.metrics import Metric
from twinrun.manifests.published import PublishedClaims
from twinrun.manifests.recipe import SCALES
from twinrun.planning.project import Project
from twinrun.protocol.measurements import Measurement, Series
from twinrun.results.record import Record
from twinrun.workloads.fingerprint import differences
from twinrun.workloads.workload import Point, PointRecord


def demand_same(what: str, computed: object, recorded: object, place: str) -> None:
    """Raise InputError with both sides where a record does not say what follows from its other parts."""
    if computed != recorded:
        raise InputError(
            f"the record contradicts itself: {what}",
            place=place,
            found=f"recorded {recorded}",
            allowed=f"computed {computed}",
            hint="a record is never edited; run the recipe again",
        )


def check_machine(record: Record, project: Project, place: str) -> None:
    """Hold the GPU of a record against its plan, its machine and images/gpus.toml."""
    named = record.gpu.id if record.gpu else None
    demand_same("the GPU of the plan", named, record.plan.gpu, place)
    demand_same("the vendor of the machine", record.plan.vendor, record.machine.vendor, place)
    probed = {device.gpu for device in record.machine.devices if device.gpu}
    if probed:
        demand_same("the GPU that was probed", ", ".join(sorted(probed)), named, place)
    if record.gpu is None:
        return
    row = project.gpus.get(record.gpu.id)
    if row is None:
        raise InputError("no such GPU in images/gpus.toml", place=f"{place}:gpu.id", found=record.gpu.id)
    demand_same("the vendor of the GPU", row.vendor, record.plan.vendor, place)
    for field in ("name", "arch", "devices_per_card", "memory_gb", "bandwidth_gb_s", "peak_bf16_tflops"):
        demand_same(
            f"{field} of {row.id} in images/gpus.toml", getattr(row, field), getattr(record.gpu, field), place
        )
    for device in record.machine.devices:
        if device.arch:
            demand_same(f"the architecture of device {device.index}", row.arch, device.arch, place)


def check_points(record: Record, metrics: Mapping[str, Metric], place: str) -> None:
    """Hold each point against the one that was planned, its numbers against their metrics."""
    if record.plan.scale not in SCALES:
        demand_same("its scale", " or ".join(SCALES), record.plan.scale, place)
    planned = {point.id: point for point in record.plan.points}
    for point in record.points:
        where = f"{place}:points.{point.id}"
        if point.id not in planned:
            raise InputError("the plan has no such point", place=where, found=point.id, allowed=list(planned))
        _check_planned(record, planned[point.id], point, where)
        numbers: tuple[Measurement | Series, ...] = (*point.measurements, *point.series)
        for number in numbers:
            _check_metric(number, metrics, where)


def _check_planned(record: Record, planned: Point, point: PointRecord, where: str) -> None:
    demand_same("nodes of the plan", planned.nodes, point.nodes, where)
    demand_same("devices of the plan", planned.world_size, point.devices, where)
    demand_same("what the plan says of the point", planned.part, point.part, where)
    for fact, allowed in record.workload.expected(record.plan.part, point).items():
        if point.facts.get(fact) not in allowed:
            demand_same(fact, " or ".join(map(str, allowed)), point.facts.get(fact), where)
    if record.allocation:
        strange = sorted(set(point.hosts) - set(record.allocation.nodes))
        demand_same("hosts that the allocation lacks", [], strange, where)


def _check_metric(number: Measurement | Series, metrics: Mapping[str, Metric], where: str) -> None:
    """Refuse a number in another unit, or per something else, than its metric has."""
    metric = metrics.get(number.metric)
    if metric is None:
        raise InputError(
            "no such metric", place=f"{where}.{number.id}", found=number.metric, allowed=list(metrics)
        )
    # Bytes and operations are counted alike: a unit of the same size is as good as the canonical one.
    same_size = [metric.unit, *(unit for unit, factor in metric.units.items() if factor == 1)]
    if number.unit not in same_size:
        demand_same(f"unit of {number.id}", " or ".join(same_size), number.unit, where)
    if number.per not in metric.per:
        demand_same(f"what {number.id} is counted per", " or ".join(metric.per), number.per, where)


def with_fingerprint(record: Record, published: PublishedClaims, place: str, *, known: bool) -> Record:
    """Return the record with the fingerprint of its plan, held against the publication as it stands.

    Args:
        known: the publication is the one that the record was judged by.
    """
    plan, accepted = record.plan, published.fingerprint
    found = record.workload.fingerprint(plan.part, plan.points, accepted)
    for field, value in plan.fingerprint.items():
        if field in found:
            demand_same(f"{field} of the fingerprint", found[field], value, place)
    apart = differences(found, accepted)
    if known:
        recorded = {one.field: one.found for one in plan.differences}
        demand_same(
            "where the run is not as published", {one.field: one.found for one in apart}, recorded, place
        )
    changed = plan.model_copy(update={"fingerprint": found, "differences": apart})
    return record.model_copy(update={"plan": changed})
