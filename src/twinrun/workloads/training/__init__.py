"""`[training]`: one training configuration at several placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.published import Accepted
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.job import Job, Result
from twinrun.protocol.measurements import Fact, Measurement, Numbers
from twinrun.protocol.training import StepMetrics, TrainingJob, TrainingResult, identity
from twinrun.workloads.charts import Chart
from twinrun.workloads.fingerprint import Fingerprint
from twinrun.workloads.settings import flat
from twinrun.workloads.tables import Table
from twinrun.workloads.training import (
    hardware,
    layout_tables,
    layouts,
    legs,
    numbers,
    points,
    report,
)
from twinrun.workloads.training.factors import FACTORS
from twinrun.workloads.training.manifest import (
    TrainingPlan,
    TrainingPoint,
    TrainingTables,
    check_names,
    tables_of,
)
from twinrun.workloads.training.numbers import mathematics
from twinrun.workloads.training.points import fingerprint
from twinrun.workloads.workload import (
    ControlledCurve,
    DataRequest,
    Hardware,
    LegPosition,
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

METRICS = (
    *("step-time", "tokens-per-second", "model-flops", "model-flops-share"),
    *("loss", "peak-memory", "sample-order", "envelope-share"),
    *("state-memory", "state-of-formula", "traffic", "traffic-of-formula"),
)


class TrainingWorkload(Workload):
    """Trains a model of the recipe at each size of a sweep."""

    table = "training"
    tables = TrainingTables
    plan_part = TrainingPlan
    point_part = TrainingPoint
    result = TrainingResult
    module = "twinrun.train.training"
    headline = ("model-flops-share", "tokens-per-second")
    factors = FACTORS
    smaller = "choose a smaller model, --set activation_checkpointing=true, or --set microbatch=1"
    saves = True
    timed = True

    def check(self, recipe: LoadedRecipe) -> None:
        check_names(recipe)

    def missing(
        self, tables: Frozen, *, point: str | None, metric: str, measurement: str | None
    ) -> str | None:
        assert isinstance(tables, TrainingTables)
        scales = [tables.scale(name) for name in ("smoke", "node", "paper")]
        if point is not None and not any(scale.gives(point) for scale in scales):
            return f"no scale has a point {point}"
        if metric not in METRICS:
            return f"a training point measures {', '.join(METRICS)}"
        return None if measurement in (None, metric) else f"the measurement of {metric} is called {metric}"

    def plan(self, request: PlanRequest) -> WorkloadPlan:
        return points.plan(request)

    def fingerprint(
        self, part: Part, points: Sequence[Point], published: Mapping[str, Accepted]
    ) -> Fingerprint:
        plan = _plan(part)
        return fingerprint(plan.shape, plan.training)

    def refuse(
        self, part: Part, points: Sequence[Point], *, scale: str, hardware: Hardware, here: bool
    ) -> None:
        legs.refuse_elsewhere(points, hardware)
        if here:
            layouts.refuse_storage(points)

    def continued(self, point: Point) -> LegPosition | None:
        return legs.continued(point)

    def identity(self, part: Part) -> dict[str, str]:
        plan = _plan(part)
        return identity(plan.shape, plan.training)

    def data(self, part: Part) -> DataRequest | None:
        plan = _plan(part)
        return DataRequest(name=plan.training.data, source=plan.data, sequence=plan.shape.sequence)

    def data_sets(self, tables: Frozen) -> dict[str, DataRequest]:
        assert isinstance(tables, TrainingTables)
        sequence = tables.models[tables.training.model].sequence
        return {
            name: DataRequest(name=name, source=source, sequence=sequence)
            for name, source in tables.data.items()
        }

    def attempts(self, part: Part, point: Point) -> tuple[str, ...]:
        return tuple(f"microbatch {size}" for size in _point(point.part).microbatches)

    def job(self, part: Part, point: Point, *, attempt: int, run: Run) -> Job:
        plan, placed = _plan(part), _point(point.part)
        leg = placed.leg
        ends = {"controls": placed.controls} | ({"steps": leg.end} if leg else {})
        shared = run.model_dump() | {"accelerator": run.accelerator and not (leg and leg.processor)}
        return TrainingJob(
            **shared,
            point=point.id,
            world_size=point.world_size,
            shape=placed.shape or plan.shape,
            training=layouts.trained(plan.training, placed.layout).model_copy(update=ends),
            layout=placed.layout,
            microbatch=placed.microbatches[attempt],
            sharding=placed.sharding or plan.training.sharding,
        )

    def steps(self, part: Part, point: Point) -> int:
        leg = _point(point.part).leg
        return leg.end if leg else _plan(part).training.steps

    def progress(self, line: bytes) -> Progress:
        step = StepMetrics.model_validate_json(line)
        which = f"control run {step.control}  " if step.control else ""
        return Progress(done=step.step, status=f"{which}loss {step.loss:.4f}  {step.seconds:.3f} s/step")

    def numbers(self, part: Part, point: Point, result: Result) -> Numbers:
        assert isinstance(result, TrainingResult)
        return numbers.measured(_plan(part), _point(point.part), result)

    def derived(self, part: Part, point: PointRecord, gpu: Gpu | None) -> tuple[Measurement, ...]:
        return numbers.derived(_plan(part), point, gpu)

    def uses_kernels(self, part: Part) -> bool:
        return _plan(part).training.kernels == "ours"

    def expected(self, part: Part, point: PointRecord) -> dict[str, tuple[Fact, ...]]:
        placed = _point(point.part)
        shape = placed.shape or _plan(part).shape
        return {"parameters": (shape.parameters(),), "microbatch": placed.microbatches}

    def is_measured(self, measurement: str) -> bool:
        return measurement in numbers.MEASURED

    def settings(self, part: Part, point: PointRecord) -> dict[str, str]:
        plan, layout = _plan(part), _point(point.part).layout
        named = ("microbatch", "attention backend", "parallelism", "data hash", "order hash")
        return {
            "model": plan.training.model,
            **{name: str(point.facts[name]) for name in named},
            **{f"shape.{name}": value for name, value in flat(plan.shape).items()},
            **{f"training.{name}": value for name, value in flat(plan.training).items() if name != "model"},
            **{f"data.{name}": value for name, value in flat(plan.data).items()},
            **{f"layout.{name}": value for name, value in (flat(layout) if layout else {}).items()},
        }

    def configuration(self, part: Part) -> tuple[tuple[str, dict[str, str]], ...]:
        plan = _plan(part)
        return (("Training", flat(plan.training)), ("Model", flat(plan.shape)), ("Data", flat(plan.data)))

    def subject(self, part: Part) -> str:
        training = _plan(part).training
        return f"{training.model}, {training.precision}, {training.trainer}"

    def incomparable(
        self, a: RecordView, b: RecordView, point_a: PointRecord, point_b: PointRecord
    ) -> str | None:
        first, second = (mathematics(_plan(record.part)) for record in (a, b))
        changed = [name for name in first if first[name] != second.get(name)]
        if changed:
            return f"another configuration ({', '.join(changed)})"
        if point_a.facts["data hash"] != point_b.facts["data hash"]:
            return "other data (the token streams have different hashes)"
        if point_a.facts["order hash"] != point_b.facts["order hash"]:
            return "another order of batches (the order hashes differ)"
        return None

    def whole(self, points: Sequence[PointRecord]) -> tuple[PointRecord, ...]:
        return numbers.whole(points)

    def traced(self, part: Part, point: PointRecord, metric: str) -> ControlledCurve | None:
        return numbers.traced(_plan(part), point, metric)

    def point_tables(self, record: RecordView) -> tuple[Table, ...]:
        return (report.points_table(record), *layout_tables.tables(record))

    def hardware_tables(self, records: Sequence[RecordView], drawn: PictureContext) -> tuple[Table, ...]:
        return hardware.hardware_tables(records, drawn)

    def charts(self, records: Sequence[RecordView], drawn: PictureContext) -> tuple[Chart, ...]:
        return report.charts(records, drawn)


WORKLOAD = TrainingWorkload()

__all__ = ["WORKLOAD", "TrainingWorkload", "tables_of"]


def _plan(part: Part) -> TrainingPlan:
    assert isinstance(part, TrainingPlan)
    return part


def _point(part: Part) -> TrainingPoint:
    assert isinstance(part, TrainingPoint)
    return part
