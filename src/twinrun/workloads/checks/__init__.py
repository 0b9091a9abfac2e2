"""`[checks]`: named checks of devices, nodes and the allocation, each with a timeout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number, plural
from twinrun.manifests.recipe import SCALES, LoadedRecipe, Scale, ScaledTables, Sweep
from twinrun.manifests.settings import overlay
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.checks import CheckLine, ChecksJob, CheckSpec, ChecksResult, failed_nodes
from twinrun.protocol.measurements import Numbers, single
from twinrun.workloads.settings import Factor, Fingerprint, PointSettings
from twinrun.workloads.sweep import placements, refuse_demands
from twinrun.workloads.tables_and_charts import ABSENT, Table, word_table
from twinrun.workloads.workload import (
    Choice,
    ComparisonTerms,
    DataRequest,
    Demand,
    Finding,
    MeasuredPoint,
    Overview,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Progress,
    RecordView,
    Run,
    Workload,
    WorkloadPlan,
    held,
)

# The one metric: the share of checks that passed at each of their places.
PASSED = "checks-passed"
# Of several outcomes of one check the first counts.
SIGNS = {"fail": "✗ fail", "unknown": "? unknown", "pass": "✓ pass"}
WHOLE = "allocation"


class ChecksScale(Scale):
    """One size at which the checks run."""

    sweep: Sweep


class Checks(Frozen):
    """The named checks of a recipe; its script has a function for each."""

    check: Annotated[tuple[CheckSpec, ...], Field(min_length=1)]
    only: tuple[str, ...] = ()
    """Checks to run; all when empty."""

    @model_validator(mode="after")
    def _distinct(self) -> Checks:
        names = [one.id for one in self.check]
        if len(names) != len(set(names)):
            raise ValueError("two checks have the same id")
        if unknown := set(self.only) - set(names):
            raise ValueError(f"`only` names no check: {', '.join(sorted(unknown))}")
        return self

    @property
    def chosen(self) -> tuple[CheckSpec, ...]:
        """The checks that run."""
        return tuple(one for one in self.check if not self.only or one.id in self.only)


class ChecksTables(ScaledTables[ChecksScale]):
    """Tables of recipe.toml."""

    checks: Checks


class ChecksPlan(Frozen):
    """What decides a run of checks."""

    checks: tuple[CheckSpec, ...]


class ChecksPoint(Frozen):
    """Nothing beside the placement."""


def check(recipe: LoadedRecipe[ChecksTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold what claims ask of a recipe of checks against its scales; raises InputError."""

    def missing(one: Demand) -> str | None:
        given = one.metric == PASSED and one.measurement in (None, PASSED)
        return None if given else f"checks measure {PASSED}"

    sweeps = [recipe.tables.scale(name).sweep for name in SCALES]
    refuse_demands(demands, lambda point: any(one.gives(point) for one in sweeps), missing)
    return {}


def plan(request: PlanRequest[ChecksTables]) -> WorkloadPlan[ChecksPlan, ChecksPoint]:
    """Turn a request into the chosen checks at placements; raises InputError, MachineError."""
    recipe, overrides = request.recipe, dict(request.overrides)
    scale = recipe.tables.scale(request.scale)
    places, left_out = placements(scale.sweep, overrides, request.hardware, request.node_devices)
    checks = overlay(recipe.tables.checks, scale=scale.set, manifest=recipe.manifest, user=overrides)
    names = [one.id for one in checks.chosen]
    choice = Choice(name="checks", value=plural(len(names), "check"), because=", ".join(names))
    return WorkloadPlan(
        part=ChecksPlan(checks=checks.chosen),
        points=tuple(Point(**place.model_dump(), part=ChecksPoint()) for place in places),
        choices=(choice, *left_out),
    )


def describe(part: ChecksPlan, points: Sequence[Point[ChecksPoint]]) -> PlanDescription:
    """Return what follows from a plan of checks."""
    shown = {one.id: f"{one.title}; {one.scope}, {number(one.timeout)} s" for one in part.checks}
    described = PointDescription(attempts=("the checks",), steps=len(part.checks))
    return PlanDescription(
        subject=plural(len(part.checks), "check"),
        configuration=(("Checks", shown),),
        points={point.id: described for point in points},
        fingerprint={"checks": len(part.checks)},
    )


def settings(part: ChecksPlan, _point: Point[ChecksPoint]) -> Fingerprint:
    """Return how many checks run, and what each asks."""
    asked = {f"check.{one.id}": f"{one.scope}, {number(one.timeout)} s" for one in part.checks}
    return {"checks": len(part.checks), **asked}


def job(part: ChecksPlan, point: Point[ChecksPoint], _attempt: int, run: Run) -> ChecksJob:
    """Return the job of a point."""
    return ChecksJob(**run.at(point), checks=part.checks)


def progress(line: bytes) -> Progress:
    """Read the line that a finished check writes."""
    check = CheckLine.model_validate_json(line).check
    return Progress(done=0, status=f"{check.id}: {check.outcome}")


def numbers(_part: ChecksPlan, _point: Point[ChecksPoint], result: ChecksResult, _gpu: Gpu | None) -> Numbers:
    """Return the outcomes of the checks, and the share of checks that passed wherever they ran."""
    every = {one.id for one in result.checks}
    passed = every - {one.id for one in result.checks if one.outcome != "pass"}
    found = (single(PASSED, len(passed) / len(every), "ratio"),) if every else ()
    return Numbers(measurements=found, checks=result.checks)


def rules(_tables: ChecksTables, part: ChecksPlan, point: MeasuredPoint) -> Iterator[Finding]:
    """Yield where the planned checks are not there once at each of their places."""
    hosts, devices = sorted(set(point.sent.hosts)), range(point.planned.devices_per_node)
    places = {
        "allocation": [WHOLE],
        "node": hosts,
        "device": sorted(f"{host}, device {number}" for host in hosts for number in devices),
    }
    names = list(dict.fromkeys(one.id for one in point.checks))
    yield from held("checks", names, [one.id for one in part.checks])
    for check in part.checks:
        found = sorted(one.place for one in point.checks if one.id == check.id)
        yield from held(f"the places of {check.id}", found, places[check.scope])
    for one in point.checks:
        if one.outcome == "pass" and (one.nodes or one.remedy):
            said, allowed = "passed, with a fault", "one of them"
            yield Finding(what=f"the outcome of {one.id}", found=said, allowed=allowed)


def show(record: RecordView[ChecksPlan, ChecksPoint]) -> tuple[Table, ...]:
    """Return the grid of checks and nodes, and each outcome with its reason, of every point."""
    return tuple(table for point in record.points for table in (_grid(record.part, point), _outcomes(point)))


def _grid(part: ChecksPlan, point: MeasuredPoint) -> Table:
    """Return the worst outcome of each check at each node, its devices included, and at the allocation."""
    worst: dict[tuple[str, str], str] = {}
    for one in sorted(point.checks, key=lambda check: list(SIGNS).index(check.outcome)):
        for place in {"", *one.nodes, one.place.partition(",")[0]}:
            worst.setdefault((one.id, place), one.outcome)
    nodes, outcomes = failed_nodes(point.checks), [worst.get((one.id, ""), "unknown") for one in part.checks]
    passed, unknown, failed = (outcomes.count(one) for one in ("pass", "unknown", "fail"))
    said = f"{passed} of {plural(len(outcomes), 'check')} passed, {unknown} not known, {failed} failed"
    places = (*dict.fromkeys((*point.sent.hosts, *nodes)), WHOLE)
    return word_table(
        f"{point.id}: {said}",
        ("check", "asks", *places),
        (
            (one.id, one.title, *(SIGNS.get(worst.get((one.id, place), ""), ABSENT) for place in places))
            for one in part.checks
        ),
        notes=(f"nodes to exclude: {', '.join(nodes) or 'none'}",),
    )


def _outcomes(point: MeasuredPoint) -> Table:
    return word_table(
        f"{point.id}: every outcome",
        ("check", "outcome", "place", "reason", "remedy"),
        (
            (one.id, SIGNS[one.outcome], one.place, one.reason, one.remedy or ABSENT)
            for one in sorted(point.checks, key=lambda check: list(SIGNS).index(check.outcome))
        ),
    )


WORKLOAD = Workload(
    table="checks",
    tables=ChecksTables,
    plan_part=ChecksPlan,
    point_part=ChecksPoint,
    result=ChecksResult,
    headline=(PASSED,),
    factors=(Factor("checks", "none", "none", "other checks"),),
    smaller="name fewer checks with --set only=",
    check=check,
    plan=plan,
    describe=describe,
    settings=PointSettings(
        of=settings,
        # The checks that recipe.toml lists.
        as_written=lambda tables, _, point, __: (ChecksPlan(checks=tables.checks.chosen), point),
    ),
    job=job,
    progress=progress,
    numbers=numbers,
    rules=rules,
    terms=lambda part, _: ComparisonTerms(settings={"checks": ", ".join(one.id for one in part.checks)}),
    show=show,
    overview=lambda *_: Overview(),
)
