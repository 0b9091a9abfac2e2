"""One task after another: asked once, kept in files of its own, and taken from these when a run goes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.utils import hash_string
from pydantic import Field

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.protocol.evaluation import EvaluationJob, EvaluationLine, NamedTask, Sample, TaskScore
from twinrun.train import rank, ranks
from twinrun.train.scoring import fixtures
from twinrun.train.scoring.documents import read_documents
from twinrun.train.scoring.harness import METRICS, Encode, RankedModel, RuledTask

# The harness has no answer without a filter, and this one changes none.
FILTER = "none"
# Of a log-likelihood; what follows is the rounding of 16 bits and of the batch.
DIGITS = 4
# The harness's hashes of a document, its prompt and its answer.
HASHES = ("doc_hash", "prompt_hash", "target_hash")


class TaskOutcome(Frozen):
    """A finished task as it waits for the others; the identity says what it is the outcome of."""

    identity: str
    score: TaskScore
    samples: tuple[Sample, ...] = Field(min_length=1)


def demand_tasks(job: EvaluationJob) -> None:
    """Raise InputError for a task that cannot be scored, before a training that may take hours."""
    for spec in job.tasks:
        _demand_documents(job, spec, build_task(job, spec, encode=_unasked))


def _unasked(context: str, answer: str) -> NoReturn:
    raise AssertionError(f"no model is asked yet: {context!r}, {answer!r}")


def score_tasks(
    job: EvaluationJob, model: RankedModel, *, sha256: str, folder: Path
) -> tuple[TaskOutcome, ...]:
    """Return the outcome of every task of the job; those that `folder` has of the same model are not run."""
    return tuple(_outcome(job, spec, model, sha256, folder / f"{spec.name}.json") for spec in job.tasks)


def _outcome(job: EvaluationJob, spec: NamedTask, model: RankedModel, sha256: str, file: Path) -> TaskOutcome:
    """Return the outcome of a task, the same on every rank, and keep it for a later start."""

    def report(done: int, requests: int, score: float | None = None) -> None:
        rank.report(
            EvaluationLine(
                point=job.point,
                attempt=job.attempt,
                task=spec.name,
                done=done,
                requests=requests,
                score=score,
            )
        )

    # All that decides it, the number of ranks aside.
    decides = job.model_dump(mode="json", include={"shots", "limit", "precision"})
    decides |= {**spec.model_dump(mode="json"), "model": sha256, "harness": harness_name()}
    identity = sha256_of_bytes(canonical_json(decides).encode())
    found = load_json(file, TaskOutcome) if file.is_file() else None
    if found is None or found.identity != identity:
        found = _run(job, spec, model, identity, report)
        if rank.number() == 0:
            write_atomically(file, found.model_dump_json() + "\n")
    ranks.wait()
    report(job.tasks.index(spec) + 1, len(job.tasks), found.score.score)
    return found


def harness_name() -> str:
    """Return name and version of the harness."""
    return f"lm-eval {version('lm-eval')}"


def _run(
    job: EvaluationJob, spec: NamedTask, model: RankedModel, identity: str, report: Callable[..., None]
) -> TaskOutcome:
    began = time.perf_counter()
    task = build_task(job, spec, encode=model._encode_pair)
    requests = _demand_documents(job, spec, task) * 4
    model.restart_count(lambda asked: report(min(asked, requests), requests))
    found: Any = lm_eval.evaluate(
        model, {"tasks": {spec.name: task}}, limit=job.limit, bootstrap_iters=1, log_samples=True
    )
    outcome = None
    if rank.number() == 0:
        rows = sorted(found["samples"][spec.name], key=lambda one: one["doc_id"])
        scores, metric = found["results"][spec.name], METRICS[spec.rule]
        error = scores[f"{metric}_stderr,{FILTER}"]
        score = TaskScore(
            task=spec.name,
            rule=spec.rule,
            shots=job.shots,
            documents=len(rows),
            score=scores[f"{metric},{FILTER}"],
            # One document has no spread.
            error=error if isinstance(error, float) else 0.0,
            by_rule={rule: scores[f"{name},{FILTER}"] for rule, name in METRICS.items()},
            # The harness's own hash of a task, of which it writes a line in its results.
            prompts_sha256=hash_string("".join(row[name] for row in rows for name in HASHES)),
            version=str(task.VERSION),
            requests=sum(len(row["arguments"]) for row in rows),
            batch=model.largest_batch,
            seconds=time.perf_counter() - began,
            forward_seconds=model.forward_seconds,
        )
        samples = tuple(
            Sample(
                task=spec.name,
                document=row["doc_id"],
                rule=spec.rule,
                score=row[metric],
                prompt_sha256=row["prompt_hash"],
                likelihoods=tuple(round(float(answer[0]), DIGITS) for answer in row["filtered_resps"]),
            )
            for row in rows
        )
        outcome = TaskOutcome(identity=identity, score=score, samples=samples)
    shared: TaskOutcome = ranks.from_first(outcome)
    return shared


def build_task(job: EvaluationJob, spec: NamedTask, *, encode: Encode) -> RuledTask:
    """Return a task of the harness, or one of ours, with every rule.

    Raises:
        InputError: there is no such task, it is no choice of answers, or it needs more shots.
    """
    config = dict(fixtures.configuration(spec.name) if spec.kind == "fixture" else _of_harness(job, spec))
    if config.get("output_type") != "multiple_choice":
        raise InputError(
            "a task that is no choice of answers", place=f"tasks.{spec.name}", found=config.get("output_type")
        )
    if (needed := config.get("num_fewshot")) and job.shots == 0:
        raise InputError(
            "the task needs shots", place="shots", found=job.shots, allowed=f"{needed}, as {spec.name} says"
        )
    if job.shots and spec.kind == "harness":
        raise InputError("the package has no examples for shots", place="shots", found=job.shots, allowed=0)
    config["num_fewshot"] = job.shots
    config["metric_list"] = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in METRICS.values()
    ]
    task = RuledTask(config, encode=encode)
    task.set_fewshot_seed(seed=1234)
    return task


@functools.cache
def _known_tasks() -> TaskManager:
    """Return the harness's list of tasks, which takes seconds to make: it has a file for each."""
    return TaskManager()


def _of_harness(job: EvaluationJob, spec: NamedTask) -> Mapping[str, Any]:
    """Return a task's configuration, its documents read from where `invoke data` has put them."""
    manager = _known_tasks()
    if spec.name not in manager.all_subtasks:
        raise InputError(
            "the harness has no such task",
            place=f"tasks.{spec.name}",
            found=spec.name,
            allowed=f"a task of {harness_name()}",
            hint=closest(spec.name, manager.all_subtasks),
        )
    documents = Path(job.documents if spec.packaged else job.given)
    found: Mapping[str, Any] = manager._factory._load_full_config(manager._index[spec.name], None)
    split = found.get("test_split") or found.get("validation_split")
    kept = {key: value for key, value in found.items() if key not in ("tag", "group", "task_list")}
    return {
        **kept,
        "custom_dataset": lambda **_options: {split: read_documents(documents, spec.name)},
        # Examples would be drawn from a split that the package does not have.
        "training_split": None,
        "validation_split": None if found.get("test_split") else split,
    }


def _demand_documents(job: EvaluationJob, spec: NamedTask, task: RuledTask) -> int:
    """Return how many documents are scored; raises InputError for another split than stated."""
    count = len(task.eval_docs)
    if spec.documents is not None and count != spec.documents:
        raise InputError(
            "another split than the published one",
            place=f"tasks.{spec.name}.documents",
            found=count,
            allowed=spec.documents,
        )
    return min(count, job.limit or count)
