"""The hardware that a record names, held against the hosts and devices that its ranks reported."""

from __future__ import annotations

from collections.abc import Iterator

from twinrun.machine.devices import MEMORY_RATIO
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation
from twinrun.results.evidence import DEVICE
from twinrun.results.record import SENT_IN, Record
from twinrun.workloads.account import HASH, NOT_COLLECTED, held, shown
from twinrun.workloads.workload import Gap, PointRecord


def hardware_held(record: Record, project: Project) -> Iterator[Gap]:
    """Yield where hosts, devices and their names are not those of the plan and its GPU."""
    allocation = record.allocation
    if allocation is None:
        yield Gap(path="allocation", found="absent", allowed="the hosts that ran", hint=NOT_COLLECTED)
        return
    yield from held("allocation.scheduler", allocation.scheduler, record.plan.scheduler)
    yield from _hosts(record, allocation)
    yield from _first(record, allocation)
    gpu = project.gpus.get(record.plan.gpu) if record.plan.gpu else None
    if record.gpu is not None:
        yield from held("gpu.vendor", record.gpu.vendor, record.plan.vendor)
    hashes = {one.software_sha256 for one in allocation.reports.values()}
    if len(hashes) > 1 or not all(map(HASH.fullmatch, hashes)):
        yield Gap(
            path="allocation.reports", found=shown(sorted(hashes)), allowed="one software on every node"
        )
    yield from _devices(record, gpu)
    for point in record.points:
        yield from _names(record, allocation, point, gpu)


def _hosts(record: Record, allocation: Allocation) -> Iterator[Gap]:
    """Yield hosts that are named twice, asked by nobody, or fewer than the nodes of a point."""
    nodes = allocation.nodes
    if len(set(nodes)) < len(nodes):
        yield Gap(path="allocation.nodes", found=shown(nodes), allowed="each host once")
    yield from held("allocation.reports", sorted(allocation.reports), sorted(set(nodes)), NOT_COLLECTED)
    most = max((point.nodes for point in record.points), default=1)
    if len(nodes) < most:
        yield Gap(path="allocation.nodes", found=shown(nodes), allowed=f"at least {most}")
    for point in record.points:
        path = f"points.{point.id}.hosts"
        if len(point.hosts) != point.nodes or len(set(point.hosts)) < point.nodes:
            yield Gap(
                point=point.id, path=path, found=shown(point.hosts), allowed=f"{point.nodes}, each once"
            )
        for host in point.hosts:
            if host not in nodes:
                yield Gap(point=point.id, path=path, found=host, allowed=shown(nodes))
    for name, report in allocation.reports.items():
        path = f"allocation.reports.{name}"
        for key in ("cores", "memory_bytes"):
            if getattr(report, key) <= 0:
                yield Gap(path=f"{path}.{key}", found=str(getattr(report, key)), allowed="more than 0")
        names = [one.name for one in report.interfaces]
        if len(set(names)) < len(names):
            yield Gap(path=f"{path}.interfaces", found=shown(names), allowed="each once")
    kinds = {tuple(sorted(set(one.devices))) for one in allocation.reports.values()}
    if len(kinds) > 1:
        yield Gap(path="allocation.reports", found=f"{len(kinds)} kinds of nodes", allowed="one")


def _first(record: Record, allocation: Allocation) -> Iterator[Gap]:
    """Yield where the machine of a record is not the first node of its allocation."""
    machine, report = record.machine, allocation.reports.get(record.machine.host)
    if machine.host not in allocation.nodes:
        yield Gap(path="machine.host", found=machine.host, allowed=shown(allocation.nodes))
    if report is None:
        return
    for name, of_report in (
        ("cpu", "cpu"),
        ("cpu_count", "cores"),
        ("memory_bytes", "memory_bytes"),
        ("kernel", "kernel"),
        ("driver", "driver"),
    ):
        yield from held(f"machine.{name}", getattr(machine, name), getattr(report, of_report))
    if machine.devices:
        driver = {one.driver for one in machine.devices}
        yield from held("machine.devices", sorted(map(str, driver)), [str(machine.driver)])
    yield from held("machine.devices", len(machine.devices), len(report.devices))


def _devices(record: Record, gpu: Gpu | None) -> Iterator[Gap]:
    """Yield devices that are absent, there twice, or no such GPU."""
    devices = record.machine.devices
    per_node = max((point.devices // point.nodes for point in record.points), default=0)
    if record.plan.gpu is None:
        return
    if len(devices) < per_node:
        yield Gap(path="machine.devices", found=str(len(devices)), allowed=f"at least {per_node}")
    for name in ("index", "unique_id"):
        values = [getattr(one, name) for one in devices]
        hidden = name == "unique_id" and record.evidence == SENT_IN and set(values) == {None}
        if not hidden and (None in values or "" in values or len(set(values)) < len(values)):
            yield Gap(path=f"machine.devices.{name}", found=shown(values), allowed="one for each device")
    for number, one in enumerate(devices):
        path = f"machine.devices.{number}"
        yield from held(f"{path}.gpu", one.gpu, record.plan.gpu)
        if gpu is None:
            continue
        yield from held(f"{path}.arch", one.arch, gpu.arch, NOT_COLLECTED)
        if one.index < 0:
            yield Gap(path=f"{path}.index", found=str(one.index), allowed="0 or more")
        if not any(pattern.search(one.name) for pattern in gpu.match):
            yield Gap(path=f"{path}.name", found=one.name, allowed=f"a name of {gpu.name}")
        low, high = (ratio * gpu.device_memory_bytes for ratio in MEMORY_RATIO)
        if one.memory_bytes is None or not low <= one.memory_bytes <= high:
            allowed = f"from {low:.4g} to {high:.4g} bytes, as {gpu.name} has"
            yield Gap(path=f"{path}.memory_bytes", found=shown(one.memory_bytes), allowed=allowed)


def _names(record: Record, allocation: Allocation, point: PointRecord, gpu: Gpu | None) -> Iterator[Gap]:
    """Yield where what the ranks of a point saw is not the hardware that they ran on."""
    path, name = f"points.{point.id}.facts.{DEVICE}", str(point.facts.get(DEVICE))
    leg = record.description.points[point.id].leg
    reports = [allocation.reports[host] for host in point.hosts if host in allocation.reports]
    if not reports:
        return
    if (record.plan.gpu is None and not record.machine.devices) or (leg and leg.processor):
        names = sorted({one.cpu for one in reports})
        if name not in names:
            yield Gap(point=point.id, path=path, found=name, allowed=shown(names))
        return
    for host, report in ((host, allocation.reports.get(host)) for host in point.hosts):
        if report is not None and len(report.devices) < point.devices // point.nodes:
            yield Gap(
                point=point.id,
                path=f"allocation.reports.{host}.devices",
                found=str(len(report.devices)),
                allowed=f"at least {point.devices // point.nodes}",
            )
    seen = sorted({one for report in reports for one in report.devices})
    probed = {one.name for one in record.machine.devices}
    for one in {name, *seen}:
        known = gpu is None or one in probed or any(pattern.search(one) for pattern in gpu.match)
        if not known or one not in seen:
            where = path if one == name else f"allocation.reports.{point.hosts[0]}.devices"
            yield Gap(
                point=point.id, path=where, found=one, allowed=f"a name of {gpu.name if gpu else shown(seen)}"
            )
