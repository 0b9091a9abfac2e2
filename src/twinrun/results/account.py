"""The account of a record: everything that was planned is there once, on the hardware that it names.

A record with a gap is read all the same; it carries no verdict.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from packaging.specifiers import SpecifierSet

from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.protocol.formulas import FORMULAS
from twinrun.results.bounds import excesses
from twinrun.results.correctness import faults
from twinrun.results.evidence import DEVICE
from twinrun.results.hardware import hardware_held
from twinrun.results.record import Record
from twinrun.workloads.account import HASH, at_point, held, shown
from twinrun.workloads.curve_distance import values_of
from twinrun.workloads.workload import Gap, PointRecord

__all__ = ["Gap", "gaps", "objections"]

COMMIT = re.compile("[0-9a-f]{40}")
VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]*")
IMAGE = re.compile("[0-9a-f]{12}")
RUN = re.compile(r"(?P<began>[0-9]{8}-[0-9]{6})-(?P<plan>[0-9a-f]{8})-[0-9a-f]{4}")
FILES = ("plan.json", "metrics.jsonl")
TORCH = "torch"
DATA, WEIGHTS = "data hash", "initial weights hash"
# Seconds in the units that metrics of time have.
SECONDS = {"s": 1.0, "ms": 1e-3}


def gaps(record: Record, project: Project) -> tuple[Gap, ...]:
    """Return what a record lacks, has twice, or says otherwise than it follows from its plan."""
    return (
        *_origin(record),
        *_recipe(record, project),
        *_software(record, project),
        *hardware_held(record, project),
        *_points(record),
        *_of_points(record),
        *_times(record),
        *_joined(record),
    )


def objections(record: Record, project: Project) -> tuple[Gap, ...]:
    """Return all that stands against a verdict on any claim: gaps, wrong results, impossible numbers."""
    return (*gaps(record, project), *faults(record, project), *excesses(record, project))


def _origin(record: Record) -> Iterator[Gap]:
    """Yield where a record does not say which run it is of."""
    if record.converted_from is not None:
        yield Gap(
            path="converted_from",
            found=f"a record of version {record.converted_from.schema_version}",
            allowed="the form in which its run wrote it",
            hint="what version 1 did not collect cannot be added; run the recipe again",
        )
    named = RUN.fullmatch(record.run)
    if named is None:
        yield Gap(path="run", found=record.run, allowed="DATE-TIME-PLAN-NUMBER")
    elif record.converted_from is None:
        yield from held("run", named["plan"], record.plan_sha256[:8], "a run is named after its plan")
    revision = record.revision
    if revision.commit is not None and not COMMIT.fullmatch(revision.commit):
        yield Gap(path="revision.commit", found=revision.commit, allowed="a commit")
    if revision.changes_sha256 is not None and not HASH.fullmatch(revision.changes_sha256):
        yield Gap(path="revision.changes_sha256", found=revision.changes_sha256, allowed="a SHA-256")
    for name in FILES:
        if not HASH.fullmatch(record.files.get(name, "")):
            yield Gap(path=f"files.{name}", found=record.files.get(name, "absent"), allowed="its SHA-256")
    for name, digest in record.files.items():
        if name not in FILES and not HASH.fullmatch(digest):
            yield Gap(path=f"files.{name}", found=digest, allowed="its SHA-256")


def _recipe(record: Record, project: Project) -> Iterator[Gap]:
    """Yield where the plan is not one of its recipe."""
    plan, loaded = record.plan, project.recipe(record.plan.recipe)
    workload, own = record.workload, loaded.recipe.script
    yield from held("plan.script", plan.script, loaded.file(own) if own else workload.module)
    version = loaded.recipe.version
    if not 1 <= plan.recipe_version <= version:
        yield Gap(path="plan.recipe_version", found=str(plan.recipe_version), allowed=f"1 to {version}")
    yield from workload.account.of_recipe(loaded.tables, plan.part, plan.points)
    for name in ("engine", "launcher", "scheduler"):
        if not getattr(plan, name):
            yield Gap(path=f"plan.{name}", found="empty", allowed="the name of one")
    stacks = loaded.recipe.stacks
    known = sorted({*stacks.current.values(), *stacks.also, *stacks.published})
    if plan.stack not in known:
        yield Gap(path="plan.stack", found=plan.stack, allowed=" or ".join(known))
        return
    stack = project.stack(plan.stack).stack
    yield from held("plan.vendor", plan.vendor, stack.vendor)
    image, _, digest = plan.image.rpartition(":")
    if stack.image and (image != stack.image or not IMAGE.fullmatch(digest)):
        yield Gap(path="plan.image", found=plan.image, allowed=f"{stack.image}:DIGEST")
    if not _within(record.environment.python, stack.python):
        yield Gap(path="environment.python", found=shown(record.environment.python), allowed=stack.python)
    if not HASH.fullmatch(plan.lock_sha256):
        yield Gap(path="plan.lock_sha256", found=plan.lock_sha256, allowed="the SHA-256 of a lock")


def _software(record: Record, project: Project) -> Iterator[Gap]:
    """Yield where what was imported is not what the stack is named after, or contradicts its lock."""
    found = record.environment
    if found.changed_files:
        yield Gap(
            path="environment.changed_files",
            found=shown(sorted(found.changed_files)),
            allowed="none: files of the environment were changed",
        )
    yield from held("environment.python", found.python, found.libraries.get("python"))
    for name, words in found.lock_differences.items():
        version = found.libraries.get(name)
        if version and words.partition(",")[0] != version.partition("+")[0]:
            path = f"environment.lock_differences.{name}"
            yield Gap(path=path, found=words, allowed=f"{version}, which was imported")
    pinned = _locked(record.plan.stack, project)
    version = found.libraries.get(TORCH, "")
    current = project.recipe(record.plan.recipe).recipe.stacks.current.values()
    builds, own = (
        {_build(one) for one in versions}
        for versions in ([one for name in current for one in _locked(name, project)], pinned)
    )
    # A lock of the package index names no build; one of a framework's own index does.
    other = _build(version) not in own if "" not in own else _build(version) in builds - own
    released = any(_release(version) == _release(one) for one in pinned)
    if not VERSION.fullmatch(version) or not released or other:
        yield Gap(
            path=f"environment.libraries.{TORCH}",
            found=version or "absent",
            allowed=f"{shown(pinned)}, which the stack {record.plan.stack} locks",
            hint="run it in the stack that has this PyTorch",
        )


def _within(version: str, allowed: str) -> bool:
    """Say whether a version is one of those that a stack has; what is no version is none of them."""
    return re.fullmatch(r"[0-9]+(\.[0-9]+)*", version) is not None and version in SpecifierSet(allowed)


@cache
def _locked(stack: str, project: Project) -> tuple[str, ...]:
    """Return the versions of PyTorch that a stack locks; none of a stack that is no more."""
    try:
        return project.stack(stack).locked(project.root).get(TORCH, ())
    except (InputError, OSError):
        return ()


def _build(version: str) -> str:
    """Return what a version is built for: the letters after its plus sign."""
    return version.partition("+")[2].rstrip("0123456789.")


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.partition("+")[0].split(".")[:2])


def _points(record: Record) -> Iterator[Gap]:
    """Yield planned points that were not measured, and names that say another placement."""
    measured = {point.id for point in record.points}
    for planned in record.plan.points:
        if planned.id not in measured:
            yield Gap(
                point=planned.id,
                path=f"points.{planned.id}",
                found="absent",
                allowed="measured",
                hint="a point that failed says nothing; run it again",
            )
        per_card = record.gpu.devices_per_card if record.gpu else 1
        counts = {
            "devices": planned.world_size,
            "nodes": planned.nodes,
            "cards": planned.world_size / per_card,
        }
        kind, _, number = planned.id.rpartition("@")[2].partition("=")
        if kind in counts:
            yield from held(f"plan.points.{planned.id}.id", number, f"{counts[kind]:g}")
        if leg := record.description.points[planned.id].leg:
            name = "leg=last" if leg.last else f"leg={leg.number}"
            yield from held(f"plan.points.{planned.id}.id", planned.id, name)
    placed = Counter((one.nodes, one.world_size, one.part.model_dump_json()) for one in record.plan.points)
    for (nodes, devices, _), count in placed.items():
        if count > 1:
            found = f"{count} points of {devices} devices on {nodes} nodes that do the same"
            yield Gap(path="plan.points", found=found, allowed="each once")
    yield from held(
        "points",
        [point.id for point in record.points],
        [one.id for one in record.plan.points if one.id in measured],
    )
    weights: dict[object, set[object]] = {}
    for point in record.points:
        if point.cards is not None:
            per_card = record.gpu.devices_per_card if record.gpu else 1
            yield from held(f"points.{point.id}.cards", point.cards * per_card, point.devices)
        model = (point.facts.get(DEVICE), point.facts.get("parameters"))
        weights.setdefault(model, set()).add(point.facts.get(WEIGHTS))
    if any(len(found) > 1 for found in weights.values()):
        yield Gap(path="points", found="several initial weights on one device", allowed="those of the seed")
    times = Counter(
        (one.median, one.low, one.high) for point in record.points if (one := point.measurement("step-time"))
    )
    if any(count > 1 for count in times.values()):
        yield Gap(path="points", found="the same step times at two points", allowed="of each its own")
    hashes = {str(point.facts.get(DATA)) for point in record.points}
    if len(hashes) > 1:
        yield Gap(
            path="points", found=f"{len(hashes)} values of the {DATA}", allowed="one: all read one stream"
        )


def _of_points(record: Record) -> Iterator[Gap]:
    planned = {point.id: point for point in record.plan.points}
    for point in record.points:
        yield from at_point(
            point.id, record.workload.account.as_planned(record.plan.part, planned[point.id], point)
        )
        yield from at_point(point.id, _derived(record, point))


def _derived(record: Record, point: PointRecord) -> Iterator[Gap]:
    """Yield numbers whose labels or formula are not those by which they are counted."""
    computed = {one.id: one for one in record.workload.derived(record.plan.part, point, record.gpu)}
    for one in point.measurements:
        if one.id in computed:
            yield from held(f"measurements.{one.id}.labels", one.labels, computed[one.id].labels)
        elif one.formula is not None and one.formula not in FORMULAS:
            yield Gap(path=f"measurements.{one.id}.formula", found=one.formula, allowed="a formula or none")


def _times(record: Record) -> Iterator[Gap]:
    """Yield where the run was shorter than its steps, and the calls that it timed."""
    named = RUN.fullmatch(record.run)
    if named is None:
        return
    try:
        began = datetime.datetime.strptime(f"{named['began']}+0000", "%Y%m%d-%H%M%S%z")
        ended = datetime.datetime.fromisoformat(record.created)
        elapsed = (ended - began).total_seconds()
    except (TypeError, ValueError):
        yield Gap(path="run", found=record.run, allowed="named after the time at which it began, in UTC")
        return
    timed = sum(
        one.low * max(one.count, _trained_steps(record, point)) * SECONDS[one.unit]
        for point in record.points
        for one in point.measurements
        if one.metric in ("step-time", "time") and one.unit in SECONDS
    )
    if timed > elapsed:
        yield Gap(
            path="created",
            found=f"{elapsed:.0f} s after the run began",
            allowed=f"at least the {timed:.0f} s that its steps and calls took",
        )


def _trained_steps(record: Record, point: PointRecord) -> int:
    """Return the steps of a point and its control runs, timed or not, but for those of legs before it."""
    leg = record.description.points[point.id].leg
    return sum(len(one.values) - (leg.begin if leg else 0) for one in point.series)


def _joined(record: Record) -> Iterator[Gap]:
    """Yield legs that do not go on from each other."""
    points = record.description.points
    found = [(leg.number, point) for point in record.points if (leg := points[point.id].leg)]
    for (number, before), (next_number, point) in pairwise(sorted(found, key=lambda one: one[0])):
        leg = points[point.id].leg
        assert leg is not None
        end = points[before.id].steps
        if next_number == number + 1:
            yield from held(f"plan.points.{point.id}.part.leg.begin", leg.begin, end)
            yield from _continued(point, before, leg.begin)


def _continued(point: PointRecord, before: PointRecord, begin: int) -> Iterator[Gap]:
    if values_of(point, "loss")[:begin] != values_of(before, "loss")[:begin]:
        yield Gap(
            point=point.id,
            path=f"points.{point.id}.series.loss",
            found=f"other first {begin} steps than at {before.id}",
            allowed="the steps of the leg before it",
        )
