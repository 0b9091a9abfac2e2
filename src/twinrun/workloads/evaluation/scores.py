"""Scores of an evaluation: counted from what the ranks report, held against the plan, compared and shown.

The score of a task is named after it, `TASK`, its standard error `TASK/error`, and the score of an earlier
checkpoint `TASK/step-STEP`, its standard error `TASK/step-STEP/error`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from itertools import accumulate

from twinrun.foundation.text import GIB
from twinrun.manifests.vendor import Gpu
from twinrun.protocol.evaluation import MEAN, EvaluationLine, EvaluationResult, ModelScores
from twinrun.protocol.measurements import FORWARD_SHARE, Measurement, Numbers, single
from twinrun.protocol.model_source import in_words
from twinrun.protocol.training import StepMetrics
from twinrun.workloads.curve_distance import loss_chart, values_of
from twinrun.workloads.evaluation.plan import EvaluationPlan, EvaluationPoint, EvaluationTables, trained_at
from twinrun.workloads.settings import Factor, flat
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Table, number_columns, text, word_columns
from twinrun.workloads.training import numbers as trainings
from twinrun.workloads.workload import (
    ComparisonTerms,
    Finding,
    MeasuredPoint,
    Overview,
    PictureContext,
    Point,
    PointRecord,
    Progress,
    RecordView,
    held,
)

# Settings that say which model, and how it was trained.
OF_MODEL = ("evaluation.model", "evaluation.training.")
# Parts of a curve over which losses are averaged.
TENTHS = 10
FACTORS = (
    Factor("weights sha256", "none", "large", "other weights"),
    Factor("evaluation.tasks", "large", "large", "other questions"),
    Factor("evaluation.shots", "large", "large", "longer prompts, other answers"),
    Factor("rule of *", "none", "large", "another rule has moved HellaSwag by ten points"),
    Factor("prompts of *", "some", "large", "other prompts"),
    Factor("harness", "some", "large", "another version builds other prompts"),
    Factor("tokenizer sha256", "some", "large", "other tokens"),
    Factor("evaluation.precision", "large", "small", "rounding of log-likelihoods"),
    Factor("evaluation.batch", "some", "small", "size of one forward pass"),
    Factor("evaluation.*", "some", "some", "what is scored, and how"),
    *trainings.FACTORS,
)
ScoredPoint = MeasuredPoint[EvaluationPoint, EvaluationResult]
EvaluationRecord = RecordView[EvaluationPlan, EvaluationPoint]
RULES = ("none", "per-character", "per-byte", "per-token")


def progress(line: bytes) -> Progress:
    """Read the line that a training step or a finished task writes."""
    if b'"task":' not in line:
        step = StepMetrics.model_validate_json(line)
        return Progress(done=step.step, status=f"loss {step.loss:.4f}  {step.seconds:.3f} s/step")
    found = EvaluationLine.model_validate_json(line)
    return Progress(done=0, status=f"{found.task}: score {found.score:.3f}")


def numbers(
    part: EvaluationPlan, planned: Point[EvaluationPoint], result: EvaluationResult, gpu: Gpu | None
) -> Numbers:
    """Return scores with their errors, and times and losses of the training."""
    last = result.models[-1]
    ends = ((model, "" if model is last else f"/step-{model.step}") for model in result.models)
    found = [one for model, at in ends for one in _of_model(model, at)]
    requests, seconds, forward = (
        sum(getattr(one, name) for one in last.tasks) for name in ("requests", "seconds", "forward_seconds")
    )
    found += [
        single("requests-per-second", requests / seconds, "1/s"),
        single("forward-share", forward / seconds, "ratio", formula=FORWARD_SHARE),
        single("peak-memory", result.peak_memory_bytes / GIB, "GiB", per="device"),
    ]
    if result.training is None or part.trained is None:
        return Numbers(measurements=tuple(found))
    trained = trainings.numbers(part.trained, trained_at(part, planned), result.training, gpu)
    found += [one for one in trained.measurements if one.id != "peak-memory"]
    kept = kept_fall([step.loss for step in result.training.steps])
    found += [] if kept is None else [single("kept-fall", kept, "ratio")]
    return Numbers(measurements=tuple(found), series=trained.series, digests=trained.digests)


def _of_model(model: ModelScores, at: str) -> Iterator[Measurement]:
    """Yield what a model got on each task and in their mean, in which each counts once."""
    # The standard deviation of answers that are right or wrong, by n - 1.
    errors = [math.sqrt(one.score * (1 - one.score) / max(one.documents - 1, 1)) for one in model.tasks]
    for one, error in zip(model.tasks, errors, strict=True):
        yield from _score(f"{one.task}{at}", one.score, error, rule=one.rule, shots=str(one.shots))
    mean = statistics.fmean(one.score for one in model.tasks)
    yield from _score(f"{MEAN}{at}", mean, math.hypot(*errors) / len(errors))


def _score(name: str, value: float, error: float, **labels: str) -> Iterator[Measurement]:
    yield single(name, value, "ratio", metric="score", labels=labels)
    yield single(f"{name}/error", error, "ratio", metric="score-error")


def kept_fall(losses: Sequence[float]) -> float | None:
    """Return what a curve has kept at its end of its fall, 1 at most; None where it never fell.

    The ends of the fall are means over a tenth of the steps: the losses of single batches scatter.
    """
    size = max(1, len(losses) // TENTHS)
    sums = tuple(accumulate(losses, initial=0.0))
    means = [(end - begin) / size for begin, end in zip(sums, sums[size:], strict=False)]
    if not losses or not all(map(math.isfinite, losses)) or (fall := losses[0] - min(means)) <= 0:
        return None
    return max(0.0, (losses[0] - means[-1]) / fall)


def terms(part: EvaluationPlan, point: ScoredPoint) -> ComparisonTerms:
    """Return what an evaluation is compared by: scores only where tasks, rules and prompts are the same."""
    asked, result = part.evaluation, point.result
    prompts = {f"rule of {one.task}": str(one.rule) for one in result.models[-1].tasks}
    prompts |= {f"prompts of {one.task}": one.prompts_sha256 for one in result.models[-1].tasks}
    settings = {
        **prompts,
        "harness": result.harness,
        "tokenizer sha256": result.tokenizer_sha256,
        "weights sha256": result.models[-1].sha256,
    }
    asked_for = flat(asked, "evaluation.")
    settings |= {name: value for name, value in asked_for.items() if not name.startswith(OF_MODEL)}
    settings |= trainings.asked(part.trained) if part.trained else {}
    return ComparisonTerms(settings={"model": in_words(part.given), **settings} if part.given else settings)


def rules(part: EvaluationPlan, point: ScoredPoint) -> Iterator[Finding]:
    """Yield where an evaluation is not the planned one."""
    asked, result = part.evaluation, point.result
    training, last = asked.training, result.models[-1]
    yield from held("whether a model was trained", result.training is not None, part.trained is not None)
    if part.trained and result.training:
        sent = PointRecord(**{**dict(point.sent), "result": result.training})
        trained = MeasuredPoint(planned=trained_at(part, point.planned), sent=sent)
        yield from trainings.rules(part.trained, trained)
        parameters = part.trained.shape.parameters()
        yield from held("the parameters of the model that was scored", last.parameters, parameters)
        before = range(asked.every, training.steps, asked.every) if asked.every else ()
        yield from held("steps of models", [one.step for one in result.models], [*before, training.steps])
    if asked.tokenizer:
        yield from held("the digest of the tokenizer", result.tokenizer_sha256, asked.tokenizer)
    planned = [(task.name, task.rule, asked.shots) for task in part.tasks]
    for model in result.models:
        yield from held("tasks", [(one.task, one.rule, one.shots) for one in model.tasks], planned)
        for task, one in zip(part.tasks, model.tasks, strict=False):
            sizes = [size for size in (task.documents, asked.limit) if size is not None]
            planned_size = min(sizes) if task.documents else one.documents
            yield from held(f"documents of {task.name}", one.documents, planned_size)
            right = one.score * one.documents
            if not math.isclose(right, round(right), abs_tol=1e-6 * one.documents):
                allowed = f"a share of {one.documents}"
                yield Finding(what=f"the score of {task.name}", found=one.score, allowed=allowed)
            if one.requests < one.documents:
                allowed = f"{one.documents} or more"
                yield Finding(what=f"requests of {task.name}", found=one.requests, allowed=allowed)


def show(record: EvaluationRecord) -> tuple[Table, ...]:
    """Return the scores of every point, those of its checkpoints beside them."""
    return tuple(_table(record, point) for point in record.points)


def _table(record: EvaluationRecord, point: ScoredPoint) -> Table:
    *before, last = point.result.models
    ends, given = ("", *(f"/step-{one.step}" for one in before)), record.part.given
    rows = [
        (
            text(one.task),
            *(_cell(point, f"{one.task}{end}") for end in ends),
            text(one.rule),
            *(text(f"{one.by_rule[rule]:.3f}" if rule in one.by_rule else ABSENT) for rule in RULES),
            text(str(one.documents)),
        )
        for one in last.tasks
    ]
    means = (_cell(point, f"{MEAN}{end}") for end in ends)
    scores = number_columns("score", *(f"after\nstep {one.step}" for one in before))
    rules = (*word_columns("rule"), *number_columns(*RULES, "documents"))
    return Table(
        title=f"{point.id}: share of right answers, and its standard error",
        columns=(*word_columns("task"), *scores, *rules),
        rows=(*rows, (text("mean of the tasks"), *means, *[text(ABSENT)] * len(rules))),
        notes=(
            f"harness: {point.result.harness}, {record.part.evaluation.shots} shots",
            *((f"model: {in_words(given)}",) if given else ()),
            f"{last.parameters:,} parameters, sha256 {last.sha256}",
            "rule: what the log-likelihood of an answer is divided by before the largest is taken",
            *(f"checkpoint after step {one.step}: sha256 {one.checkpoint_sha256}" for one in before),
        ),
    )


def _cell(point: ScoredPoint, name: str) -> Cell:
    score, error = point.measurement(name), point.measurement(f"{name}/error")
    return text(f"{score.median:.3f}" if score else ABSENT, f"±{error.median:.3f}" if error else "")


def overview(records: Sequence[EvaluationRecord], _drawn: PictureContext[EvaluationTables]) -> Overview:
    """Return the losses of a single record."""
    trained = [one for record in records for one in record.points if values_of(one, "loss")]
    if len(records) > 1 or not trained:
        return Overview()
    return Overview(charts=(loss_chart(trained, title="Loss"),))
