"""What a run measures: seconds, loss and sample order of every optimizer step."""

from __future__ import annotations

import hashlib
import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from twinrun.foundation.errors import RunError
from twinrun.protocol.training import StepMetrics, TrainingJob
from twinrun.train import ranks
from twinrun.train.device import synchronise
from twinrun.train.job_files import append_line


class Meter:
    """Times steps and sums what ranks and microbatches contribute to them.

    Sums stay on the device until the end of a step, so that microbatches are queued without waiting.
    """

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        self.steps: list[StepMetrics] = []
        self._job = job
        self._device = device
        self._order = hashlib.sha256()
        self._began = 0.0
        self._clear()

    @property
    def order_hash(self) -> str:
        """SHA-256 over the samples of every global batch so far."""
        return self._order.hexdigest()

    def start(self) -> None:
        """Start the clock of the next step; a step includes the wait for its data."""
        synchronise(self._device)
        self._began = time.perf_counter()

    def add_samples(self, hashes_B: Tensor) -> None:
        """Add the int64 hashes of this rank's samples; the sum may wrap, the order is free."""
        self._hashes += hashes_B.sum()

    def add_loss(self, loss: Tensor, sequences: int) -> None:
        """Add the mean loss of a microbatch of `sequences`."""
        self._loss += loss.detach().double() * sequences

    def end_step(self) -> None:
        """Stop the clock, combine all ranks, and write the step's line from the first rank.

        Raises:
            RunError: the loss is no longer a number.
        """
        synchronise(self._device)
        seconds = time.perf_counter() - self._began
        if dist.is_initialized():
            dist.all_reduce(self._hashes)
            dist.all_reduce(self._loss)
        number = len(self.steps) + 1
        loss = self._loss.item() / self._job.training.global_batch
        if not math.isfinite(loss):
            raise RunError("the loss is not finite", place=f"{self._job.point}, step {number}", found=loss)
        step = StepMetrics(
            point=self._job.point,
            attempt=self._job.attempt,
            step=number,
            loss=loss,
            seconds=seconds,
            timed=number > self._job.training.warmup_steps,
        )
        self.steps.append(step)
        self._order.update(int(self._hashes.item()).to_bytes(8, "little", signed=True))
        if ranks.rank() == 0:
            append_line(self._job, step)
        self._clear()
        self.start()

    def _clear(self) -> None:
        self._hashes = torch.zeros((), dtype=torch.int64, device=self._device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)
