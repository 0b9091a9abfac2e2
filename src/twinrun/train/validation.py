"""The loss on sequences that nothing is trained on, every so many steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob
from twinrun.train import rank
from twinrun.train.data import Samples, load_corpus, targets_of
from twinrun.train.metrics import Meter
from twinrun.train.models import IGNORED

LossOfTargets = Callable[[Tensor, Tensor], Tensor]
"""Takes tokens and targets (B, S), and returns their mean cross entropy in nats per token."""


class ValidationLoss:
    """The validation of one training; every rank calls each method, and takes its share of the sequences."""

    def __init__(self, job: TrainingJob, meter: Meter) -> None:
        """Read this rank's sequences.

        Raises:
            InputError: the data is damaged, does not suit the model, or has too few sequences.
        """
        self._meter, self._job = meter, job
        # Control runs are there for their losses in training.
        self._settings = None if job.control else job.training.validation
        self._tokens_NS = torch.empty(0, job.shape.sequence, dtype=torch.int64)
        if self._settings:
            self._tokens_NS = _share(job, self._settings.sequences)

    def after_step(self, step: int, loss_of: LossOfTargets) -> None:
        """Take the loss after `step` steps where it is time; the clock of steps stands meanwhile."""
        if self._settings and self._settings.due(step, steps=self._job.training.steps):
            self._meter.validation.append((step, self._loss(loss_of, self._settings.sequences)))
            self._meter.start()

    @torch.no_grad()
    def _loss(self, loss_of: LossOfTargets, sequences: int) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._meter.device)
        # Compiled graphs and the collectives of shards ask for the same batches on every rank.
        turns = -(-sequences // (self._job.world_size * self._job.microbatch))
        for turn in range(turns):
            rank.beat("validates")
            part_BS = self._tokens_NS[turn * self._job.microbatch : (turn + 1) * self._job.microbatch]
            tokens_BS = torch.zeros(self._job.microbatch, part_BS.shape[1], dtype=torch.int64)
            tokens_BS[: len(part_BS)] = part_BS
            targets_BS = targets_of(tokens_BS)
            # The mean over no token is no number, so that an empty batch has one that counts nothing.
            targets_BS[max(1, len(part_BS)) :] = IGNORED
            loss = loss_of(tokens_BS.to(total.device), targets_BS.to(total.device))
            total += loss.double() * len(part_BS)
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total.item()) / sequences


def _share(job: TrainingJob, sequences: int) -> Tensor:
    """Return this rank's share of the first `sequences` of the validation data, (N, S)."""
    corpus = load_corpus(job.model_copy(update={"data": job.validation_data}), least=1)
    if corpus.samples < sequences:
        raise InputError(
            "the validation data has too few sequences",
            place=job.validation_data,
            found=corpus.samples,
            allowed=f"at least {sequences}, validation.sequences",
        )
    samples = Samples(job.validation_data, corpus)
    places = range(rank.number(), sequences, job.world_size)
    mine = [torch.from_numpy(samples[place]["tokens"]) for place in places]
    return torch.stack(mine) if mine else torch.empty(0, job.shape.sequence, dtype=torch.int64)
