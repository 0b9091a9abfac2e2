"""What the record of an evaluation shows: scores with what decides them, and how they and the loss went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.protocol.evaluation import MEAN, EvaluationResult
from twinrun.protocol.model_source import in_words
from twinrun.workloads.curve_charts import distance_in_words, series_chart
from twinrun.workloads.curve_distance import values_of
from twinrun.workloads.evaluation.manifest import EvaluationPlan, EvaluationPoint, EvaluationTables
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

EvaluationRecord = RecordView[EvaluationPlan, EvaluationPoint]
ScoredPoint = MeasuredPoint[EvaluationPoint, EvaluationResult]
RULES = ("none", "per-character", "per-byte", "per-token")


def show(record: EvaluationRecord) -> tuple[Table, ...]:
    """Return the scores of every point, and those of its checkpoints below."""
    return tuple(table for point in record.points for table in _tables(record, point))


def _tables(record: EvaluationRecord, point: ScoredPoint) -> Iterator[Table]:
    last, names = point.result.models[-1], [one.name for one in record.part.tasks]
    heads = (
        ("task", False),
        ("score", True),
        ("rule", False),
        *((rule, True) for rule in RULES),
        ("documents", True),
    )
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
    mean = (text("mean of the tasks"), _score(point, MEAN), *(text(ABSENT) for _ in heads[2:]))
    yield Table(
        title=f"{point.id}: share of right answers, and its standard error",
        columns=tuple(Column(title=title, numeric=numeric) for title, numeric in heads),
        rows=(*rows, mean),
        notes=(
            f"harness: {point.result.harness}, {record.part.evaluation.shots} shots",
            *(f"model: {in_words(given)}" for given in (record.part.given,) if given),
            f"{last.parameters:,} parameters, sha256 {last.sha256}",
            "rule: what the log-likelihood of an answer is divided by before the largest is taken",
        ),
    )
    if len(point.result.models) > 1:
        yield Table(
            title=f"{point.id}: scores while the training went on",
            columns=tuple(
                Column(title=title, numeric=bool(place))
                for place, title in enumerate(("steps", *names, MEAN))
            ),
            rows=tuple(
                (text(str(step)), *(_score(point, f"{name}{end}") for name in (*names, MEAN)))
                for step, end in _steps(point)
            ),
            notes=tuple(
                f"checkpoint after step {one.step}: sha256 {one.checkpoint_sha256}"
                for one in point.result.models
            ),
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
    for point in trained:
        names = (*(one.name for one in record.part.tasks), MEAN)
        curves = (
            Curve(label=name, kind="measured", place=place, spots=tuple(_spots(point, name)))
            for place, name in enumerate(names)
        )
        if len(point.result.models) > 1:
            yield LineChart(
                name=f"scores-{point.id}",
                title="Scores while the training went on",
                x_label="step",
                x_scale="linear",
                y_label="score",
                y_scale="linear",
                curves=tuple(curves),
                notes=("A bar is one standard error to each side.",),
            )


def _spots(point: ScoredPoint, name: str) -> Iterator[Spot]:
    for step, end in _steps(point):
        score, error = point.measurement(f"{name}{end}"), point.measurement(f"{name}{end}/error")
        if score and error:
            value, off = score.median, error.median
            yield Spot(x=step, value=value, low=value - off, high=value + off)
