"""What the record of an evaluation shows: scores with what decides them, and how they and the loss went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.protocol.evaluation import MEAN, TaskScore
from twinrun.protocol.measurements import Measurement
from twinrun.protocol.model_source import in_words
from twinrun.workloads.curve_charts import distance_in_words, series_chart
from twinrun.workloads.evaluation.manifest import EvaluationPlan, EvaluationPoint, EvaluationTables
from twinrun.workloads.evaluation.plan import SCORE
from twinrun.workloads.tables_and_charts import (
    ABSENT,
    Cell,
    Chart,
    Column,
    Curve,
    LineChart,
    Spot,
    Table,
    text,
)
from twinrun.workloads.workload import MeasuredPoint, Overview, PictureContext, RecordView

RULES = ("none", "per-character", "per-byte", "per-token")
COLUMNS = (
    Column(title="task", numeric=False),
    Column(title="score"),
    Column(title="rule", numeric=False),
    *(Column(title=rule) for rule in RULES),
    Column(title="documents"),
)


def show(record: RecordView[EvaluationPlan, EvaluationPoint]) -> tuple[Table, ...]:
    """Return the scores of every point, and those of its checkpoints below."""
    tables = [table for point in record.points for table in (_scores(record, point), *_steps(record, point))]
    return tuple(tables)


def _scores(
    record: RecordView[EvaluationPlan, EvaluationPoint], point: MeasuredPoint[EvaluationPoint]
) -> Table:
    rows = [_row(point, one) for one in point.result.models[-1].tasks]
    mean = (text("mean of the tasks"), _score(point, MEAN), *(text(ABSENT) for _ in range(len(COLUMNS) - 2)))
    return Table(
        title=f"{point.id}: share of right answers, and its standard error",
        columns=COLUMNS,
        rows=(*rows, mean),
        notes=(
            f"harness: {point.result.harness}, {record.part.evaluation.shots} shots",
            *(f"model: {in_words(given)}" for given in (record.part.given,) if given),
            f"{point.result.models[-1].parameters:,} parameters, sha256 {point.result.models[-1].sha256}",
            "rule: what the log-likelihood of an answer is divided by before the largest is taken",
        ),
    )


def _row(point: MeasuredPoint, task: TaskScore) -> tuple[Cell, ...]:
    name, rule = task.task, task.rule
    others = (text(_points(point.measurement(name if one == rule else f"{name}@{one}"))) for one in RULES)
    return (
        text(name),
        _score(point, name),
        text(rule),
        *others,
        text(str(task.documents)),
    )


def _score(point: MeasuredPoint, name: str) -> Cell:
    error = point.measurement(f"{name}/error")
    return text(_points(point.measurement(name)), f"±{error.median:.3f}" if error else "")


def _points(found: Measurement | None) -> str:
    return f"{found.median:.3f}" if found else ABSENT


def _steps(
    record: RecordView[EvaluationPlan, EvaluationPoint], point: MeasuredPoint[EvaluationPoint]
) -> tuple[Table, ...]:
    """Return the scores of every checkpoint, where some were scored before the last."""
    steps = _scored(record, point)
    if len(steps) < 2:
        return ()
    names = _names(record)
    return (
        Table(
            title=f"{point.id}: scores while the training went on",
            columns=(Column(title="steps", numeric=False), *(Column(title=name) for name in names)),
            rows=tuple(
                (text(str(step)), *(_score(point, f"{name}{suffix}") for name in names))
                for step, suffix in steps.items()
            ),
            notes=tuple(
                f"checkpoint after step {one.step}: sha256 {one.checkpoint_sha256}"
                for one in point.result.models
            ),
        ),
    )


def _scored(
    record: RecordView[EvaluationPlan, EvaluationPoint], point: MeasuredPoint[EvaluationPoint]
) -> dict[int, str]:
    """Return the steps after which the model was scored, each with what ends the names of its numbers."""
    if record.part.given:
        return {}
    prefix = f"{MEAN}/step-"
    before = [
        int(one.id.removeprefix(prefix))
        for one in point.measurements
        if one.id.startswith(prefix) and one.metric == SCORE
    ]
    return {**{step: f"/step-{step}" for step in before}, record.part.evaluation.training.steps: ""}


def _names(record: RecordView[EvaluationPlan, EvaluationPoint]) -> tuple[str, ...]:
    return (*(one.name for one in record.part.tasks), MEAN)


def overview(
    records: Sequence[RecordView[EvaluationPlan, EvaluationPoint]],
    _drawn: PictureContext[EvaluationTables],
) -> Overview:
    """Return the loss of a single record, and beside it the scores of its checkpoints."""
    return Overview(charts=tuple(_charts(records[0])) if len(records) == 1 else ())


def _charts(record: RecordView[EvaluationPlan, EvaluationPoint]) -> Iterator[Chart]:
    trained = [point for point in record.points if (losses := point.one_series("loss")) and losses.values]
    if trained:
        note = distance_in_words(trained, "loss")
        yield series_chart(trained, "loss", title="Loss", label="loss, nats/token", note=note)
    for point in trained:
        if len(steps := _scored(record, point)) > 1:
            yield _scores_chart(record, point, steps)


def _scores_chart(
    record: RecordView[EvaluationPlan, EvaluationPoint],
    point: MeasuredPoint[EvaluationPoint],
    steps: dict[int, str],
) -> LineChart:
    curves = tuple(
        Curve(
            label=name,
            kind="measured",
            place=place,
            spots=tuple(_spot(point, step, f"{name}{suffix}") for step, suffix in steps.items()),
        )
        for place, name in enumerate(_names(record))
    )
    return LineChart(
        name=f"scores-{point.id}",
        title="Scores while the training went on",
        x_label="step",
        x_scale="linear",
        y_label="score",
        y_scale="linear",
        curves=curves,
        notes=("A bar is one standard error to each side.",),
    )


def _spot(point: MeasuredPoint[EvaluationPoint], step: int, name: str) -> Spot:
    score, error = point.measurement(name), point.measurement(f"{name}/error")
    assert score is not None
    assert error is not None, "each score has its error"
    return Spot(x=step, value=score.median, low=score.median - error.median, high=score.median + error.median)
