"""What a plan predicts of its points, and these predictions beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from twinrun.foundation.text import GIB, number
from twinrun.predict.calibration import calibration
from twinrun.predict.parallel_layout import Machines
from twinrun.predict.point import PointPrediction, kept
from twinrun.predict.prediction import predict
from twinrun.predict.request import GIGABIT
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import COMPOSER, PLAIN, Training
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Table, text
from twinrun.workloads.training.layouts import trained
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.training.sharing import parallel_layout
from twinrun.workloads.workload import Hardware, Point, RecordView

# The generation of software that this project's loops are.
SOFTWARE = "twinrun-2026"
COLUMNS = (
    Column(title="point", numeric=False),
    Column(title="s/step\npredicted"),
    Column(title="s/step\nmeasured"),
    Column(title="error"),
    Column(title="GiB\npredicted"),
    Column(title="GiB\nmeasured"),
    Column(title="error "),
)


def with_predictions(
    point: Point[TrainingPoint], shape: AnyShape, training: Training, hardware: Hardware
) -> Point[TrainingPoint]:
    """Return a point with a prediction for each of its microbatches; on a processor there is none."""
    leg = point.part.leg
    if hardware.gpu is None or (leg and leg.processor):
        return point
    known, layout = calibration(), point.part.layout
    own = trained(training, layout)
    own = own.model_copy(update={"sharding": point.part.sharding or own.sharding})
    network = None if hardware.network_gbit_s is None else hardware.network_gbit_s * GIGABIT
    machines = Machines(hardware.gpu, point.devices_per_node, point.nodes, network)
    found = (
        predict(
            point.part.shape or shape,
            machines,
            parallel_layout(own, layout, microbatch=size),
            software=known.of(SOFTWARE),
            calibration=known,
            checked=True,
            unknown=_unknown(own, point.part.shape or shape),
        )
        for size in point.part.microbatches
    )
    predicted = (kept(one, attempt=place, calibration=known.version) for place, one in enumerate(found))
    return point.model_copy(update={"predicted": tuple(predicted)})


def _unknown(training: Training, shape: AnyShape) -> str | None:
    """Return why the time of a training cannot be said, and which measurement would tell."""
    if training.precision != "bf16":
        return f"every row that was fitted is in bf16; a record in {training.precision} would tell"
    if training.trainer not in (COMPOSER, PLAIN):
        return f"no run of {training.trainer} on these GPUs was fitted; this run's own record would tell"
    if not training.compile:
        return "no run of this project without compiled blocks was fitted; this run's own record would tell"
    if shape.attention_heads() and training.attention != "sdpa":
        return f"no training with attention={training.attention} was fitted; this run's record would tell"
    if shape.work().block.scanned and training.kernels != "ours":
        return f"no scan of kernels={training.kernels} was timed; recipes/mamba-kernels would tell"
    return None


def predicted_table(record: RecordView[TrainingPlan, TrainingPoint]) -> tuple[Table, ...]:
    """Return the predictions of a record's plan beside what was measured; none where it has none."""
    rows = []
    for point in record.points:
        if one := record.predicted.get(point.id):
            time, memory = point.measurement("step-time"), point.measurement("peak-memory")
            has, needs = memory.median if memory else None, one.memory_bytes / GIB
            rows.append(
                (
                    text(point.id),
                    _seconds(one),
                    text(number(time.median) if time else ABSENT),
                    _error(one.seconds, time.median if time else None, one.covers),
                    text(number(needs)),
                    text(number(has) if has else ABSENT),
                    _error(needs, has, None),
                )
            )
    title = "Predicted before the run, beside what was measured"
    table = Table(title=title, columns=COLUMNS, rows=tuple(rows), notes=_notes(record.predicted))
    return (table,) if rows else ()


def _seconds(one: PointPrediction) -> Cell:
    if one.seconds is None or one.covers is None:
        return text("cannot say")
    return text(number(one.seconds), " to ".join(map(number, one.covers)))


def _error(predicted: float | None, measured: float | None, interval: tuple[float, float] | None) -> Cell:
    if predicted is None or not measured:
        return text(ABSENT)
    words = ""
    if interval:
        words = "inside" if interval[0] <= measured <= interval[1] else "outside"
    return text(f"{predicted / measured - 1:+.1%}", words)


def _notes(found: Mapping[str, PointPrediction]) -> tuple[str, ...]:
    unknown = dict.fromkeys(f"Cannot say: {one.unknown}." for one in found.values() if one.unknown)
    versions = sorted({(one.software, one.calibration) for one in found.values()})
    named = ", ".join(f"{software} in version {version}" for software, version in versions)
    kept_in = f"Calibration: {named}; its interval holds the measured time nine times of ten."
    return (*unknown, kept_in)
