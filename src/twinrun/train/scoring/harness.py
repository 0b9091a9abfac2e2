"""lm-eval as this project runs it: one task after another, asked once, kept in files, taken from these later.

The harness builds prompts, asks the model and picks answers. Ours are one more rule, by which the
log-likelihood of an answer is divided by its tokens, and ranks of torch.distributed in place of accelerate's.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval
import torch
import torch.distributed as dist
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import hash_string
from pydantic import Field

from twinrun.foundation.errors import InputError, RunError, closest, require_known
from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.protocol.evaluation import EvaluationJob, EvaluationLine, NamedTask, Sample, ScoreRule, TaskScore
from twinrun.train import device as devices
from twinrun.train import rank, ranks
from twinrun.train.prepare import standard_library
from twinrun.train.scoring.documents import read_documents

# The harness's metric for each rule; the last is its `acc` where log-likelihoods are divided by tokens.
METRICS: Mapping[ScoreRule, str] = {
    "none": "acc",
    "per-character": "acc_norm",
    "per-byte": "acc_bytes",
    "per-token": "acc_tokens",
}
# The harness's hashes of a document, its prompt and its answer.
HASHES = ("doc_hash", "prompt_hash", "target_hash")
# Of a log-likelihood; what follows is the rounding of 16 bits and of the batch.
DIGITS = 4
# Documents of a task of ours, and characters of a context and of what follows it.
PLANTED_DOCUMENTS, CONTEXT, ANSWER = 48, 96, 32


class RankedModel(HFLM):
    """A model of transformers on each rank, which share the documents of a task."""

    def __init__(self, model: Any, *, tokenizer: Any, batch: int | str) -> None:
        loaded = {"pretrained": model, "tokenizer": tokenizer, "backend": "causal"}
        super().__init__(**loaded, batch_size=batch, max_batch_size=512)
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.restart()

    def restart(self) -> None:
        """Count sequences and time of the next task from 0; it finds a batch of its own."""
        self._asked, self.forward_seconds = 0, 0.0
        self.batch_sizes: dict[int, int] = {}

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks one after another."""
        if self.world_size == 1:
            return tensor
        found = tensor.new_empty(self.world_size * tensor.numel())
        dist.all_gather_into_tensor(found, tensor.reshape(-1))
        return found

    def barrier(self) -> None:
        """Wait for all ranks."""
        ranks.wait()

    @property
    def largest_batch(self) -> int:
        """Sequences of one forward pass; of those that memory decided the largest, 0 where none was asked."""
        fixed = self.batch_size_per_gpu
        return fixed if isinstance(fixed, int) else max(self.batch_sizes.values(), default=0)

    def _loglikelihood_tokens(self, requests: Any, *arguments: Any, **named: Any) -> Any:
        longest = max(len(answer) for _, _, answer in requests)
        if longest > self.max_length:
            # The harness cuts contexts, and ends by an assertion of its own where an answer does not fit.
            message, found = "an answer is longer than the model takes at once", f"{longest} tokens"
            raise InputError(message, place="tasks", found=found, allowed=f"up to {self.max_length}")
        return super()._loglikelihood_tokens(requests, *arguments, **named)

    def _model_call(self, inps: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        rank.beat("scores a batch", step=self._asked)
        devices.synchronise(self.device)
        began = time.perf_counter()
        logits = super()._model_call(inps, *arguments, **named)
        devices.synchronise(self.device)
        self.forward_seconds += time.perf_counter() - began
        self._asked += len(inps)
        return logits

    def _detect_batch_size(self, *arguments: Any, **named: Any) -> Any:
        asked, seconds = self._asked, self.forward_seconds
        found = super()._detect_batch_size(*arguments, **named)
        # Trials that look for a batch size answer no request.
        self._asked, self.forward_seconds = asked, seconds
        return found


class TaskOutcome(Frozen):
    """A finished task as it waits for the others; the identity says what it is the outcome of."""

    identity: str
    score: TaskScore
    samples: tuple[Sample, ...] = Field(min_length=1)


def harness_name() -> str:
    """Return name and version of the harness."""
    return f"lm-eval {version('lm-eval')}"


def demand_tasks(job: EvaluationJob) -> None:
    """Raise InputError for a task that cannot be scored, before a training that may take hours."""
    for spec in job.tasks:
        build_task(job, spec)


def score_task(
    job: EvaluationJob, spec: NamedTask, model: RankedModel, *, sha256: str, file: Path
) -> TaskOutcome:
    """Return the outcome of a task, the same on every rank, and keep it in `file` for a later start.

    Args:
        sha256: digest of the model.
    """
    # All that decides it, the number of ranks aside.
    decides = job.model_dump(mode="json", include={"shots", "limit", "precision"})
    decides |= {**spec.model_dump(mode="json"), "model": sha256, "harness": harness_name()}
    identity = sha256_of_bytes(canonical_json(decides).encode())
    found = load_json(file, TaskOutcome) if file.is_file() else None
    if found is None or found.identity != identity:
        found = _run(job, spec, model, identity)
        if rank.number() == 0:
            write_atomically(file, found.model_dump_json() + "\n")
    ranks.wait()
    told = {"point": job.point, "attempt": job.attempt, "task": spec.name}
    rank.report(EvaluationLine(**told, score=found.score.score))
    return found


def _run(job: EvaluationJob, spec: NamedTask, model: RankedModel, identity: str) -> TaskOutcome:
    began, task = time.perf_counter(), build_task(job, spec)
    model.restart()
    found: Any = lm_eval.evaluate(
        model, {"tasks": {spec.name: task}}, limit=job.limit, bootstrap_iters=1, log_samples=True
    )

    def outcome() -> TaskOutcome:
        rows = sorted(found["samples"][spec.name], key=lambda one: one["doc_id"])
        for row in rows:
            row[METRICS["per-token"]] = per_token(task, row, model)
        scores = [float(row[METRICS[spec.rule]]) for row in rows]
        score = TaskScore(
            task=spec.name,
            rule=spec.rule,
            shots=job.shots,
            documents=len(rows),
            score=statistics.fmean(scores),
            # One document has no spread.
            error=statistics.stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0,
            by_rule={rule: statistics.fmean(row[name] for row in rows) for rule, name in METRICS.items()},
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
                score=one,
                prompt_sha256=row["prompt_hash"],
                likelihoods=tuple(round(float(answer[0]), DIGITS) for answer in row["filtered_resps"]),
            )
            for row, one in zip(rows, scores, strict=True)
        )
        return TaskOutcome(identity=identity, score=score, samples=samples)

    shared: TaskOutcome = ranks.together(outcome, ranks.everyone())
    return shared


def per_token(task: ConfigurableTask, row: Mapping[str, Any], model: Any) -> float:
    """Return whether the right answer has the largest log-likelihood for each of its tokens, 1.0 or 0.0.

    LLM Foundry takes the lowest perplexity, exp(-log-likelihood / tokens), which is the same answer.

    Args:
        row: the harness's sample of a document.

    Raises:
        RunError: the model gave no number.
    """
    likelihoods = [float(one[0]) for one in row["filtered_resps"]]
    if any(math.isnan(one) for one in likelihoods):
        message, found = "the model's logits are not numbers", f"log-likelihoods {likelihoods}"
        hint = "a training that diverged, or a precision that overflows"
        raise RunError(message, place=task.config.task, found=found, hint=hint)
    tokens = [len(model._encode_pair(*pair)[1]) for pair in row["arguments"]]
    shared = [(one / count, False) for one, count in zip(likelihoods, tokens, strict=True)]
    return float(task.process_results(row["doc"], shared)["acc"])


def build_task(job: EvaluationJob, spec: NamedTask) -> ConfigurableTask:
    """Return a task of the harness, or one of ours, with the harness's rules.

    Raises:
        InputError: there is no such task, it is no choice of answers, it needs more shots, or its split is
            another than stated.
    """
    place = f"tasks.{spec.name}"
    if spec.kind == "fixture":
        require_known(spec.name, PLANTED, "no task of ours", place=place)
    config = dict(PLANTED[spec.name]() if spec.kind == "fixture" else _of_harness(job, spec))
    if config.get("output_type") != "multiple_choice":
        raise InputError("a task that is no choice of answers", place=place, found=config.get("output_type"))
    if (needed := config.get("num_fewshot")) and job.shots == 0:
        allowed = f"{needed}, as {spec.name} says"
        raise InputError("the task needs shots", place="shots", found=job.shots, allowed=allowed)
    if job.shots and spec.kind == "harness":
        raise InputError("the package has no examples for shots", place="shots", found=job.shots, allowed=0)
    mean = {"aggregation": "mean", "higher_is_better": True}
    metrics = [{"metric": name, **mean} for name in [*METRICS.values()][:3]]
    task = ConfigurableTask(config=config | {"num_fewshot": job.shots, "metric_list": metrics})
    task.set_fewshot_seed(seed=1234)
    if spec.documents not in (None, found := len(task.eval_docs)):
        message = "another split than the published one"
        raise InputError(message, place=f"{place}.documents", found=found, allowed=spec.documents)
    return task


# The harness's list of tasks takes seconds to make: it has a file for each.
_known_tasks = functools.cache(TaskManager)


def _of_harness(job: EvaluationJob, spec: NamedTask) -> Mapping[str, Any]:
    """Return a task's configuration, its documents read from where `invoke data` has put them."""
    manager = _known_tasks()
    if spec.name not in manager.all_subtasks:
        message, hint = "the harness has no such task", closest(spec.name, manager.all_subtasks)
        place, allowed = f"tasks.{spec.name}", f"a task of {harness_name()}"
        raise InputError(message, place=place, found=spec.name, allowed=allowed, hint=hint)
    documents = Path(job.documents if spec.packaged else job.given)
    found: Mapping[str, Any] = manager._factory._load_full_config(manager._index[spec.name], None)
    split = found.get("test_split") or found.get("validation_split")
    kept = {key: value for key, value in found.items() if key not in ("tag", "group", "task_list")}
    # Examples would be drawn from a split that the package does not have.
    splits = {"training_split": None, "validation_split": None if found.get("test_split") else split}
    read = {"custom_dataset": lambda **_options: {split: read_documents(documents, spec.name)}}
    return kept | splits | read


def planted(name: str, documents: Callable[[], Iterator[dict[str, Any]]], **keys: str) -> dict[str, Any]:
    """Return the configuration of a task of ours: which of some choices follows a context."""
    asked = {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "right"} | keys
    fixed = {"task": name, "output_type": "multiple_choice", "test_split": "test", "target_delimiter": ""}
    read = {"custom_dataset": lambda **_options: {"test": Dataset.from_list(list(documents()))}}
    return asked | fixed | read | {"metadata": {"version": 1.0}}


def passages(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield passages of the running interpreter's standard library, and what follows each."""
    # Of its bytes at most four are a character.
    paths = [path for path in standard_library() if path.stat().st_size > 4 * (CONTEXT + ANSWER)]
    for path in draw.choices(paths, k=PLANTED_DOCUMENTS):
        text = path.read_text("utf-8", "replace")
        begin = draw.randrange(len(text) - CONTEXT - ANSWER)
        yield text[begin : begin + CONTEXT], text[begin + CONTEXT : begin + CONTEXT + ANSWER]


def _shuffled() -> Iterator[dict[str, Any]]:
    draw = random.Random(1)  # noqa: S311
    for number, (context, answer) in enumerate(passages(draw)):
        choices = [answer, "".join(draw.sample(answer, ANSWER))]
        right = number % 2
        yield {"context": context, "choices": choices[::-1] if right else choices, "right": right}


# Tasks of ours by name: they need no data, and say nothing of a model that was trained on other text.
PLANTED: dict[str, Callable[[], Mapping[str, Any]]] = {}
PLANTED["fixture-shuffled"] = functools.partial(planted, "fixture-shuffled", _shuffled)
