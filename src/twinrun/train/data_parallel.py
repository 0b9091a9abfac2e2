"""Engines in PyTorch alone: one device, the whole model on every rank (DDP), or shards of it (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob
from twinrun.train import building, rank, ranks
from twinrun.train.building import adamw, set_learning_rate
from twinrun.train.checkpoint.state import InPlaceState, Parts
from twinrun.train.data import Batch, targets_of
from twinrun.train.loop import Engine
from twinrun.train.models import DTYPES, IGNORED, Model

try:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
except ImportError:
    # Where PyTorch before 2.6 has them.
    from torch.distributed._composable.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

LossFunction = Callable[[Tensor], Tensor]


def start(job: TrainingJob) -> None:
    """Join the ranks of `job`.

    Raises:
        InputError: several ranks would each train a whole model, and nobody asked for DDP.
    """
    if job.layout is None and job.world_size > 1 and job.sharding == "none":
        raise InputError("the plain loop shards over ranks", place="--set sharding", allowed="full")
    ranks.join(job, alone=job.layout is not None or job.sharding == "full")


def build(job: TrainingJob, device: torch.device) -> WholeModel:
    """Return what trains `job`: the model of a layout, or the baseline, compiled another way."""
    kind: type[WholeModel] = Fsdp2Shard if job.sharding == "full" else WholeModel
    if job.layout is None:
        model = baseline_model(job, device)
        return kind(job, model, baseline_loss(model, job))
    model = building.build_model(job, device)
    return (kind if kind is Fsdp2Shard else DdpReplica)(job, model, fused_loss(model))


class WholeModel(Engine):
    """AdamW on a model that one rank trains whole; the other engines differ where several ranks do."""

    parallelism = "single"
    keeps_gradients = False
    """Whether gradients keep their memory from step to step."""

    def __init__(self, job: TrainingJob, model: Model, loss_of: LossFunction) -> None:
        self._job, self._loss_of = job, loss_of
        self.module: nn.Module = model
        self.weights_hash = building.digest_of(model)
        self._device = next(model.parameters()).device
        self._excess = 1.0
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=False)
        self._tracer = building.tracer_of(job, model)
        self.share(model)
        self.optimizer = adamw(model, job.training.optimizer)

    def share(self, model: Model) -> None:
        """Prepare the model for ranks that share the work; nothing for one rank."""

    def before_microbatch(self, *, last: bool) -> None:
        """Say whether the ranks exchange the gradients of the next microbatch; nothing for one rank."""

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run."""
        return InPlaceState(self.module, self.optimizer)

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Train one step on this rank's sequences; return their mean loss, in nats per token."""
        set_learning_rate(self.optimizer, rate)
        with self._tracer.step() if self._tracer else contextlib.nullcontext():
            loss = self.gradients(batch)
        self._scaler.unscale_(self.optimizer)
        self.norm = clip_norm(self.module, self._job.training.optimizer.gradient_clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        return loss

    def gradients(self, batch: Batch) -> Tensor:
        """Leave the mean gradients of the global batch in the parameters; return the loss of this rank."""
        tokens_BS = batch["tokens"]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        parts = tokens_BS.split(self._job.microbatch)
        for number, part_BS in enumerate(parts, start=1):
            self.before_microbatch(last=number == len(parts))
            loss = self._loss_of(part_BS)
            rank.beat("backward and optimizer")
            scaled = self._scaler.scale(loss * len(part_BS) / len(tokens_BS) / self._excess)
            scaled.backward()
            total += loss.detach().double() * len(part_BS)
        return total / len(tokens_BS)


class DdpReplica(WholeModel):
    """DistributedDataParallel; gradients stay where they are reduced."""

    parallelism = "ddp"
    keeps_gradients = True

    def parts(self) -> Parts:
        """Return what a checkpoint has; the reducer sees a backward pass before a resumed run goes on."""
        settle = partial(settle_buckets, self._job, self._loss_of, self.optimizer, device=self._device)
        return InPlaceState(self.module, self.optimizer, taken=settle)

    def share(self, model: Model) -> None:
        """Wrap the model, and scale the loss of fp16, in which small gradients would be lost."""
        self._parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._loss_of = fused_loss(self._parallel)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=self._job.training.precision == "fp16")

    def before_microbatch(self, *, last: bool) -> None:
        self._parallel.require_backward_grad_sync = last


class Fsdp2Shard(WholeModel):
    """FSDP2: a rank keeps its share of parameters, gradients and moments."""

    parallelism = "fsdp2"

    def share(self, model: Model) -> None:
        """Split each block and the rest of the model over the ranks; blocks are compiled before."""
        dtype = DTYPES[self._job.training.precision]
        every = self._job.training.reduction == "microbatch"
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype if every else torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mp_policy=policy, reshard_after_forward=every)
        self._excess = gradient_excess(self._device)
        self._sync = GradientSync(model, self._job)

    def before_microbatch(self, *, last: bool) -> None:  # noqa: ARG002 - it counts microbatches itself
        self._sync.before_forward()


class GradientSync:
    """Lets FSDP2 gather parameters before a step's first microbatch and reduce gradients after its last.

    It does nothing where the job wants both for every microbatch.
    """

    def __init__(self, model: nn.Module, job: TrainingJob) -> None:
        once = job.training.reduction == "step"
        self._sharded = [module for module in model.modules() if once and isinstance(module, FSDPModule)]
        self._microbatches = job.microbatches
        self._done = 0

    def before_forward(self) -> None:
        """Prepare the next microbatch."""
        self._done += 1
        last = self._done % self._microbatches == 0
        for module in self._sharded:
            module.set_requires_gradient_sync(last, recurse=False)
            module.set_reshard_after_backward(last, recurse=False)
            module.set_is_last_backward(last)


def clip_norm(model: nn.Module, most: float) -> Tensor:
    """Scale gradients so that their norm over all ranks is `most` at the largest; return what it was."""
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), max_norm=most)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def gradient_excess(device: torch.device) -> float:
    """Return how many times too large FSDP2 makes a mean gradient: 1, or the number of ranks.

    FSDP2 asks for ReduceOp.AVG, which Gloo's reduce-scatter silently takes for a sum
    (github:pytorch/pytorch#162338); AdamW hides it until gradients are clipped. Measured on a
    layer of one weight, since a later PyTorch may mend either side.
    """
    probe = fully_shard(nn.Linear(1, 1, bias=False, device=device))
    probe(torch.ones(1, 1, device=device)).sum().backward()
    excess: float = probe.weight.grad.full_tensor().item()
    return excess


def settle_buckets(
    job: TrainingJob, loss_of: LossFunction, optimizer: torch.optim.Optimizer, *, device: torch.device
) -> None:
    """Let DDP see one backward pass, of any data, before a resumed run goes on.

    After its first pass DDP sorts gradients into other buckets, which all-reduce then sums in another order:
    without this pass the first resumed step would be rounded as only the first step of a run is.
    """
    size_BS = (job.microbatch, job.shape.sequence)
    loss_of(torch.zeros(size_BS, dtype=torch.int64, device=device)).backward()
    optimizer.zero_grad(set_to_none=True)


def fused_loss(model: nn.Module) -> LossFunction:
    """Return the loss that the model computes together with its head."""
    return lambda tokens_BS: model(tokens_BS, targets_of(tokens_BS))


def baseline_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the model with nothing recomputed, nothing compiled."""
    plain = job.training.model_copy(update={"activation_checkpointing": False})
    return building.initial_model(job.model_copy(update={"training": plain}), device)


def baseline_loss(model: Model, job: TrainingJob) -> LossFunction:
    """Return the cross entropy of logits, with nothing of ours.

    One graph is compiled of all where FSDP has no hook between the layers.
    """
    head, alone = next_token_loss, job.sharding == "none"
    if job.training.compile and not alone:
        for block in model.blocks:
            block.compile(dynamic=False)
        head = torch.compile(next_token_loss, dynamic=False)

    def loss_of(tokens_BS: Tensor) -> Tensor:
        return head(model(tokens_BS), tokens_BS)

    return torch.compile(loss_of, dynamic=False) if job.training.compile and alone else loss_of


def next_token_loss(logits_BSV: Tensor, tokens_BS: Tensor) -> Tensor:
    """Return the mean cross entropy over all predicted tokens, nats per token."""
    targets_BS = targets_of(tokens_BS)
    return cross_entropy(logits_BSV.flatten(0, 1).float(), targets_BS.flatten(), ignore_index=IGNORED)
