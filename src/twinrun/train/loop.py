"""A training from its first step to its result, whoever takes the steps."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import COMPOSER, TrainingJob, TrainingResult
from twinrun.train import attention, building, rank
from twinrun.train.building import learning_rate
from twinrun.train.checkpoint.session import checkpoints_of
from twinrun.train.checkpoint.state import Parts
from twinrun.train.corpus import Corpus
from twinrun.train.data import Batch, Samples, load_batches, load_corpus, set_position, targets_of
from twinrun.train.device import device_of
from twinrun.train.metrics import Meter
from twinrun.train.models import IGNORED

# A recipe's plain loop leaves the kernel of attention to PyTorch; layouts fix the fastest, as Composer's do.
FREE_ATTENTION = "chosen by PyTorch"


LossOfTargets = Callable[[Tensor, Tensor], Tensor]
"""Takes tokens and targets (B, S), and returns their mean cross entropy in nats per token."""


class Engine:
    """What takes the steps: PyTorch's own (`data_parallel`), Composer's Trainer, or one of a recipe."""

    module: nn.Module
    parallelism: str
    """How the ranks share the work."""
    weights_hash: str = ""
    """Digest of the initial weights, empty where no rank has all of them."""
    changes: Mapping[str, str] = {}
    """What is changed of a framework, by its name."""
    norm: Tensor | None = None
    """Norm of the last step's gradients before they were clipped, where the engine has it."""

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run; raises InputError where there is none."""
        raise NotImplementedError

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Train one step; return the mean loss of this rank's sequences, or of all."""
        raise NotImplementedError

    def fit(self, steps: Steps) -> None:
        """Take the steps that are left; an engine that has a loop of its own takes them there."""
        for read in steps.batches():
            batch, rate = steps.begin(read)
            with steps.counted():
                loss = self.step(batch, rate)
            steps.add_loss(loss, len(batch["tokens"]))
            del batch, loss
            steps.end(self.module, norm=self.norm)


class Steps:
    """The steps of one training: what is read, measured, validated and saved around each."""

    def __init__(self, job: TrainingJob, corpus: Corpus, engine: Engine, meter: Meter, beside: Any) -> None:
        """Go on from the newest checkpoint, if there is one."""
        self._job, self._meter, self._beside = job, meter, beside
        self._saves = checkpoints_of(job, corpus=corpus, parts=engine.parts, meter=meter)
        # Control runs are there for their losses in training.
        self._validation = None if job.control else job.training.validation
        self._sequences = self._validation.sequences if self._validation else 0
        self._held_out_NS = validation_share(job, self._sequences) if self._validation else torch.empty(0)
        self.done = self._first = self._saves.resume()
        self.loader = load_batches(job, corpus)
        set_position(self.loader, job, corpus, step=self.done)
        # Ranks of one replica read the same sequences, which count once.
        self._counts = rank.number() % job.replicas == 0

    @property
    def left(self) -> int:
        """Steps that are left."""
        return self._job.training.steps - self.done

    def start(self) -> None:
        """Start the clock of the first step."""
        self._meter.start()

    def batches(self) -> Iterator[Batch]:
        """Yield what this rank reads for each step that is left."""
        self.start()
        epochs = itertools.chain.from_iterable(itertools.repeat(self.loader))
        return itertools.islice(epochs, self.left)

    def begin(self, read: Batch) -> tuple[Batch, float]:
        """Return a batch on the device, and the learning rate of its step."""
        rate = learning_rate(self.done, self._job.training.optimizer, step_tokens=self._job.step_tokens)
        batch = {name: one.to(self._meter.device, non_blocking=True) for name, one in read.items()}
        if self._counts:
            self._meter.add_samples(batch["hashes"])
        return batch, rate

    def counted(self) -> AbstractContextManager[object]:
        """Return what is entered around the work of the step."""
        return self._beside.counting(self.done - self._first) if self._beside else contextlib.nullcontext()

    def add_loss(self, loss: Tensor, sequences: int) -> None:
        """Add the mean loss of so many of this rank's sequences."""
        if self._counts:
            self._meter.add_loss(loss, sequences)

    def end(self, loss_of: LossOfTargets, *, norm: Tensor | None = None) -> None:
        """End the step; raises StoppedError where a rank was told to end and all have saved."""
        if self._beside:
            self._beside.end_step(self.done - self._first)
        self.done += 1
        self._meter.end_step(norm)
        if self._validation and self._validation.due(self.done, steps=self._job.training.steps):
            share, device = self._held_out_NS, self._meter.device
            loss = validation_loss(self._job, share, loss_of, sequences=self._sequences, device=device)
            self._meter.validation.append((self.done, loss))
            # The clock of steps stood meanwhile.
            self._meter.start()
        self._saves.after_step(self.done)

    def wait(self) -> None:
        """Return when what was saved is durable."""
        self._saves.wait()


def train(job: TrainingJob, framework: Any, *, beside: Any = None) -> TrainingResult:
    """Train for the job's steps; return what was measured.

    Args:
        framework: module with `start(job)`, which joins the ranks, and `build(job, device)`, an `Engine`.
        beside: module whose `watch(job, device)` counts something of a layout, before its engine is built.
            What it returns has `counting(step)`, which is entered around the work of a step, counted from 0
            at each start, `end_step(step)`, and `report(meter, module)` with metrics of `reports`.
    """
    device = device_of(job)
    framework.start(job)
    corpus = load_corpus(job)
    free = job.training.trainer != COMPOSER and job.training.attention == "sdpa" and not job.layout
    kernel = FREE_ATTENTION if free else building.choose_attention(job, device)
    watched: Any = beside.watch(job, device) if beside and job.layout else None
    engine: Engine = framework.build(job, device)
    meter = Meter(job, device)
    with contextlib.nullcontext() if free else attention.only(kernel):
        steps = Steps(job, corpus, engine, meter, watched)
        engine.fit(steps)
        steps.wait()
    if watched:
        watched.report(meter, engine.module)
    known: Any = {"weights_hash": engine.weights_hash, "changes": dict(engine.changes), "kernel": kernel}
    known |= {"data_hash": corpus.sha256, "data_server": corpus.server}
    return meter.result(parallelism=engine.parallelism, **known)


def validation_share(job: TrainingJob, sequences: int) -> Tensor:
    """Return this rank's share of the first `sequences` of the validation data, (N, S).

    Raises:
        InputError: the data is damaged, does not suit the model, or has too few sequences.
    """
    corpus = load_corpus(job.model_copy(update={"data": job.validation_data}), least=1)
    if corpus.samples < sequences:
        message, allowed = "too few sequences to validate", f"at least {sequences}, validation.sequences"
        raise InputError(message, place=job.validation_data, found=corpus.samples, allowed=allowed)
    samples = Samples(job.validation_data, corpus)
    places = range(rank.number(), sequences, job.world_size)
    mine = [torch.from_numpy(samples[place]["tokens"]) for place in places]
    return torch.stack(mine) if mine else torch.empty(0, job.shape.sequence, dtype=torch.int64)


@torch.no_grad()
def validation_loss(
    job: TrainingJob, tokens_NS: Tensor, loss_of: LossOfTargets, *, sequences: int, device: torch.device
) -> float:
    """Return the mean loss of `sequences`, of which each rank has a share, in nats per token."""
    total, size = torch.zeros((), dtype=torch.float64, device=device), job.microbatch
    # Compiled graphs and the collectives of shards ask for the same batches on every rank.
    for turn in range(-(-sequences // (job.world_size * size))):
        rank.beat("validates")
        part_BS = tokens_NS[turn * size : (turn + 1) * size]
        tokens_BS = torch.zeros(size, part_BS.shape[1], dtype=torch.int64)
        tokens_BS[: len(part_BS)] = part_BS
        targets_BS = targets_of(tokens_BS)
        # The mean over no token is no number, so that an empty batch has one that counts nothing.
        targets_BS[max(1, len(part_BS)) :] = IGNORED
        total += loss_of(tokens_BS.to(device), targets_BS.to(device)).double() * len(part_BS)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total.item()) / sequences
