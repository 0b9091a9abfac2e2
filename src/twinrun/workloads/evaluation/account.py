"""What an evaluation must have: every task by its rule over all its documents, and the whole training."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from twinrun.protocol.evaluation import MEAN, NamedTask
from twinrun.protocol.formulas import FORWARD_SHARE
from twinrun.workloads.account import HASH, TEXT, Allowed, facts_held, held, measurements_held, series_held
from twinrun.workloads.evaluation.manifest import EvaluationPlan, EvaluationPoint, EvaluationTables
from twinrun.workloads.workload import Account, Gap, Point, PointRecord

_NAME = r"[^/@]+"
MEASURED = {
    "score": re.compile(rf"{_NAME}(@[^/]+|/step-[0-9]+)?"),
    "score-error": re.compile(rf"{_NAME}(/step-[0-9]+)?/error"),
    "step-time": re.compile("step-time"),
    "peak-memory": re.compile("peak-memory"),
    "requests-per-second": re.compile("requests-per-second"),
    "forward-share": re.compile("forward-share"),
}
ROUNDED = 1e-9


def as_planned(
    part: EvaluationPlan, planned: Point[EvaluationPoint], point: PointRecord[EvaluationPoint]
) -> Iterator[Gap]:
    """Yield where an evaluation is not the planned one."""
    training = part.evaluation.training
    trained = part.given is None
    names = [*(task.name for task in part.tasks), MEAN]
    steps = [end for name in names for end in (name, f"{name}/error")]
    for step in _earlier(part):
        steps += [end for name in names for end in (f"{name}/step-{step}", f"{name}/step-{step}/error")]
    wanted = dict.fromkeys([*steps, "peak-memory", "requests-per-second", "forward-share"], 1)
    if trained:
        wanted["step-time"] = training.steps - training.warmup_steps
    yield from measurements_held(point, wanted)
    yield from series_held(point, {"loss": training.steps} if trained else {})
    yield from held("attempts", len(point.attempts) < max(1, len(planned.part.microbatches)), True)
    for one in point.measurements:
        base = one.id.partition("@")[0]
        if one.metric in ("score", "score-error") and base not in wanted:
            yield Gap(path=f"measurements.{one.id}", found="there", allowed="a task and step of the plan")
    if share := point.measurement("forward-share"):
        yield from held("measurements.forward-share.formula", share.formula, FORWARD_SHARE)
    for task in part.tasks:
        yield from _task(part, task, point)
    for end in ("", *(f"/step-{step}" for step in _earlier(part))):
        yield from _mean(part, point, end)
    # Records from before have no digest of what was loaded.
    yield from facts_held(point, _facts(part, planned), optional={"tensors sha256": HASH})


def _earlier(part: EvaluationPlan) -> range:
    """Return the steps whose checkpoints are scored before the last."""
    every, last = part.evaluation.every, part.evaluation.training.steps
    return range(every, last, every) if every and part.given is None else range(0)


def _task(part: EvaluationPlan, task: NamedTask, point: PointRecord) -> Iterator[Gap]:
    """Hold a score against its documents, and its error against both."""
    score = point.measurement(task.name)
    documents = point.facts.get(f"documents of {task.name}")
    if score is None or not isinstance(documents, int) or isinstance(documents, bool):
        return
    if documents < 1:
        yield Gap(path=f"facts.documents of {task.name}", found=str(documents), allowed="1 or more")
        return
    labels = {"rule": task.rule, "shots": str(part.evaluation.shots)}
    yield from held(f"measurements.{task.name}.labels", score.labels, labels)
    requests = point.facts.get(f"requests of {task.name}")
    if isinstance(requests, int) and requests < documents:
        yield Gap(path=f"facts.requests of {task.name}", found=str(requests), allowed=f"{documents} or more")
    ends = ("", *(f"/step-{step}" for step in _earlier(part)))
    for end in ends:
        found = point.measurement(f"{task.name}{end}")
        error = point.measurement(f"{task.name}{end}/error")
        if found is None or error is None:
            continue
        right = found.median * documents
        if not math.isclose(right, round(right), abs_tol=1e-6 * documents):
            yield Gap(
                path=f"measurements.{found.id}", found=f"{found.median:g}", allowed=f"a share of {documents}"
            )
        # The standard deviation of answers that are right or wrong, by n - 1.
        expected = math.sqrt(max(found.median * (1 - found.median), 0) / max(documents - 1, 1))
        if not math.isclose(error.median, expected, rel_tol=1e-6, abs_tol=ROUNDED):
            yield Gap(
                path=f"measurements.{error.id}",
                found=f"{error.median:g}",
                allowed=f"{expected:g}, from its score and documents",
            )


def _mean(part: EvaluationPlan, point: PointRecord, end: str) -> Iterator[Gap]:
    names = [task.name for task in part.tasks]
    scores = [one.median for name in names if (one := point.measurement(f"{name}{end}"))]
    errors = [one.median for name in names if (one := point.measurement(f"{name}{end}/error"))]
    if len(scores) < len(names) or len(errors) < len(names):
        return
    values = {
        f"{MEAN}{end}": sum(scores) / len(scores),
        f"{MEAN}{end}/error": math.sqrt(sum(one**2 for one in errors)) / len(errors),
    }
    for name, value in values.items():
        found = point.measurement(name)
        if found and not math.isclose(found.median, value, rel_tol=ROUNDED, abs_tol=ROUNDED):
            yield Gap(
                path=f"measurements.{name}", found=f"{found.median:g}", allowed=f"{value:g}, of the tasks"
            )


def _facts(part: EvaluationPlan, planned: Point[EvaluationPoint]) -> dict[str, Allowed]:
    found: dict[str, Allowed] = {
        "device name": TEXT,
        "harness": TEXT,
        "tokenizer sha256": (part.evaluation.tokenizer,) if part.evaluation.tokenizer else HASH,
        "samples sha256": HASH,
        "weights sha256": HASH,
        "checkpoint sha256": HASH if part.given is None else (None,),
        "parameters": (part.shape.parameters(),) if part.shape else int,
    }
    if part.given is None:
        training: dict[str, Allowed] = {
            "microbatch": planned.part.microbatches,
            "parallelism": ("single", "replicated") if planned.world_size == 1 else TEXT,
            "attention backend": TEXT,
            "data hash": HASH,
            "order hash": HASH,
            "initial weights hash": HASH,
        }
        found |= training
    for step in _earlier(part):
        found |= {f"weights sha256 at step {step}": HASH, f"checkpoint sha256 at step {step}": HASH}
    limit = part.evaluation.limit
    for task in part.tasks:
        sizes = [one for one in (task.documents, limit) if one is not None]
        found |= {
            f"rule of {task.name}": (task.rule,),
            f"documents of {task.name}": (min(sizes),) if sizes and task.documents else int,
            f"requests of {task.name}": int,
            f"prompts of {task.name}": HASH,
            f"version of {task.name}": TEXT,
            f"batch of {task.name}": int,
        }
    return found


def of_recipe(
    tables: EvaluationTables, part: EvaluationPlan, points: Sequence[Point[EvaluationPoint]]
) -> Iterator[Gap]:
    """Yield where model, data, tasks or documents are not those that the recipe has by their names."""
    yield from held("plan.points", len(points), 1)
    asked = part.evaluation
    named = tuple(
        NamedTask(name=name, **tables.tasks[name].model_dump())
        for name in asked.tasks
        if name in tables.tasks
    )
    yield from held("plan.part.tasks", part.tasks, named)
    if part.documents is not None:
        yield from held("plan.part.documents", part.documents, tables.documents)
    if part.given is None:
        yield from held("plan.part.shape", part.shape, tables.models.get(asked.training.model))
        yield from held("plan.part.data", part.data, tables.data.get(asked.training.data))


ACCOUNT = Account(measured=MEASURED, as_planned=as_planned, of_recipe=of_recipe)
