"""What a plan predicts of its points, and these predictions beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping

from twinrun.foundation.text import GIB, number
from twinrun.predict.calibration import calibration
from twinrun.predict.point import PointPrediction, kept
from twinrun.protocol.models import AnyShape
from twinrun.protocol.training import Training
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Table, text
from twinrun.workloads.training.estimates import predicted
from twinrun.workloads.training.layouts import trained
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.workload import Hardware, Point, RecordView

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
    layout, known = point.part.layout, calibration()
    own = trained(training, layout)
    own = own.model_copy(update={"sharding": point.part.sharding or own.sharding})
    place = {"nodes": point.nodes, "devices_per_node": point.devices_per_node}
    found = (
        predicted(point.part.shape or shape, own, layout, hardware, microbatch=size, **place)
        for size in point.part.microbatches
    )
    made = (kept(one, attempt=number, calibration=known.version) for number, one in enumerate(found))
    return point.model_copy(update={"predicted": tuple(made)})


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
