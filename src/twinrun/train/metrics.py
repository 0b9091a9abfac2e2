"""What a run measures: seconds, loss and sample order of every optimizer step."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from twinrun.foundation.errors import InputError, RunError
from twinrun.protocol.measurements import Measurement, Per, sampled
from twinrun.protocol.training import StepMetrics, TrainingJob
from twinrun.train import liveness, ranks
from twinrun.train.device import synchronise
from twinrun.train.job_files import append_line
from twinrun.train.power import PowerMeter
from twinrun.train.sniff import Sniffer


class Meter:
    """Times steps and sums what ranks and microbatches contribute to them.

    Sums stay on the device until the end of a step, so that microbatches are queued without waiting.
    """

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        self.steps: list[StepMetrics] = []
        self._job = job
        self.device = device
        self._order = hashlib.sha256()
        self._sums: list[int] = []
        self._untimed = job.training.warmup_steps
        self._began = 0.0
        # Control runs are there for their losses.
        self.power = PowerMeter(job, None if job.control else job.power)
        self._sniffer = Sniffer(job, device) if not job.control else None
        self.stopping = False
        """Whether a rank was told to end, known to all at the end of the step."""
        self.keeps_checkpoints = False
        """Whether the loop has asked for the checkpoints of its job."""
        self.reported: list[Measurement] = []
        """What the script has reported beside what every training measures."""
        self.validation: list[tuple[int, float]] = []
        """Steps and the validation losses after them, in nats per token."""
        self.blocked: list[float] = []
        """Seconds that the training waited for each save: for the save before it and for the copy."""
        self._clear()

    def report(self, metric: str, value: float, *, per: Per = "run") -> None:
        """Report a number of the run under one of the metrics that the recipe's `reports` names.

        A second report of a metric takes the place of the first.

        Raises:
            InputError: `reports` does not name the metric, or the value is no finite number.
        """
        units = self._job.training.reports
        place = f"{self._job.point}: report of {metric}"
        if metric not in units:
            hint = (
                f'add {metric} = "UNIT" to [training.reports] of recipe.toml; it needs a row of metrics.toml'
            )
            raise InputError(
                "this metric is not named", place=place, allowed=list(units) or "none", hint=hint
            )
        if not math.isfinite(value):
            raise InputError("a report is a finite number", place=place, found=value)
        kept = [one for one in self.reported if one.id != metric]
        self.reported = [*kept, sampled(metric, [value], metric=metric, unit=units[metric], per=per)]

    @property
    def order_hash(self) -> str:
        """SHA-256 over the samples of every global batch so far."""
        return self._order.hexdigest()

    def start(self) -> None:
        """Start the clock of the next step; a step includes the wait for its data."""
        synchronise(self.device)
        self._began = time.perf_counter()
        liveness.beat("reads its samples", step=len(self.steps) + 1)

    def add_samples(self, hashes_B: Tensor) -> None:
        """Add the int64 hashes of this rank's samples; the sum may wrap, the order is free."""
        self._sums_of_ranks[0] += hashes_B.sum()
        liveness.beat("forward")

    def add_loss(self, loss: Tensor, sequences: int) -> None:
        """Add the mean loss of a microbatch of `sequences`."""
        self._loss += loss.detach().double() * sequences
        liveness.beat("backward and optimizer")

    def end_step(self) -> None:
        """Stop the clock, combine all ranks, and write the step's line from the first rank.

        Raises:
            RunError: the loss is no longer a number.
        InputError: checkpoints were asked for, and the loop keeps none.
        """
        synchronise(self.device)
        ended = time.perf_counter()
        if self._job.checkpointing and not self.keeps_checkpoints:
            raise InputError(
                "this script keeps no checkpoints",
                place="--checkpoint",
                hint="leave it out, or call twinrun.train.checkpoint.session.checkpoints_of in the script",
            )
        seconds = ended - self._began
        liveness.beat("sums the loss of all ranks")
        number = len(self.steps) + 1
        timed = number > self._untimed
        # On Linux both clocks of Python are the monotonic one, which the sampler reads.
        own_watts = self.power.watts(self._began, ended, timed=timed)
        self._sums_of_ranks[1] = ranks.stop_wanted()
        if own_watts is not None:
            self._sums_of_ranks[2:] = torch.tensor([round(own_watts * 1e3), 1])
        if dist.is_initialized():
            dist.all_reduce(self._sums_of_ranks)
            dist.all_reduce(self._loss)
        loss = self._loss.item() / self._job.training.global_batch
        if not math.isfinite(loss):
            raise RunError("the loss is not finite", place=f"{self._job.point}, step {number}", found=loss)
        total, stopping, milliwatts, read = self._sums_of_ranks.tolist()
        watts = milliwatts / 1e3 / self._job.world_size if 0 < self.power.needed <= read else None
        step = self._step(number, loss=loss, seconds=seconds, timed=timed, watts=watts)
        self.steps.append(step)
        self._add_order(total)
        self.stopping = bool(stopping)
        if ranks.rank() == 0:
            append_line(self._job, step)
        self._clear()
        # Between the clocks of two steps.
        if self._sniffer:
            self._sniffer.after_step(number)
        self.start()

    def history(self) -> dict[str, Tensor]:
        """Return what a run that goes on later needs of the steps so far, a value a step."""
        return {
            "loss": torch.tensor([step.loss for step in self.steps], dtype=torch.float64),
            "seconds": torch.tensor([step.seconds for step in self.steps], dtype=torch.float64),
            "timed": torch.tensor([step.timed for step in self.steps], dtype=torch.bool),
            "samples": torch.tensor(self._sums, dtype=torch.int64),
        }

    def go_on(self, history: Mapping[str, Tensor]) -> None:
        """Take the steps of the run that is resumed for ours; the next ones warm up again."""
        rows = zip(*(history[name].tolist() for name in ("loss", "seconds", "timed")), strict=True)
        self.steps = [
            self._step(number, loss=loss, seconds=seconds, timed=timed)
            for number, (loss, seconds, timed) in enumerate(rows, start=1)
        ]
        self._untimed = len(self.steps) + self._job.training.warmup_steps
        for total in history["samples"].tolist():
            self._add_order(total)
        if ranks.rank() == 0:
            for step in self.steps:
                append_line(self._job, step)

    def _add_order(self, total: int) -> None:
        self._sums.append(total)
        self._order.update(total.to_bytes(8, "little", signed=True))

    def _step(
        self, number: int, *, loss: float, seconds: float, timed: bool, watts: float | None = None
    ) -> StepMetrics:
        return StepMetrics(
            point=self._job.point,
            attempt=self._job.attempt,
            step=number,
            loss=loss,
            seconds=seconds,
            timed=timed,
            watts=watts,
            control=self._job.control,
        )

    def _clear(self) -> None:
        # Of the samples; how many ranks were told to end; milliwatts, and how many ranks read some.
        self._sums_of_ranks = torch.zeros(4, dtype=torch.int64, device=self.device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
