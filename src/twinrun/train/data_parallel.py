"""Engines in PyTorch alone: one device, the whole model on every rank (DDP), or shards of it (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob
from twinrun.train import liveness, ranks, worker
from twinrun.train.canonical import CanonicalGradients
from twinrun.train.checkpoint.state import InPlaceState, Parts
from twinrun.train.data import Batch, targets_of
from twinrun.train.models import IGNORED, Model
from twinrun.train.optimizer import adamw, set_learning_rate
from twinrun.train.sharding import GradientSync, gradient_excess, settle_buckets, shard
from twinrun.train.trace import tracer_of

LossFunction = Callable[[Tensor], Tensor]


def start(job: TrainingJob) -> None:
    """Join the ranks of `job`.

    Raises:
        InputError: several ranks would each train a whole model, and nobody asked for DDP or a fixed tree.
    """
    canonical = job.training.summation == "canonical"
    if job.layout is None and job.world_size > 1 and job.sharding == "none" and not canonical:
        raise InputError("the plain loop shards over ranks", place="--set sharding", allowed="full")
    ranks.join(job, alone=job.layout is not None or (job.sharding == "full" and not canonical))


def build(job: TrainingJob, device: torch.device) -> WholeModel:
    """Return what trains `job`: the model of a layout, or the baseline, compiled another way."""
    kind: type[WholeModel]
    if job.layout is not None:
        model = worker.build_model(job, device)
        kind, loss_of = Fsdp2Shard if job.sharding == "full" else DdpReplica, fused_loss(model)
    else:
        model = baseline_model(job, device)
        kind, loss_of = _baseline_engine(job), baseline_loss(model, job)
    digest = worker.digest_of(model)
    engine = kind(job, model, loss_of)
    engine.weights_hash = digest
    return engine


class WholeModel:
    """AdamW on a model that one rank trains whole; the other engines differ where several ranks do."""

    parallelism = "single"
    changes: Mapping[str, str] = {}
    keeps_gradients = False
    """Whether gradients keep their memory from step to step."""

    def __init__(self, job: TrainingJob, model: Model, loss_of: LossFunction) -> None:
        self._job, self._loss_of = job, loss_of
        self.module: nn.Module = model
        self.weights_hash = ""
        self._device = next(model.parameters()).device
        self._excess = 1.0
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=False)
        self._tracer = tracer_of(job, model)
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
        nn.utils.clip_grad_norm_(self.module.parameters(), self._job.training.optimizer.gradient_clip)
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
            liveness.beat("backward and optimizer")
            scaled = self._scaler.scale(loss * len(part_BS) / len(tokens_BS) / self._excess)
            scaled.backward()
            total += loss.detach().double() * len(part_BS)
        return total / len(tokens_BS)


class DdpReplica(WholeModel):
    """DistributedDataParallel; gradients stay where they are reduced."""

    parallelism = "ddp"
    keeps_gradients = True

    def parts(self) -> Parts:
        return DdpState(self.module, self.optimizer, self._settle)

    def _settle(self) -> None:
        size_BS = (self._job.microbatch, self._job.shape.sequence)
        tokens_BS = torch.zeros(size_BS, dtype=torch.int64, device=self._device)
        settle_buckets(self._loss_of(tokens_BS), self.optimizer)

    def share(self, model: Model) -> None:
        """Wrap the model, and scale the loss of fp16, in which small gradients would be lost."""
        self._parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self._loss_of = fused_loss(self._parallel)
        self._scaler = torch.amp.GradScaler(self._device.type, enabled=self._job.training.precision == "fp16")

    def before_microbatch(self, *, last: bool) -> None:
        self._parallel.require_backward_grad_sync = last


class DdpState(InPlaceState):
    """The state of a replica, whose reducer must have seen a backward pass before a resumed run goes on."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, settle: Callable[[], None]
    ) -> None:
        super().__init__(model, optimizer)
        self._settle = settle

    def take(self, tensors: dict[str, Tensor]) -> None:  # noqa: ARG002 - they are in place
        """Let the reducer sort its buckets."""
        self._settle()


class Fsdp2Shard(WholeModel):
    """FSDP2: a rank keeps its share of parameters, gradients and moments."""

    parallelism = "fsdp2"

    def share(self, model: Model) -> None:
        shard(model, self._job)
        self._excess = gradient_excess(self._device)
        once = self._job.training.reduction == "step"
        self._sync = GradientSync(model, microbatches=self._job.microbatches) if once else None

    def before_microbatch(self, *, last: bool) -> None:  # noqa: ARG002 - it counts microbatches itself
        if self._sync:
            self._sync.before_forward()


class CanonicalReplica(WholeModel):
    """Gradients summed in a fixed tree, the same on any number of ranks; see `canonical`."""

    parallelism = "replicated"

    def share(self, model: Model) -> None:
        self._tree = CanonicalGradients(model, self._job, loss_of=self._loss_of)

    def gradients(self, batch: Batch) -> Tensor:
        """Leave the mean gradients of the global batch in the parameters; return its mean loss."""
        return self._tree.of_step(batch)


def _baseline_engine(job: TrainingJob) -> type[WholeModel]:
    if job.training.summation == "canonical":
        return CanonicalReplica
    return WholeModel if job.sharding == "none" else Fsdp2Shard


def fused_loss(model: nn.Module) -> LossFunction:
    """Return the loss that the model computes together with its head."""
    return lambda tokens_BS: model(tokens_BS, targets_of(tokens_BS))


def baseline_model(job: TrainingJob, device: torch.device) -> Model:
    """Return the model with nothing recomputed, nothing compiled."""
    plain = job.training.model_copy(update={"activation_checkpointing": False})
    with torch.device(device):
        model = worker.make_model(job.model_copy(update={"training": plain}))
    worker.initialise(model, job)
    return model


def baseline_loss(model: Model, job: TrainingJob) -> LossFunction:
    """Return the cross entropy of logits, with nothing of ours.

    One graph is compiled of all where FSDP has no hook between the layers.
    """
    head = next_token_loss
    alone = job.sharding == "none" or job.training.summation == "canonical"
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
