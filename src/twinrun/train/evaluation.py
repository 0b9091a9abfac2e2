"""What every rank of an evaluation runs: `python -m twinrun.train.evaluation`.

A model that is there is scored as it is. A model of the recipe is trained first, from checkpoint to
checkpoint, and each of these is scored as a folder of transformers. What is finished is kept in the run's
folder, so that a later start goes on from there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from twinrun.checkpoints.conversion import write_folder
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.model_folder import digest_of_folder, stamps
from twinrun.checkpoints.tokenizer import FILE
from twinrun.checkpoints.verification import read_manifest
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.protocol.evaluation import SAMPLES, EvaluationJob, EvaluationResult, ModelScores
from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import device as devices
from twinrun.train import rank, ranks, training
from twinrun.train.scoring import subject
from twinrun.train.scoring.harness import RankedModel, TaskOutcome, demand_tasks, harness_name, score_task


class TrainedModel(Frozen):
    """What an earlier start has trained, and the checkpoint whose weights it has exported."""

    checkpoint_sha256: str
    result: TrainingResult


@dataclass(frozen=True, kw_only=True)
class FoundModel:
    """A model that can be loaded, and where what it got is kept."""

    folder: Path
    kept: Path
    sha256: str | None = None
    """Digest that it must have."""
    step: int | None = None
    checkpoint_sha256: str | None = None
    trained: TrainingResult | None = None


def evaluate(job: EvaluationJob) -> EvaluationResult:
    """Score the job's models, training them first where it says so; return what they got."""
    device = devices.device_of(job)
    ranks.join(job)
    if job.training:
        demand_tasks(job)
    models: list[ModelScores] = []
    for found in _models(job):
        scores, outcomes, tokenizer = _score(job, found, device)
        models.append(scores)
    samples = Path(job.metrics).parent / SAMPLES
    if rank.number() == 0:
        write_atomically(samples, samples_text(outcomes))
    ranks.wait()
    (peak,) = ranks.largest([devices.peak_memory_bytes(device)], device)
    return EvaluationResult(
        point=job.point,
        device_name=devices.name(device),
        libraries=devices.libraries(device),
        training=found.trained,
        models=tuple(models),
        samples_sha256=sha256_of_file(samples),
        harness=harness_name(),
        tokenizer_sha256=tokenizer,
        peak_memory_bytes=int(peak),
    )


def samples_text(outcomes: tuple[TaskOutcome, ...]) -> str:
    """Return the documents of all tasks as lines of JSON, by task and document."""
    found = [sample for one in outcomes for sample in one.samples]
    ordered = sorted(found, key=lambda one: (one.task, one.document))
    return "".join(f"{one.model_dump_json()}\n" for one in ordered)


def _score(
    job: EvaluationJob, found: FoundModel, device: torch.device
) -> tuple[ModelScores, tuple[TaskOutcome, ...], str]:
    """Return what a model got, by task and document, and the digest of its tokenizer."""
    written = stamps(found.folder)
    read = partial(digest_of_folder, found.folder, allowed=found.sha256)
    # The first rank alone reads all of its files.
    sha256: str = ranks.together(read, ranks.everyone())
    vocabulary = subject.vocabulary_of(found.folder)
    tokenizer = subject.load_tokenizer(found.folder, vocabulary=vocabulary, allowed=job.tokenizer)
    model = subject.load_model(found.folder, precision=job.precision, device=device)
    loaded = RankedModel(model, tokenizer=tokenizer, batch=job.batch)
    tensors = subject.digest_of_tensors(loaded.model)
    if (first := ranks.from_first(tensors)) != tensors:
        message = "this rank has loaded other weights than the first"
        raise RunError(message, place=str(found.folder), found=f"sha256 {tensors}", allowed=first)
    tasks = found.kept / "tasks"
    score = partial(score_task, job, model=loaded, sha256=sha256)
    outcomes = tuple(score(spec, file=tasks / f"{spec.name}.json") for spec in job.tasks)
    # Also now: pages of a file that was mapped into memory are read when they are needed.
    changed = {name for name, _ in stamps(found.folder).items() ^ written.items()}
    if changed:
        message, allowed = "the model was changed while it was scored", f"the files with the digest {sha256}"
        raise InputError(message, place=str(found.folder), found=sorted(changed), allowed=allowed)
    scores = ModelScores(
        step=found.step,
        checkpoint_sha256=found.checkpoint_sha256,
        sha256=sha256,
        tensors_sha256=tensors,
        parameters=loaded.model.num_parameters(),
        tasks=tuple(one.score for one in outcomes),
    )
    return scores, outcomes, subject.tokenizer_digest(loaded.tokenizer)


def _models(job: EvaluationJob) -> Iterator[FoundModel]:
    """Yield each model that is scored: the one that is there, or what the training has after some steps."""
    kept = Path(job.kept)
    if (given := job.model) is not None:
        yield FoundModel(folder=Path(given.folder), sha256=given.sha256, kept=kept / "model")
        return
    assert job.training is not None, "either a model is there, or one is trained"
    # The training is a part of this start of the point.
    training_job = job.training.model_copy(update={"attempt": job.attempt, "out": job.out})
    end = training_job.training.steps
    # Its end is always one.
    for step in (*range(job.every or end, end, job.every or end), end):
        folder = kept / f"step-{step}"
        trained = _train(training_job, step, folder)
        known: Any = {"checkpoint_sha256": trained.checkpoint_sha256, "trained": trained.result}
        yield FoundModel(folder=folder / "model", kept=folder, step=step, **known)


def _train(job: TrainingJob, step: int, folder: Path) -> TrainedModel:
    """Train up to `step` unless an earlier start has, and leave the model in `folder`."""
    trained, model = folder / "training.json", folder / "model"
    if not trained.is_file():
        if rank.number() == 0:
            # The lines of the steps before are written again.
            rank.start_over(job)
        ranks.wait()
        until = job.training.model_copy(update={"steps": step})
        done = training.train(job.model_copy(update={"training": until}))
        # A finished training is held in cycles, and the model that is scored needs its memory.
        gc.collect()
        digest = ranks.together(lambda: _export(job, step, model), ranks.everyone())
        if rank.number() == 0:
            whole = TrainedModel(checkpoint_sha256=digest, result=done)
            write_atomically(trained, whole.model_dump_json() + "\n")
        ranks.wait()
    return load_json(trained, TrainedModel)


def _export(job: TrainingJob, step: int, model: Path) -> str:
    """Write a checkpoint as a folder of transformers, unless it is there; return its manifest's digest."""
    assert job.checkpointing is not None, "a training that is scored saves"
    store, tokenizer = FolderStore(Path(job.checkpointing.place)), Path(job.data) / FILE
    if not model.exists():
        # In a container the ranks see the prepared data, and not what was fetched for it.
        write_folder(store, step, model, tokenizer=tokenizer if tokenizer.is_file() else None)
    return read_manifest(store, step).digest()


if __name__ == "__main__":
    rank.run(evaluate, EvaluationJob)
