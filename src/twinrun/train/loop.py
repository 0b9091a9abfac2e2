"""The training loop in PyTorch alone: one step after another, whoever shares the work."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol

from torch import Tensor, nn

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import attention, ranks, worker
from twinrun.train.checkpoint.session import checkpoints_of
from twinrun.train.checkpoint.state import Parts
from twinrun.train.corpus import Corpus
from twinrun.train.data import STREAMING_CHANGES, Batch, load_batches, load_corpus, set_position
from twinrun.train.device import device_of
from twinrun.train.metrics import Meter
from twinrun.train.optimizer import learning_rate
from twinrun.train.shared_work import SharedWorkMeter
from twinrun.train.validation import ValidationLoss

# A recipe's plain loop leaves the kernel of attention to PyTorch; layouts fix the fastest, as Composer's do.
FREE_ATTENTION = "chosen by PyTorch"


class StepEngine(Protocol):
    """What takes a step: PyTorch's own (`data_parallel`), or one that a recipe brings."""

    module: nn.Module
    parallelism: str
    weights_hash: str
    """Digest of the initial weights, empty where no rank has all of them."""
    changes: Mapping[str, str]
    """What is changed of a framework, by its name."""

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run; raises InputError where there is none."""

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Train one step; return the mean loss of this rank's sequences, or of all."""


def train(job: TrainingJob, *, engine: str | None = None) -> TrainingResult:
    """Train for the job's steps; return what was measured.

    Args:
        engine: module of the recipe that trains layouts of its own framework, see `training.with_engine`.
    """
    device = device_of(job)
    ranks.check_world_size(job)
    framework = _framework(job, engine)
    framework.start(job)
    corpus = load_corpus(job)
    free = job.training.attention == "sdpa" and not job.layout
    kernel = FREE_ATTENTION if free else worker.choose_attention(job, device)
    shared = SharedWorkMeter(job, device) if job.layout else None
    stepping: StepEngine = framework.build(job, device)
    meter = Meter(job, device)
    with contextlib.nullcontext() if free else attention.only(kernel):
        _steps(job, corpus, stepping, meter, shared)
    result = worker.collect(
        job,
        model=None,
        meter=meter,
        device=device,
        kernel=kernel,
        parallelism=stepping.parallelism,
        data_hash=corpus.sha256,
        data_server=corpus.server,
        weights_hash=stepping.weights_hash,
        changes={**stepping.changes, **STREAMING_CHANGES},
    )
    return result.model_copy(update={"shared": shared.result(stepping.module)}) if shared else result


def _steps(
    job: TrainingJob,
    corpus: Corpus,
    engine: StepEngine,
    meter: Meter,
    shared: SharedWorkMeter | None,
) -> None:
    """Train the steps that no checkpoint has, saving on the way."""
    saves = checkpoints_of(job, corpus=corpus, parts=engine.parts, meter=meter)
    validation = ValidationLoss(job, meter)
    done = saves.resume()
    batches = load_batches(job, corpus)
    set_position(batches, job, corpus, step=done)
    epochs = itertools.chain.from_iterable(itertools.repeat(batches))
    # Ranks of one replica read the same sequences, which count once.
    counts = ranks.rank() % job.replicas == 0
    meter.start()
    for step, read in zip(range(done, job.training.steps), epochs, strict=False):
        rate = learning_rate(step, job.training.optimizer, step_tokens=job.step_tokens)
        batch = {name: one.to(meter.device, non_blocking=True) for name, one in read.items()}
        if counts:
            meter.add_samples(batch["hashes"])
        with _counted(shared, step=step - done):
            loss = engine.step(batch, rate)
        if counts:
            meter.add_loss(loss, len(batch["tokens"]))
        del batch, loss
        if shared:
            shared.end_step(step - done)
        meter.end_step()
        validation.after_step(step + 1, engine.module)
        saves.after_step(step + 1)
    saves.wait()


def _counted(shared: SharedWorkMeter | None, *, step: int) -> AbstractContextManager[object]:
    return shared.counting(step) if shared else contextlib.nullcontext()


def _framework(job: TrainingJob, engine: str | None) -> ModuleType:
    """Return the module that starts ranks and builds engines; a recipe's is imported only where it runs."""
    if job.layout is None or job.layout.framework == "torch":
        from twinrun.train import data_parallel

        return data_parallel
    if engine is None:
        raise InputError(
            "no module trains this layout",
            place=f"layouts.{job.point}.framework",
            found=job.layout.framework,
            allowed="torch, or the framework of an [engine] that the recipe's script brings",
        )
    return importlib.import_module(engine)
