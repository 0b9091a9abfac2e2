"""What the record of an evaluation shows: each task with its score, its error and what decides them."""

from __future__ import annotations

from twinrun.protocol.evaluation import MEAN
from twinrun.protocol.measurements import Measurement
from twinrun.workloads.evaluation.manifest import EvaluationPlan, EvaluationPoint
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Table, text
from twinrun.workloads.workload import PointRecord, RecordTables, RecordView

RULES = ("none", "per-character", "per-byte", "per-token")
COLUMNS = (
    Column(title="task", numeric=False),
    Column(title="score"),
    Column(title="rule", numeric=False),
    *(Column(title=rule) for rule in RULES),
    Column(title="documents"),
)


def show(record: RecordView[EvaluationPlan, EvaluationPoint]) -> RecordTables:
    """Return the scores of every point, and those of earlier checkpoints below."""
    tables = [table for point in record.points for table in (_scores(record, point), *_steps(record, point))]
    return RecordTables(tables=tuple(tables))


def _scores(
    record: RecordView[EvaluationPlan, EvaluationPoint], point: PointRecord[EvaluationPoint]
) -> Table:
    names = [one.name for one in record.part.tasks]
    rows = [_row(point, name) for name in names]
    mean = (text("mean of the tasks"), _score(point, MEAN), *(text(ABSENT) for _ in range(len(COLUMNS) - 2)))
    return Table(
        title=f"{point.id}: share of right answers, and its standard error",
        columns=COLUMNS,
        rows=(*rows, mean),
        notes=(
            f"harness: {point.facts['harness']}, {record.part.evaluation.shots} shots",
            f"weights: sha256 {point.facts['weights sha256']}",
            "rule: what the log-likelihood of an answer is divided by before the largest is taken",
        ),
    )


def _row(point: PointRecord, name: str) -> tuple[Cell, ...]:
    rule = str(point.facts[f"rule of {name}"])
    others = (text(_points(point.measurement(name if one == rule else f"{name}@{one}"))) for one in RULES)
    return (
        text(name),
        _score(point, name),
        text(rule),
        *others,
        text(str(point.facts[f"documents of {name}"])),
    )


def _score(point: PointRecord, name: str) -> Cell:
    error = point.measurement(f"{name}/error")
    return text(_points(point.measurement(name)), f"±{error.median:.3f}" if error else "")


def _points(found: Measurement | None) -> str:
    return f"{found.median:.3f}" if found else ABSENT


def _steps(
    record: RecordView[EvaluationPlan, EvaluationPoint], point: PointRecord[EvaluationPoint]
) -> tuple[Table, ...]:
    """Return the scores of the checkpoints before the last, where there are any."""
    prefix = f"{MEAN}/step-"
    steps = [one.id.removeprefix(prefix) for one in point.measurements if one.id.startswith(prefix)]
    if not steps:
        return ()
    names = (*(one.name for one in record.part.tasks), MEAN)
    return (
        Table(
            title=f"{point.id}: scores while the training went on",
            columns=(Column(title="steps", numeric=False), *(Column(title=name) for name in names)),
            rows=tuple(
                (text(step), *(text(_points(point.measurement(f"{name}/step-{step}"))) for name in names))
                for step in steps
            ),
        ),
    )
