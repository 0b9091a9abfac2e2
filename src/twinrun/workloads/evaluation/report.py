"""What the record of an evaluation shows: scores with what decides them, and how they and the loss went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.protocol.evaluation import MEAN, EvaluationResult
from twinrun.protocol.model_source import in_words
from twinrun.workloads.curve_distance import distance_in_words, series_chart, values_of
from twinrun.workloads.evaluation.plan import EvaluationPlan, EvaluationPoint, EvaluationTables
from twinrun.workloads.tables_and_charts import (
    ABSENT,
    Cell,
    Chart,
    LineChart,
    Spot,
    Table,
    curve,
    number_columns,
    text,
    word_columns,
)
from twinrun.workloads.workload import MeasuredPoint, Overview, PictureContext, RecordView

EvaluationRecord = RecordView[EvaluationPlan, EvaluationPoint]
ScoredPoint = MeasuredPoint[EvaluationPoint, EvaluationResult]
RULES = ("none", "per-character", "per-byte", "per-token")


def show(record: EvaluationRecord) -> tuple[Table, ...]:
    """Return the scores of every point, and those of its checkpoints below."""
    return tuple(table for point in record.points for table in _tables(record, point))


def _tables(record: EvaluationRecord, point: ScoredPoint) -> Iterator[Table]:
    models, names = point.result.models, [one.name for one in record.part.tasks]
    last, given = models[-1], record.part.given
    rows = [
        (
            text(one.task),
            _score(point, one.task),
            text(one.rule),
            *(text(f"{one.by_rule[rule]:.3f}" if rule in one.by_rule else ABSENT) for rule in RULES),
            text(str(one.documents)),
        )
        for one in last.tasks
    ]
    absent = (text(ABSENT),) * (len(RULES) + 2)
    rules = (*number_columns("score"), *word_columns("rule"), *number_columns(*RULES, "documents"))
    yield Table(
        title=f"{point.id}: share of right answers, and its standard error",
        columns=(*word_columns("task"), *rules),
        rows=(*rows, (text("mean of the tasks"), _score(point, MEAN), *absent)),
        notes=(
            f"harness: {point.result.harness}, {record.part.evaluation.shots} shots",
            *((f"model: {in_words(given)}",) if given else ()),
            f"{last.parameters:,} parameters, sha256 {last.sha256}",
            "rule: what the log-likelihood of an answer is divided by before the largest is taken",
        ),
    )
    if len(models) > 1:
        made = (f"checkpoint after step {one.step}: sha256 {one.checkpoint_sha256}" for one in models)
        yield Table(
            title=f"{point.id}: scores while the training went on",
            columns=(*word_columns("steps"), *number_columns(*names, MEAN)),
            rows=tuple(
                (text(str(step)), *(_score(point, f"{name}{end}") for name in (*names, MEAN)))
                for step, end in _steps(point)
            ),
            notes=tuple(made),
        )


def _steps(point: ScoredPoint) -> list[tuple[int, str]]:
    """Return the steps after which the model was scored, each with what ends the names of its numbers."""
    *before, last = [one.step or 0 for one in point.result.models]
    return [*((step, f"/step-{step}") for step in before), (last, "")]


def _score(point: ScoredPoint, name: str) -> Cell:
    score, error = point.measurement(name), point.measurement(f"{name}/error")
    return text(f"{score.median:.3f}" if score else ABSENT, f"±{error.median:.3f}" if error else "")


def overview(records: Sequence[EvaluationRecord], _drawn: PictureContext[EvaluationTables]) -> Overview:
    """Return the loss of a single record, and beside it the scores of its checkpoints."""
    return Overview(charts=tuple(_charts(records[0])) if len(records) == 1 else ())


def _charts(record: EvaluationRecord) -> Iterator[Chart]:
    trained = [point for point in record.points if values_of(point, "loss")]
    if trained:
        note = distance_in_words(trained, "loss")
        yield series_chart(trained, "loss", title="Loss", label="loss, nats/token", note=note)
    for point in (one for one in trained if len(one.result.models) > 1):
        names = (*(one.name for one in record.part.tasks), MEAN)
        curves = (curve(name, "measured", at, _spots(point, name)) for at, name in enumerate(names))
        yield LineChart(
            name=f"scores-{point.id}",
            title="Scores while the training went on",
            x_label="step",
            y_label="score",
            curves=tuple(curves),
            notes=("A bar is one standard error to each side.",),
        )


def _spots(point: ScoredPoint, name: str) -> Iterator[Spot]:
    for step, end in _steps(point):
        score, error = point.measurement(f"{name}{end}"), point.measurement(f"{name}{end}/error")
        if score and error:
            value, off = score.median, error.median
            yield Spot(x=step, value=value, low=value - off, high=value + off)
