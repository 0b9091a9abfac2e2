"""What a run measures: seconds, loss and sample order of every optimizer step."""

from __future__ import annotations

import hashlib
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from twinrun.errors import RunError
from twinrun.train.device import synchronise
from twinrun.training import Job, StepMetrics


class Meter:
    """Times steps and sums what ranks and microbatches contribute to them.

    Sums stay on the device until the end of a step, so that microbatches are queued without waiting.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self.steps: list[StepMetrics] = []
        self._job = job
        self._device = device
        self._order = hashlib.sha256()
        self._is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
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
            step=number,
            loss=loss,
            seconds=seconds,
            timed=number > self._job.training.warmup_steps,
        )
        self.steps.append(step)
        self._order.update(int(self._hashes.item()).to_bytes(8, "little", signed=True))
        if self._is_first_rank:
            with Path(self._job.metrics).open("a", encoding="utf-8") as stream:
                stream.write(step.model_dump_json() + "\n")
        self._clear()
        self.start()

    def _clear(self) -> None:
        self._hashes = torch.zeros((), dtype=torch.int64, device=self._device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self._device)


def largest_over_ranks(value: int, device: torch.device) -> int:
    """Return the largest of the ranks' values."""
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest.item())
