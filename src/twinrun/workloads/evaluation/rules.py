"""What an evaluation must have: every task by its rule over all its documents, and the whole training."""

from __future__ import annotations

import math
from collections.abc import Iterator

from twinrun.protocol.evaluation import EvaluationResult, NamedTask, TaskScore
from twinrun.workloads.evaluation.manifest import EvaluationPlan, EvaluationPoint, EvaluationTables
from twinrun.workloads.training.rules import of_training
from twinrun.workloads.workload import Finding, MeasuredPoint, held


def rules(
    _tables: EvaluationTables, part: EvaluationPlan, point: MeasuredPoint[EvaluationPoint, EvaluationResult]
) -> Iterator[Finding]:
    """Yield where an evaluation is not the planned one."""
    asked, result = part.evaluation, point.result
    training, last = asked.training, result.models[-1]
    yield from held("whether a model was trained", result.training is not None, part.shape is not None)
    if part.shape and result.training:
        yield from of_training(training, part.shape, result.training, begin=0, end=training.steps)
        yield from held(
            "the parameters of the model that was scored", last.parameters, part.shape.parameters()
        )
        before = range(asked.every, training.steps, asked.every) if asked.every else ()
        yield from held("steps of models", [one.step for one in result.models], [*before, training.steps])
    if asked.tokenizer:
        yield from held("the digest of the tokenizer", result.tokenizer_sha256, asked.tokenizer)
    planned = [(task.name, task.rule, asked.shots) for task in part.tasks]
    for model in result.models:
        yield from held("tasks", [(one.task, one.rule, one.shots) for one in model.tasks], planned)
        for task, one in zip(part.tasks, model.tasks, strict=False):
            yield from _score(task, one, asked.limit)


def _score(task: NamedTask, one: TaskScore, limit: int | None) -> Iterator[Finding]:
    """Hold a score against its documents, and its error against both."""
    sizes = [size for size in (task.documents, limit) if size is not None]
    if task.documents:
        yield from held(f"documents of {task.name}", one.documents, min(sizes))
    if one.requests < one.documents:
        yield Finding(what=f"requests of {task.name}", found=one.requests, allowed=f"{one.documents} or more")
    right = one.score * one.documents
    # The standard deviation of answers that are right or wrong, by n - 1.
    error = math.sqrt(one.score * (1 - one.score) / max(one.documents - 1, 1))
    if not math.isclose(right, round(right), abs_tol=1e-6 * one.documents):
        yield Finding(
            what=f"the score of {task.name}", found=one.score, allowed=f"a share of {one.documents}"
        )
    if not math.isclose(error, one.error, rel_tol=1e-6, abs_tol=1e-9):
        yield Finding(what=f"the error of {task.name}", found=one.error, allowed=error)
