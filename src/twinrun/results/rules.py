"""What a record must have before any claim is asked of it, and what casts a doubt on it.

A rule that fails is a refusal where physics, completeness or the plan is broken, else a doubt. No rule tells
a record that somebody invented whole: against that there are signatures, and a second signer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from twinrun.foundation.errors import InputError
from twinrun.machine.devices import MEMORY_RATIO
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.allocation import NodeDevice
from twinrun.results.bounds import excesses
from twinrun.results.judged import Judged
from twinrun.workloads.curve_distance import DATA, WEIGHTS, values_of
from twinrun.workloads.workload import Finding, held, shown

# The project's first day: no record is older.
FIRST_DAY = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
# Clocks of two machines.
CLOCKS = datetime.timedelta(days=1)
TORCH = "torch"
# Packages that a sentence names.
NAMED = 3
SECONDS = {"s": 1.0, "ms": 1e-3}


def refusals(found: Judged) -> Iterator[Finding]:
    """Yield what breaks completeness, the plan or physics."""
    yield from _dates(found)
    yield from _points(found)
    yield from _devices(found)
    yield from _stack(found)
    for point in found.points:
        own = found.workload.rules(found.recipe.tables, found.plan.part, point)
        yield from (dataclasses.replace(one, point=point.id) for one in own)
    yield from excesses(found)


def _dates(found: Judged) -> Iterator[Finding]:
    """Yield a time at which nothing can have run, and one that is too short for what was timed."""
    ended = datetime.datetime.fromisoformat(found.created)
    if not FIRST_DAY <= ended <= datetime.datetime.now(datetime.UTC) + CLOCKS:
        allowed = "one between the code's and now"
        yield Finding(kind="bounds", what="the date", found=found.created, allowed=allowed)
    with contextlib.suppress(ValueError):
        began = datetime.datetime.strptime(f"{found.run[:15]}+0000", "%Y%m%d-%H%M%S%z")
        every = (one for point in found.points for one in point.measurements)
        times = (one for one in every if one.metric in ("step-time", "time"))
        timed = sum(sum(one.samples) * SECONDS.get(one.unit, 0) for one in times)
        if timed > (elapsed := (ended - began).total_seconds()):
            allowed, took = f"at least the {timed:.0f} s that its steps and calls took", f"{elapsed:.0f} s"
            yield Finding(kind="bounds", what="the time of the run", found=took, allowed=allowed)


def _points(found: Judged) -> Iterator[Finding]:
    """Yield points that are not there once, not on their hosts, or not of one experiment."""
    planned, sent = [one.id for one in found.plan.points], [one.id for one in found.record.points]
    yield from held("the points", sent, planned)
    yield from held("names of points", [name for name, times in Counter(planned).items() if times > 1], [])
    for point in found.points:
        known = found.record.allocation.reports.keys()
        if len(set(point.sent.hosts)) != point.nodes or not set(point.sent.hosts) <= known:
            allowed = f"{point.nodes} of the nodes that reported"
            yield Finding(point=point.id, what="its hosts", found=point.sent.hosts, allowed=allowed)
        kind, _, number = point.id.rpartition("@")[2].partition("=")
        counts = {"devices": point.devices, "nodes": point.nodes, "cards": point.cards}
        if kind in counts:
            yield from held(f"the {kind} of {point.id}", str(counts[kind]), number)
    for name in (DATA, WEIGHTS):
        groups: dict[object, set[str]] = {}
        for point in found.points:
            # Other models, and weights that other kinds of hardware draw, have digests of their own.
            shape = getattr(point.part, "shape", None) if name == WEIGHTS else None
            group = (shape, point.result.device_name if name == WEIGHTS else None)
            groups.setdefault(group, set()).update(filter(None, [point.digests.get(name)]))
        if (most := max(map(len, groups.values()), default=0)) > 1:
            yield Finding(what=f"digests of the {name}", found=most, allowed="one at all points")
    times = Counter(one.samples for point in found.points if (one := point.measurement("step-time")))
    if repeated := [count for samples, count in times.items() if count > 1 and len(samples) > 1]:
        yield Finding(what="points with the same step times", found=repeated[0], allowed="none")
    legs = [(leg, point) for point in found.points if (leg := found.description.points[point.id].leg)]
    for (_, before), (leg, point) in pairwise(sorted(legs, key=lambda one: one[0].number)):
        curve, previous = values_of(point, "loss"), values_of(before, "loss")
        if curve[: leg.begin] != previous[: leg.begin]:
            what, allowed = f"its first {leg.begin} steps", f"the steps of {before.id}"
            yield Finding(point=point.id, what=what, found="others", allowed=allowed)


def _devices(found: Judged) -> Iterator[Finding]:
    """Yield devices that are not of the GPU that the plan names; what they are called is a hint alone."""
    gpu, plan = found.gpu, found.plan
    if plan.gpu is not None and gpu is None:
        yield Finding(what="the GPU of the plan", found=plan.gpu, allowed="a row of images/gpus.toml")
    if gpu is not None:
        yield from held("the vendor of the GPU", gpu.vendor, plan.vendor)
    for point in found.points:
        leg = found.description.points[point.id].leg
        if gpu is None or (leg and leg.processor):
            continue
        for host in point.sent.hosts:
            report = found.record.allocation.reports.get(host)
            devices = report.devices if report else ()
            if len(devices) < (least := point.planned.devices_per_node):
                what = f"the devices of {host}"
                yield Finding(point=point.id, what=what, found=len(devices), allowed=f"{least} or more")
            for device in devices:
                if other := _other(device, gpu):
                    yield Finding(point=point.id, what=f"a device of {host}", found=other, allowed=gpu.name)


def _other(device: NodeDevice, gpu: Gpu) -> str:
    """Return what a device is where it is none of a GPU's, empty where it is one."""
    low, high = (ratio * gpu.device_memory_bytes for ratio in MEMORY_RATIO)
    if device.arch is not None and device.arch != gpu.arch:
        return f"{device.name}, {device.arch}"
    if device.memory_bytes is not None and not low <= device.memory_bytes <= high:
        return f"{device.name} of {device.memory_bytes / 1e9:.3g} GB"
    if device.memory_bytes is not None:
        return ""
    return "" if device.arch or any(one.search(device.name) for one in gpu.match) else device.name


def _stack(found: Judged) -> Iterator[Finding]:
    """Yield a PyTorch of another release than that of the stack."""
    version, locked = _torch(found)
    if locked and _release(version) not in map(_release, locked):
        allowed = f"{shown(locked)}, which the stack {found.plan.stack} locks"
        yield Finding(what="PyTorch", found=version, allowed=allowed)


def _torch(found: Judged) -> tuple[str, tuple[str, ...]]:
    """Return the PyTorch that ran and those that the stack locks; none of a stack that is no more."""
    version, locked = found.record.libraries.get(TORCH, ""), tuple[str, ...]()
    with contextlib.suppress(InputError, OSError):
        locked = tuple(found.project.stack(found.plan.stack).locked(found.project.root).get(TORCH, ()))
    return version, locked if version else ()


def _release(version: str) -> list[str]:
    return version.partition("+")[0].split(".")[:2]


def doubts(found: Judged) -> Iterator[str]:
    """Yield in words what makes a record less than that of its commit and its lock."""
    revision, environment = found.record.revision, found.environment
    if revision.unknown:
        yield f"it is unknown whether the commit of the run had changes: {revision.unknown}"
    elif revision.commit is None:
        yield "the run has no commit"
    elif revision.changes_sha256 is not None:
        yield "the commit of the run had changes"
    if revision.changed:
        yield f"sources were edited while they ran: {shown(list(revision.changed)[:NAMED])}"
    if not found.plan.image.startswith(f"twinrun/{found.plan.stack}:"):
        yield f"own image: {found.plan.image} ran in place of the stack's"
    if other := environment.lock_differences:
        named, more = list(other.items())[:NAMED], len(other) - NAMED
        words = ", ".join(f"{name} {what}" for name, what in named)
        yield f"packages beside the lock: {words}{f' and {more} more' if more > 0 else ''}"
    if environment.changed_files:
        yield f"files of the environment were changed: {shown(list(environment.changed_files)[:NAMED])}"
    version, locked = _torch(found)
    # A lock of the package index names no build.
    number, _, build = version.partition("+")
    builds = {*locked, *(one.partition("+")[0] for one in locked if not build)}
    if locked and builds.isdisjoint((version, number)):
        yield f"PyTorch {version} is not the locked build, {shown(locked)}"
    if len({one.software_sha256 for one in found.record.allocation.reports.values()}) > 1:
        yield "the nodes have different software"
