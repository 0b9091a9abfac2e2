"""A point of a training sweep in PyTorch alone, no Composer, none of our kernels: the baseline."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, pad

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import ranks, worker
from twinrun.train.checkpoint.session import checkpoints_of
from twinrun.train.data import load_batches, load_corpus, set_position
from twinrun.train.device import device_of
from twinrun.train.metrics import Meter
from twinrun.train.models import DTYPES, IGNORED, Model, family_of
from twinrun.train.optimizer import adamw, learning_rate, set_learning_rate
from twinrun.train.sharding import OncePerStep, gradient_excess

Loss = Callable[[Tensor], Tensor]


def train(job: TrainingJob) -> TrainingResult:
    """Train for the job's steps; return what was measured."""
    if job.world_size > 1 and job.sharding == "none":
        raise InputError("the plain loop shards over ranks", place="--set sharding", allowed="full")
    device = device_of(job)
    ranks.join(job, alone=job.sharding == "full")
    corpus = load_corpus(job)

    model = initial_model(job, device)
    loss_of = single(model, job) if job.sharding == "none" else sharded(model, job)
    excess = 1.0 if job.sharding == "none" else gradient_excess(device)
    optimizer = adamw(model, job.training.optimizer)
    once = OncePerStep(model, microbatches=job.microbatches) if job.training.reduction == "step" else None
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
        meter.add_samples(batch["hashes"].to(device))
        for tokens_BS in batch["tokens"].to(device, non_blocking=True).split(job.microbatch):
            if once:
                once.before_forward()
            loss = loss_of(tokens_BS)
            (loss * len(tokens_BS) / job.device_batch / excess).backward()
            meter.add_loss(loss, len(tokens_BS))
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
        parallelism="single" if job.sharding == "none" else "fsdp2",
        data_hash=corpus.sha256,
    )


def initial_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the model with attention as PyTorch chooses it, nothing recomputed, nothing compiled."""
    plain = job.training.model_copy(update={"attention": "sdpa", "activation_checkpointing": False})
    with torch.device(device):
        model = family_of(job.shape).build(job.shape, training=plain)
    model.initialise(job.training.seed)
    return model


def single(model: Model, job: TrainingJob) -> Loss:
    """Return the loss on one device, model and cross entropy compiled as one."""

    def loss_of(tokens_BS: Tensor) -> Tensor:
        return next_token_loss(model(tokens_BS), tokens_BS)

    return torch.compile(loss_of, dynamic=False) if job.training.compile else loss_of


def sharded(model: Model, job: TrainingJob) -> Loss:
    """Return the loss with FSDP2 around each block and the model, and compiled blocks."""
    dtype = DTYPES[job.training.precision]
    every = job.training.reduction == "microbatch"
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype if every else torch.float32)
    head = next_token_loss
    for block in model.blocks:
        if job.training.compile:
            block.compile(dynamic=False)
        fully_shard(block, mp_policy=policy, reshard_after_forward=every)
    fully_shard(model, mp_policy=policy, reshard_after_forward=every)
    if job.training.compile:
        head = torch.compile(next_token_loss, dynamic=False)
    return lambda tokens_BS: head(model(tokens_BS), tokens_BS)


def next_token_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return the mean cross entropy over all predicted tokens, nats per token."""
    targets_BS = pad(tokens_BS[:, 1:], (0, 1), value=IGNORED)
    return cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED)
