"""`[checks]`: named checks of devices, nodes and the allocation, each with a timeout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import number, plural
from twinrun.manifests.published import Accepted
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import overlay
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.checks import CheckLine, ChecksJob, ChecksResult
from twinrun.protocol.job import Job, Result
from twinrun.protocol.measurements import Measurement, Numbers, sampled
from twinrun.workloads.charts import Chart
from twinrun.workloads.checks import report
from twinrun.workloads.checks.manifest import ChecksPlan, ChecksPoint, ChecksTables, tables_of
from twinrun.workloads.fingerprint import Fingerprint
from twinrun.workloads.settings import factor
from twinrun.workloads.sweep import placement, sizes
from twinrun.workloads.tables import Table
from twinrun.workloads.workload import (
    Choice,
    Part,
    PictureContext,
    PlanRequest,
    Point,
    PointRecord,
    Progress,
    RecordView,
    Run,
    Workload,
    WorkloadPlan,
)

PASSED = "checks-passed"


class ChecksWorkload(Workload):
    """Runs the named checks of a recipe at each placement."""

    table = "checks"
    tables = ChecksTables
    plan_part = ChecksPlan
    point_part = ChecksPoint
    result = ChecksResult
    headline = (PASSED,)
    factors = (factor("checks", "none", "none", "other checks"),)
    smaller = "name fewer checks with --set only="
    timed = False

    def check(self, recipe: LoadedRecipe) -> None:
        tables_of(recipe)

    def missing(
        self, tables: Frozen, *, point: str | None, metric: str, measurement: str | None
    ) -> str | None:
        assert isinstance(tables, ChecksTables)
        if point is not None and not any(tables.scale(name).sweep.gives(point) for name in SCALES):
            return f"no scale has a point {point}"
        return None if metric == PASSED and measurement in (None, PASSED) else f"checks measure {PASSED}"

    def plan(self, request: PlanRequest) -> WorkloadPlan:
        recipe, overrides = request.recipe, dict(request.overrides)
        tables = tables_of(recipe)
        scale = tables.scale(request.scale)
        counts = sizes(
            scale.sweep, requested=overrides.pop("devices", None), devices=request.hardware.devices
        )
        if "check" in overrides:
            raise InputError(
                "checks are listed in recipe.toml", place="--set check", hint="--set 'only=[\"ID\"]'"
            )
        checks = overlay(tables.checks, scale=scale.set, manifest=recipe.manifest, user=overrides)
        places = [placement(scale.sweep, count) for count in counts]
        points = tuple(Point(**place.model_dump(), part=ChecksPoint()) for place in places)
        names = [one.id for one in checks.chosen]
        return WorkloadPlan(
            part=ChecksPlan(checks=checks.chosen),
            points=points,
            choices=(Choice(name="checks", value=plural(len(names), "check"), because=", ".join(names)),),
        )

    def fingerprint(
        self, part: Part, points: Sequence[Point], published: Mapping[str, Accepted]
    ) -> Fingerprint:
        return {}

    def attempts(self, part: Part, point: Point) -> tuple[str, ...]:
        return ("the checks",)

    def job(self, part: Part, point: Point, *, attempt: int, run: Run) -> Job:
        return ChecksJob(
            **run.model_dump(exclude={"data"}),
            point=point.id,
            world_size=point.world_size,
            checks=_plan(part).checks,
        )

    def steps(self, part: Part, point: Point) -> int:
        return len(_plan(part).checks)

    def progress(self, line: bytes) -> Progress:
        check = CheckLine.model_validate_json(line).check
        return Progress(done=0, status=f"{check.id}: {check.outcome}")

    def numbers(self, part: Part, point: Point, result: Result) -> Numbers:
        assert isinstance(result, ChecksResult)
        return Numbers(checks=result.checks, facts={"device name": result.device_name})

    def derived(self, part: Part, point: PointRecord, gpu: Gpu | None) -> tuple[Measurement, ...]:
        if not point.checks:
            return ()
        share = sum(one.outcome == "pass" for one in point.checks) / len(point.checks)
        return (sampled(PASSED, [share], metric=PASSED, unit="ratio", per="run"),)

    def is_measured(self, measurement: str) -> bool:
        return False

    def settings(self, part: Part, point: PointRecord) -> dict[str, str]:
        return {"checks": ", ".join(one.id for one in _plan(part).checks)}

    def configuration(self, part: Part) -> tuple[tuple[str, dict[str, str]], ...]:
        shown = {one.id: f"{one.title}; {one.scope}, {number(one.timeout)} s" for one in _plan(part).checks}
        return (("Checks", shown),)

    def subject(self, part: Part) -> str:
        return plural(len(_plan(part).checks), "check")

    def incomparable(
        self, a: RecordView, b: RecordView, point_a: PointRecord, point_b: PointRecord
    ) -> str | None:
        return None

    def point_tables(self, record: RecordView) -> tuple[Table, ...]:
        return tuple(table for point in record.points for table in report.tables_of_point(point))

    def files(self, record: RecordView) -> dict[str, str]:
        return report.files(record)

    def charts(self, records: Sequence[RecordView], drawn: PictureContext) -> tuple[Chart, ...]:
        return ()


WORKLOAD = ChecksWorkload()


def _plan(part: Part) -> ChecksPlan:
    assert isinstance(part, ChecksPlan)
    return part
