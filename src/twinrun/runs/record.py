"""The record of a run: its plan, its points, where they ran, and the verdicts."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from twinrun import __version__
from twinrun.execution.environment import revision
from twinrun.execution.ranks import METRICS
from twinrun.foundation.files import sha256_of_file
from twinrun.machine.devices import Device
from twinrun.machine.inventory import Machine
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Allocation
from twinrun.results.judge import claims_digest, judge
from twinrun.results.record import Environment, Record
from twinrun.runs.selection import Selection
from twinrun.runs.sweep import PointOutcome


def record_of(
    project: Project, selection: Selection, run: Path, done: Sequence[PointOutcome], environment: Environment
) -> Record:
    """Return the judged record of the finished points of a run."""
    plan, published = selection.plan, selection.recipe.published
    allocation = _allocation([one.allocation for one in done])
    files = {name: sha256_of_file(run / name) for name in ("plan.json", METRICS) if (run / name).exists()}
    record = Record(
        twinrun=__version__,
        run=run.name,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        plan=plan,
        plan_sha256=plan.sha256(),
        claims_sha256=claims_digest(published),
        revision=revision(project.root),
        machine=_first_node(selection, allocation),
        allocation=allocation,
        gpu=selection.gpu,
        environment=environment,
        points=tuple(one.point for one in done),
        verdicts=(),
        files=files,
    )
    return record.model_copy(update={"verdicts": judge(record, published, project)})


def _allocation(allocations: Sequence[Allocation]) -> Allocation:
    """Return all nodes of a run's points as one allocation."""
    nodes = dict.fromkeys(node for one in allocations for node in one.nodes)
    reports = {host: report for one in allocations for host, report in one.reports.items()}
    return allocations[-1].model_copy(update={"nodes": tuple(nodes), "reports": reports})


def _first_node(selection: Selection, allocation: Allocation) -> Machine:
    """Return the first node of an allocation; the host that submits may be of another kind."""
    machine, report = selection.machine, allocation.reports.get(allocation.nodes[0])
    if selection.site is None or report is None:
        return machine
    vendor, gpu = selection.vendor, selection.gpu
    devices = tuple(
        Device(
            index=index,
            name=name,
            gpu=gpu.id if gpu else None,
            arch=gpu.arch if gpu else None,
            memory_bytes=None,
            unique_id=None,
            driver=report.driver,
        )
        for index, name in enumerate(report.devices)
    )
    return Machine(
        vendor=vendor.name,
        devices=devices,
        driver=report.driver if devices else None,
        host=allocation.nodes[0],
        cpu=report.cpu,
        cpu_count=report.cores,
        memory_bytes=report.memory_bytes,
        kernel=report.kernel,
        probe=f"asked on the node by its first rank, at the site {selection.site.name}",
    )
