"""From a recipe of checks to the points at which they run, and to the jobs of their ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinrun.foundation.errors import InputError
from twinrun.foundation.text import number, plural
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import overlay
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.checks import CheckLine, ChecksJob, ChecksResult
from twinrun.protocol.measurements import Numbers, single
from twinrun.workloads.checks.manifest import ChecksPlan, ChecksPoint, ChecksTables
from twinrun.workloads.settings import Fingerprint, flat_fields
from twinrun.workloads.sweep import placements, refuse_demands
from twinrun.workloads.workload import (
    Choice,
    ComparisonTerms,
    DataRequest,
    Demand,
    MeasuredPoint,
    PlanDescription,
    PlanRequest,
    Point,
    PointDescription,
    Progress,
    Run,
    WorkloadPlan,
)

# Fields of a check that say what it is and not what it does.
_WORDS = (".id", ".title")
# The one metric: the share of checks that passed.
PASSED = "checks-passed"


def check(recipe: LoadedRecipe[ChecksTables], demands: Sequence[Demand]) -> Mapping[str, DataRequest]:
    """Hold what claims ask of a recipe of checks against its scales; raises InputError."""

    def missing(one: Demand) -> str | None:
        if one.point is not None and not any(
            recipe.tables.scale(name).sweep.gives(one.point) for name in SCALES
        ):
            return f"no scale has a point {one.point}"
        given = one.metric == PASSED and one.measurement in (None, PASSED)
        return None if given else f"checks measure {PASSED}"

    refuse_demands(demands, missing)
    return {}


def plan(request: PlanRequest[ChecksTables]) -> WorkloadPlan[ChecksPlan, ChecksPoint]:
    """Turn a request into the chosen checks at placements; raises InputError, MachineError."""
    recipe, overrides = request.recipe, dict(request.overrides)
    scale = recipe.tables.scale(request.scale)
    places, left_out = placements(
        scale.sweep, overrides, hardware=request.hardware, node_devices=request.node_devices
    )
    if "check" in overrides:
        raise InputError(
            "checks are listed in recipe.toml", place="--set check", hint="--set 'only=[\"ID\"]'"
        )
    checks = overlay(recipe.tables.checks, scale=scale.set, manifest=recipe.manifest, user=overrides)
    names = [one.id for one in checks.chosen]
    return WorkloadPlan(
        part=ChecksPlan(checks=checks.chosen),
        points=tuple(Point(**place.model_dump(), part=ChecksPoint()) for place in places),
        choices=(
            Choice(name="checks", value=plural(len(names), "check"), because=", ".join(names)),
            *left_out,
        ),
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
    each = (flat_fields(one, f"check.{one.id}.") for one in part.checks)
    return {
        "checks": len(part.checks),
        **{name: value for one in each for name, value in one.items() if not name.endswith(_WORDS)},
    }


def as_written(
    tables: ChecksTables, _part: ChecksPlan, point: Point[ChecksPoint], _name: str
) -> tuple[ChecksPlan, Point[ChecksPoint]]:
    """Return the checks that recipe.toml lists at the paper scale."""
    checks = overlay(tables.checks, scale=tables.scales.paper.set, manifest="recipe.toml", user={})
    return ChecksPlan(checks=checks.chosen), point


def job(part: ChecksPlan, point: Point[ChecksPoint], _attempt: int, run: Run) -> ChecksJob:
    """Return the job of a point."""
    return ChecksJob(
        **run.model_dump(),
        point=point.id,
        world_size=point.world_size,
        checks=part.checks,
    )


def progress(line: bytes) -> Progress:
    """Read the line that a finished check writes."""
    check = CheckLine.model_validate_json(line).check
    return Progress(done=0, status=f"{check.id}: {check.outcome}")


def numbers(_part: ChecksPlan, _point: Point[ChecksPoint], result: ChecksResult, _gpu: Gpu | None) -> Numbers:
    """Return the outcomes of the checks, and the share of them that passed."""
    passed = sum(one.outcome == "pass" for one in result.checks)
    found = (single(PASSED, passed / len(result.checks), "ratio"),) if result.checks else ()
    return Numbers(measurements=found, checks=result.checks)


def terms(part: ChecksPlan, _point: MeasuredPoint[ChecksPoint, ChecksResult]) -> ComparisonTerms:
    """Return which checks ran."""
    return ComparisonTerms(settings={"checks": ", ".join(one.id for one in part.checks)})
