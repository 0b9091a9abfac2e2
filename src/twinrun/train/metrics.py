"""What a run measures: seconds, loss and sample order of every optimizer step."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from twinrun.foundation.errors import InputError, RunError, require_known
from twinrun.protocol.measurements import Per
from twinrun.protocol.training import Report, StepMetrics, TrainingJob, TrainingResult
from twinrun.train import building, rank
from twinrun.train import device as devices
from twinrun.train.device import PowerMeter
from twinrun.train.sniff import Sniffer

# Numbers of a step that a checkpoint keeps.
COLUMNS = ("loss", "seconds", "watts", "gradient_norm")


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
        self.reported: list[Report] = []
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
        place = f"{self._job.point}: report of {metric}"
        message = "not named by [training.reports] of recipe.toml"
        require_known(metric, self._job.training.reports, message, place=place)
        if not math.isfinite(value):
            raise InputError("a report is a finite number", place=place, found=value)
        kept = [one for one in self.reported if one.metric != metric]
        self.reported = [*kept, Report(metric=metric, value=value, per=per)]

    @property
    def order_hash(self) -> str:
        """SHA-256 over the samples of every global batch so far."""
        return self._order.hexdigest()

    def start(self) -> None:
        """Start the clock of the next step; a step includes the wait for its data."""
        devices.synchronise(self.device)
        self._began = time.perf_counter()
        rank.beat("reads its samples", step=len(self.steps) + 1)

    def add_samples(self, hashes_B: Tensor) -> None:
        """Add the int64 hashes of this rank's samples; the sum may wrap, the order is free."""
        self._sums_of_ranks[0] += hashes_B.sum()
        rank.beat("forward")

    def add_loss(self, loss: Tensor, sequences: int) -> None:
        """Add the mean loss of a microbatch of `sequences`."""
        self._loss += loss.detach().double() * sequences
        rank.beat("backward and optimizer")

    def end_step(self, norm: Tensor | None = None) -> None:
        """Stop the clock, combine all ranks, and write the step's line.

        Args:
            norm: of the gradients before they were clipped, where the loop has it.

        Raises:
            RunError: the loss is no longer a number.
            InputError: checkpoints were asked for, and the loop keeps none.
        """
        devices.synchronise(self.device)
        ended = time.perf_counter()
        if self._job.checkpointing and not self.keeps_checkpoints:
            hint = "leave it out, or call twinrun.train.checkpoint.session.checkpoints_of in the script"
            raise InputError("this script keeps no checkpoints", place="--checkpoint", hint=hint)
        rank.beat("sums the loss of all ranks")
        number = len(self.steps) + 1
        timed = number > self._untimed
        # On Linux both clocks of Python are the monotonic one, which the sampler reads.
        own_watts = self.power.watts(self._began, ended, timed=timed)
        self._sums_of_ranks[1] = rank.stop_wanted()
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
        measured = {"loss": loss, "seconds": ended - self._began, "timed": timed, "watts": watts}
        self._add(total, **measured, gradient_norm=None if norm is None else norm.item())
        self.stopping = bool(stopping)
        rank.report(self.steps[-1])
        self._clear()
        # Between the clocks of two steps.
        if self._sniffer:
            self._sniffer.after_step(number)
        self.start()

    def history(self) -> dict[str, Tensor]:
        """Return what a run that goes on later needs of the steps so far, a value a step, NaN for none."""
        columns = {name: [getattr(step, name) for step in self.steps] for name in COLUMNS}
        columns["blocked"] = self.blocked
        numbers = {name: [math.nan if one is None else one for one in of] for name, of in columns.items()}
        found = {name: torch.tensor(of, dtype=torch.float64) for name, of in numbers.items()}
        found["validation"] = torch.tensor(self.validation, dtype=torch.float64).reshape(-1, 2)
        found["samples"] = torch.tensor(self._sums, dtype=torch.int64)
        return found | {"timed": torch.tensor([step.timed for step in self.steps], dtype=torch.bool)}

    def go_on(self, history: Mapping[str, Tensor]) -> None:
        """Take what the run that is resumed has measured for ours; the next steps warm up again."""
        names = [name for name in (*COLUMNS, "timed", "samples") if name in history]
        for row in zip(*(history[name].tolist() for name in names), strict=True):
            # NaN alone is not itself.
            known: dict[str, Any] = {
                name: value if value == value else None  # noqa: PLR0124
                for name, value in zip(names, row, strict=True)
            }
            self._add(known.pop("samples"), **known)
            rank.report(self.steps[-1])
        none = torch.empty(0)
        self.validation = [(int(step), loss) for step, loss in history.get("validation", none).tolist()]
        self.blocked = history.get("blocked", none).tolist()
        self._untimed = len(self.steps) + self._job.training.warmup_steps

    def _add(self, samples: int, **measured: Any) -> None:
        self._sums.append(samples)
        self._order.update(samples.to_bytes(8, "little", signed=True))
        if not math.isfinite(measured.get("gradient_norm") or 0.0):
            # An overflow of fp16, whose step is left out.
            measured["gradient_norm"] = None
        place = {name: getattr(self._job, name) for name in ("point", "attempt", "control")}
        self.steps.append(StepMetrics(step=len(self.steps) + 1, **place, **measured))

    def result(
        self, *, model: nn.Module | None = None, kernel: str, parallelism: str, **known: Any
    ) -> TrainingResult:
        """Return what this point measured; every rank must call it.

        Args:
            model: what trained, whole or sharded by FSDP2; None where `building` made it and the ranks split
                it in a way of their own.
            kernel: the kernel of attention.
            known: other fields of the result: digests of data and initial weights, changes of a framework.

        Raises:
            RunError: the model has another number of parameters than the manifest says.
        """
        job, device = self._job, self.device
        made = None if model is None else sum(one.numel() for one in model.parameters())
        parameters = building.demand_parameters(job, made)
        self.power.end()
        measured = {
            "point": job.point,
            "parameters": parameters,
            "reported": tuple(self.reported),
            "validation": tuple(self.validation),
            "blocked_seconds": tuple(self.blocked),
            "microbatch": job.microbatch,
            "steps": tuple(self.steps),
            "attention_backend": kernel,
            "fp8_recipe": building.fp8_described(job),
            "parallelism": parallelism,
            "order_hash": self.order_hash,
            "power": self.power.source(),
            "data_hash": "",
        }
        return TrainingResult.model_validate(measured | devices.measured(device) | known)

    def _clear(self) -> None:
        # Of the samples; how many ranks were told to end; milliwatts, and how many ranks read some.
        self._sums_of_ranks = torch.zeros(4, dtype=torch.int64, device=self.device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
