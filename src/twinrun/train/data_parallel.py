"""PyTorch's own data parallelism: the model whole on every rank, or FSDP2's shards of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from twinrun.protocol.training import TrainingJob
from twinrun.train import ranks, worker
from twinrun.train.checkpoint.state import InPlaceState, Parts
from twinrun.train.optimizer import adamw, set_learning_rate
from twinrun.train.sharding import GradientSync, gradient_excess, shard
from twinrun.train.stages import targets_of


def start(job: TrainingJob) -> None:
    """Join the ranks of `job`."""
    ranks.join(job, alone=True)


def build(job: TrainingJob, device: torch.device) -> DdpReplica | Fsdp2Shard:
    """Return what trains `job`."""
    return Fsdp2Shard(job, device) if job.sharding == "full" else DdpReplica(job, device)


class DdpReplica:
    """DistributedDataParallel and AdamW; gradients stay where they are reduced."""

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        self._job, self._clip = job, job.training.optimizer.gradient_clip
        self.module: nn.Module = worker.build_model(job, device)
        self.optimizer = adamw(self.module, job.training.optimizer)
        self._parallel = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        # In fp16 small gradients are lost unless the loss is scaled.
        self._scaler = torch.amp.GradScaler(device.type, enabled=job.training.precision == "fp16")

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run."""
        return InPlaceState(self.module, self.optimizer)

    def step(self, tokens_BS: Tensor, rate: float) -> Tensor:
        """Train one step on this rank's sequences; return their mean loss, in nats per token."""
        set_learning_rate(self.optimizer, rate)
        total = torch.zeros((), dtype=torch.float64, device=tokens_BS.device)
        parts = tokens_BS.split(self._job.microbatch)
        for number, part_BS in enumerate(parts, start=1):
            self._parallel.require_backward_grad_sync = number == len(parts)
            loss = self._parallel(part_BS, targets_of(part_BS))
            self._scaler.scale(loss * len(part_BS) / len(tokens_BS)).backward()
            total += loss.detach().double() * len(part_BS)
        self._scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        # Kept, since the buckets that they are views of are kept.
        self.optimizer.zero_grad(set_to_none=False)
        return total / len(tokens_BS)


class Fsdp2Shard:
    """FSDP2 and AdamW: a rank keeps its share of parameters, gradients and moments."""

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        self._job, self._clip = job, job.training.optimizer.gradient_clip
        model = worker.build_model(job, device)
        shard(model, job)
        self.module: nn.Module = model
        self.optimizer = adamw(model, job.training.optimizer)
        self._excess = gradient_excess(device)
        once = job.training.reduction == "step"
        self._once = GradientSync(model, microbatches=job.microbatches) if once else None

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run."""
        return InPlaceState(self.module, self.optimizer)

    def step(self, tokens_BS: Tensor, rate: float) -> Tensor:
        """Train one step on this rank's sequences; return their mean loss, in nats per token."""
        set_learning_rate(self.optimizer, rate)
        total = torch.zeros((), dtype=torch.float64, device=tokens_BS.device)
        for part_BS in tokens_BS.split(self._job.microbatch):
            if self._once:
                self._once.before_forward()
            loss = self.module(part_BS, targets_of(part_BS))
            (loss * len(part_BS) / len(tokens_BS) / self._excess).backward()
            total += loss.detach().double() * len(part_BS)
        nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / len(tokens_BS)
