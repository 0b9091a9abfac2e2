"""What a sweep over layouts shows: each beside plain data parallelism, and which features go together."""

from __future__ import annotations

from collections.abc import Sequence

from twinrun.foundation.text import number
from twinrun.protocol.layout import DEEPSPEED, FEATURES, refused_pair
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.curve_distance import largest_difference, values_of
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Table, measured, text
from twinrun.workloads.training.manifest import TrainingPlan, TrainingPoint
from twinrun.workloads.workload import MeasuredPoint, RecordView

COLUMNS = (
    Column(title="layout", numeric=False),
    Column(title="ranks"),
    Column(title="tokens/s over\nbaseline's"),
    Column(title="loss: largest\ndifference"),
    Column(title="state, B per\nparameter"),
    Column(title="over\nformula"),
    Column(title="sent, numbers\nper parameter"),
    Column(title="over\nformula"),
    Column(title="over\nbaseline's"),
)


def layout_tables(record: RecordView[TrainingPlan, TrainingPoint]) -> tuple[Table, ...]:
    """Return a table of layouts, and one of pairs of DeepSpeed's features; none for a sweep over sizes."""
    named = [point.part.layout for point in record.points if point.part.layout]
    if not named:
        return ()
    pairs = any(one.framework == DEEPSPEED for one in named)
    return (_of_layouts(record.points), *([_of_pairs(record.points)] if pairs else []))


def baseline_of(
    point: MeasuredPoint[TrainingPoint], points: Sequence[MeasuredPoint[TrainingPoint]]
) -> MeasuredPoint[TrainingPoint] | None:
    """Return the first point in PyTorch's own data parallelism that trains the same model."""
    return next((one for one in points if _is_plain(one) and one.part.shape == point.part.shape), None)


def _of_layouts(points: Sequence[MeasuredPoint[TrainingPoint]]) -> Table:
    return Table(
        title="Layouts beside PyTorch's own data parallelism of the same model",
        columns=COLUMNS,
        rows=tuple(_row(point, baseline_of(point, points)) for point in points),
        notes=(
            "tokens/s are per device, so a ratio compares layouts of the same or another number of ranks.",
            "Of the first rank, between two steps and in one, over the parameters of its part of the model.",
            "Formulas: ZeRO's paper, arXiv:1910.02054, sections 5 and 7; none where activations are sent.",
        ),
    )


def _row(point: MeasuredPoint[TrainingPoint], plain: MeasuredPoint[TrainingPoint] | None) -> tuple[Cell, ...]:
    return (
        text(point.id, point.result.parallelism),
        text(str(point.devices)),
        text(_ratio(point, plain, "tokens-per-second")),
        text(_apart(point, plain)),
        measured(point.measurement("state-memory")),
        text(_plain(point.measurement("state-of-formula"))),
        measured(point.measurement("traffic")),
        text(_plain(point.measurement("traffic-of-formula"))),
        text(_ratio(point, plain, "traffic")),
    )


def _of_pairs(points: Sequence[MeasuredPoint[TrainingPoint]]) -> Table:
    rows = tuple((text(one), *(_pair(one, other, points) for other in FEATURES)) for one in FEATURES)
    return Table(
        title="What was used together: the layouts that have both, or why DeepSpeed refuses it",
        columns=(Column(title="", numeric=False), *(Column(title=name, numeric=False) for name in FEATURES)),
        rows=rows,
        notes=("not tried: DeepSpeed does not refuse it, and no layout of this run has both.",),
    )


def _pair(one: str, other: str, points: Sequence[MeasuredPoint[TrainingPoint]]) -> Cell:
    if one != other and one.startswith("ZeRO") and other.startswith("ZeRO"):
        return text(ABSENT)
    have = [
        point.id for point in points if (found := point.part.layout) and {one, other} <= set(found.features)
    ]
    if have:
        return text("trained", ", ".join(have))
    reason = refused_pair(one, other)
    return text("refused", reason) if reason else text("not tried")


def _apart(point: MeasuredPoint[TrainingPoint], plain: MeasuredPoint[TrainingPoint] | None) -> str:
    """Return how far the losses of a point are from its baseline's."""
    if plain is None or plain is point:
        return ABSENT
    found, _ = largest_difference([values_of(one, "loss") for one in (point, plain)])
    return f"{found:.1e}"


def _ratio(point: MeasuredPoint[TrainingPoint], plain: MeasuredPoint[TrainingPoint] | None, name: str) -> str:
    over, under = (one.measurement(name) if one else None for one in (point, plain))
    return number(over.median / under.median) if over and under and under.median else ABSENT


def _plain(found: Measurement | None) -> str:
    return f"{found.median:.3f}" if found else ABSENT


def _is_plain(point: MeasuredPoint[TrainingPoint]) -> bool:
    return point.part.layout is not None and point.part.layout.plain
