"""`[bench]`: calls that are checked and timed beside their baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.published import Accepted
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.bench import BenchJob, BenchResult, CallLine
from twinrun.protocol.job import Job, Result
from twinrun.protocol.measurements import Measurement, Numbers
from twinrun.workloads.bench import numbers, points, report
from twinrun.workloads.bench.factors import FACTORS
from twinrun.workloads.bench.manifest import BenchPlan, BenchPoint, BenchTables, check_names, measurement_ids
from twinrun.workloads.charts import Chart
from twinrun.workloads.fingerprint import Difference, Fingerprint, differences, nearest
from twinrun.workloads.settings import flat
from twinrun.workloads.tables import Table
from twinrun.workloads.workload import (
    Hardware,
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


class BenchWorkload(Workload):
    """Times calls at each case of a recipe, on one device or on many."""

    table = "bench"
    tables = BenchTables
    plan_part = BenchPlan
    point_part = BenchPoint
    result = BenchResult
    headline = ("speedup", "time", "error")
    factors = FACTORS
    smaller = "name other cases with --set cases="
    timed = True

    def check(self, recipe: LoadedRecipe) -> None:
        check_names(recipe)

    def missing(
        self, tables: Frozen, *, point: str | None, metric: str, measurement: str | None
    ) -> str | None:
        assert isinstance(tables, BenchTables)
        if point is not None and not _gives(tables, point):
            return f"no scale has a point {point}"
        ids = measurement_ids(tables, metric)
        if ids is None:
            return f"a benchmark measures no {metric}"
        if measurement is None and metric not in ids:
            return "which call is not said: `measurement` is needed"
        if measurement is not None and measurement not in ids:
            return f"the labels give no measurement {measurement}"
        return None

    def plan(self, request: PlanRequest) -> WorkloadPlan:
        return points.plan(request)

    def fingerprint(
        self, part: Part, points: Sequence[Point], published: Mapping[str, Accepted]
    ) -> Fingerprint:
        return nearest([_point(point.part).settings for point in points], published)

    def refuse(
        self, part: Part, _points: Sequence[Point], *, scale: str, hardware: Hardware, here: bool
    ) -> None:
        points.demand_devices(scale, devices=hardware.devices)

    def attempts(self, part: Part, point: Point) -> tuple[str, ...]:
        return ("the case",)

    def job(self, part: Part, point: Point, *, attempt: int, run: Run) -> Job:
        plan, placed = _plan(part), _point(point.part)
        return BenchJob(
            **run.model_dump(exclude={"data"}),
            point=point.id,
            world_size=point.world_size,
            case=placed.case,
            settings=placed.settings,
            timing=plan.bench,
            labels=plan.labels,
        )

    def steps(self, part: Part, point: Point) -> int:
        return 1

    def progress(self, line: bytes) -> Progress:
        call = CallLine.model_validate_json(line).call
        times = [(one.name, sorted(one.milliseconds)) for one in (call.ours, *call.baselines)]
        shown = [f"{name} {ms[len(ms) // 2]:.4g} ms" if ms else f"{name} checked" for name, ms in times]
        return Progress(done=0, status=f"{call.name}: {', '.join(shown)}")

    def numbers(self, part: Part, point: Point, result: Result) -> Numbers:
        assert isinstance(result, BenchResult)
        return numbers.measured(result)

    def derived(self, part: Part, point: PointRecord, gpu: Gpu | None) -> tuple[Measurement, ...]:
        return numbers.derived(point)

    def is_measured(self, measurement: str) -> bool:
        call, _, metric = measurement.partition("/")
        return metric.partition("@")[0] in ("", "error", "kept-memory", "link-traffic") and bool(call)

    def settings(self, part: Part, point: PointRecord) -> dict[str, str]:
        kernels = {
            f"{name.removeprefix('version of ')} {value}"
            for name, value in point.facts.items()
            if name.startswith("version of ")
        }
        # Three digits: the last ones of a measurement differ in every run.
        peaks = {f"peak rate {name}": f"{value:.3g}/s" for name, value in numbers.peaks_of(point).items()}
        return {
            "kernels": ", ".join(sorted(kernels)),
            **{f"settings.{name}": value for name, value in _texts(_point(point.part).settings).items()},
            **{f"bench.{name}": value for name, value in flat(_plan(part).bench).items()},
            **peaks,
        }

    def configuration(self, part: Part) -> tuple[tuple[str, dict[str, str]], ...]:
        return (("Benchmark", flat(_plan(part).bench)),)

    def subject(self, part: Part) -> str:
        repeats = _plan(part).bench.repeats
        return f"median of {repeats} calls" if repeats else "checked, not timed"

    def incomparable(
        self, a: RecordView, b: RecordView, point_a: PointRecord, point_b: PointRecord
    ) -> str | None:
        same = _point(point_a.part).settings == _point(point_b.part).settings
        return None if same else "other settings of the case"

    def point_differences(
        self, point: PointRecord, published: dict[str, Any]
    ) -> tuple[Difference, ...] | None:
        return differences(nearest([_point(point.part).settings], published), published)

    def point_tables(self, record: RecordView) -> tuple[Table, ...]:
        return tuple(report.point_table(point) for point in record.points)

    def charts(self, records: Sequence[RecordView], drawn: PictureContext) -> tuple[Chart, ...]:
        return report.charts(records, drawn)


WORKLOAD = BenchWorkload()


def _plan(part: Part) -> BenchPlan:
    assert isinstance(part, BenchPlan)
    return part


def _point(part: Part) -> BenchPoint:
    assert isinstance(part, BenchPoint)
    return part


def _gives(tables: BenchTables, point: str) -> bool:
    case, _, size = point.partition("@")
    for name in SCALES:
        scale = tables.scale(name)
        placed = scale.sweep.gives(size) if scale.sweep else not size
        if case in scale.cases and placed:
            return True
    return False


def _texts(settings: dict[str, Any]) -> dict[str, str]:
    return {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in settings.items()
    }
