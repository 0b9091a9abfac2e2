"""A point of a training sweep in PyTorch alone, no Composer, none of our kernels: the baseline."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import ranks, worker
from twinrun.train.canonical import Batch, CanonicalGradients
from twinrun.train.checkpoint.session import checkpoints_of
from twinrun.train.data import load_batches, load_corpus, set_position
from twinrun.train.device import device_of
from twinrun.train.metrics import Meter
from twinrun.train.models import IGNORED, Model, family_of
from twinrun.train.optimizer import adamw, learning_rate, set_learning_rate
from twinrun.train.sharding import GradientSync, gradient_excess, shard

Loss = Callable[[Tensor], Tensor]


class Gradients(Protocol):
    """How a trainer comes to the gradients of a step."""

    def of_step(self, batch: Batch, meter: Meter) -> None:
        """Leave the mean gradients of a global batch in the parameters, and its loss in `meter`."""


def train(job: TrainingJob) -> TrainingResult:
    """Train for the job's steps; return what was measured."""
    canonical = job.training.summation == "canonical"
    if job.world_size > 1 and job.sharding == "none" and not canonical:
        raise InputError("the plain loop shards over ranks", place="--set sharding", allowed="full")
    device = device_of(job)
    ranks.join(job, alone=job.sharding == "full" and not canonical)
    corpus = load_corpus(job)

    model = initial_model(job, device)
    weights_hash = worker.digest_of(model)
    gradients: Gradients = (
        CanonicalGradients(model, job, loss_of=single(model, job))
        if canonical
        else GradientAccumulation(model, job, device)
    )
    optimizer = adamw(model, job.training.optimizer)
    batches = load_batches(job, corpus)
    epochs = itertools.repeat(batches)

    meter = Meter(job, device)
    saves = checkpoints_of(job, corpus=corpus, model=model, optimizer=optimizer, meter=meter)
    done = saves.resume()
    set_position(batches, job, corpus, step=done)
    meter.start()
    steps = range(done, job.training.steps)
    for step, batch in zip(steps, itertools.chain.from_iterable(epochs), strict=False):
        rate = learning_rate(step, job.training.optimizer, step_tokens=job.step_tokens)
        set_learning_rate(optimizer, rate)
        here = {name: one.to(device, non_blocking=True) for name, one in batch.items()}
        meter.add_samples(here["hashes"])
        gradients.of_step(here, meter)
        nn.utils.clip_grad_norm_(model.parameters(), job.training.optimizer.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.end_step()
        saves.after_step(step + 1)
    saves.wait()

    return worker.collect(
        job,
        meter=meter,
        device=device,
        kernel="chosen by PyTorch",
        parallelism=_parallelism(job),
        data_hash=corpus.sha256,
        weights_hash=weights_hash,
    )


def _parallelism(job: TrainingJob) -> str:
    if job.training.summation == "canonical":
        return "replicated"
    return "single" if job.sharding == "none" else "fsdp2"


class GradientAccumulation:
    """Adds up the gradients of one microbatch after the other, and lets FSDP2 sum over the ranks."""

    def __init__(self, model: Model, job: TrainingJob, device: torch.device) -> None:
        alone = job.sharding == "none"
        self._job = job
        self._loss_of = single(model, job) if alone else sharded(model, job)
        self._excess = 1.0 if alone else gradient_excess(device)
        once = job.training.reduction == "step"
        self._once = GradientSync(model, microbatches=job.microbatches) if once else None

    def of_step(self, batch: Batch, meter: Meter) -> None:
        """See Gradients."""
        for tokens_BS in batch["tokens"].split(self._job.microbatch):
            if self._once:
                self._once.before_forward()
            loss = self._loss_of(tokens_BS)
            meter.add_loss(loss, len(tokens_BS))
            (loss * len(tokens_BS) / self._job.device_batch / self._excess).backward()


def initial_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the model with attention as PyTorch chooses it, nothing recomputed, nothing compiled."""
    plain = job.training.model_copy(update={"attention": "sdpa", "activation_checkpointing": False})
    with torch.device(device):
        model = family_of(job.shape).build(job.shape, training=plain)
    worker.initialise(model, job)
    return model


def single(model: Model, job: TrainingJob) -> Loss:
    """Return the loss on one device, model and cross entropy compiled as one."""

    def loss_of(tokens_BS: Tensor) -> Tensor:
        return next_token_loss(model(tokens_BS), tokens_BS)

    return torch.compile(loss_of, dynamic=False) if job.training.compile else loss_of


def sharded(model: Model, job: TrainingJob) -> Loss:
    """Return the loss with FSDP2 around each block and the model, and compiled blocks."""
    head = next_token_loss
    if job.training.compile:
        for block in model.blocks:
            block.compile(dynamic=False)
        head = torch.compile(next_token_loss, dynamic=False)
    shard(model, job)
    return lambda tokens_BS: head(model(tokens_BS), tokens_BS)


def next_token_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return the mean cross entropy over all predicted tokens, nats per token."""
    targets_BS = pad(tokens_BS[:, 1:], (0, 1), value=IGNORED)
    return cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED)
