"""Composer's Trainer with our model, data and measurements."""

from __future__ import annotations

import os
from typing import Any

import torch
from composer import Callback, ComposerModel, DataSpec, Logger, State, Trainer
from composer.devices import Device, DeviceCPU, DeviceGPU
from torch import Tensor

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import TrainingJob
from twinrun.train import building, ranks
from twinrun.train.building import adamw, set_learning_rate
from twinrun.train.checkpoint.state import InPlaceState
from twinrun.train.data import Batch, targets_of
from twinrun.train.data_parallel import GradientSync, clip_norm, gradient_excess, settle_buckets
from twinrun.train.loop import Engine, Steps
from twinrun.train.models import Model

# Compilation can keep one rank busy for minutes while the others wait in a collective.
TIMEOUT_SECONDS = 1800.0
PRECISIONS = {"fp32": "fp32", "bf16": "amp_bf16", "fp8": "amp_bf16"}


def start(job: TrainingJob) -> None:
    """Join the ranks of `job`; raises InputError for another number of ranks than the job has."""
    # torchrun numbers nodes under another name than Composer reads.
    os.environ.setdefault("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    # Composer would send metrics of runs on its makers' platform to that platform.
    os.environ["MOSAICML_PLATFORM"] = "false"
    ranks.join(job, alone=job.world_size > 1 or job.sharding == "full", timeout=TIMEOUT_SECONDS)


def build(job: TrainingJob, device: torch.device) -> ComposerTrainer:
    """Return what trains `job`."""
    return ComposerTrainer(job, building.build_model(job, device))


class ComposerTrainer(Engine):
    """A Trainer that shows no progress, writes no log and no checkpoint, and talks to its ranks alone."""

    def __init__(self, job: TrainingJob, model: Model) -> None:
        settings, self._job = job.training, job
        # As the record and the recipes' deviations name it.
        self.changes = {"composer": "the optimizer starts without a closure, which would wait for the loss"}
        self.module, self.weights_hash = model, building.digest_of(model)
        self.parallelism = "fsdp2" if job.sharding == "full" else "single" if job.world_size == 1 else "ddp"
        sharded = self.parallelism == "fsdp2"
        excess = gradient_excess(next(model.parameters()).device) if sharded else 1.0
        self._calls = StepCallback(job, model, self)
        self._trainer = ClosurelessTrainer(
            model=ComposerLanguageModel(model, gradient_scale=1 / excess),
            optimizers=adamw(model, settings.optimizer),
            callbacks=[self._calls],
            device=_device(job),
            precision=PRECISIONS[settings.precision],
            device_train_microbatch_size=job.microbatch,
            seed=settings.seed,
            dist_timeout=TIMEOUT_SECONDS,
            run_name=job.recipe,
            progress_bar=False,
            **(_sharding(job) if sharded else {}),
        )

    def parts(self) -> InPlaceState:
        """Return what a checkpoint has of the run."""
        (optimizer,) = self._trainer.state.optimizers
        return InPlaceState(self.module, optimizer)

    def fit(self, steps: Steps) -> None:
        """Let the Trainer take the steps that are left; it counts them from 0 again."""
        self._calls.steps = steps
        if steps.left:
            data = DataSpec(steps.batches(), get_num_samples_in_batch=_count_samples)
            self._trainer.fit(train_dataloader=data, duration=f"{steps.left}ba")
        self._trainer.close()


class ClosurelessTrainer(Trainer):
    """Starts the optimizer while the GPU still computes gradients: a closure waits for the loss first."""

    def _use_closures(self) -> bool:
        return False


class ComposerLanguageModel(ComposerModel):
    """The model as Composer calls it: one forward pass gives the loss."""

    def __init__(self, model: Model, *, gradient_scale: float = 1.0) -> None:
        super().__init__()
        # FSDP asks the Trainer's direct child which modules to shard one by one.
        model.fsdp_wrap_fn = frozenset(model.blocks).__contains__
        self.model = model
        self._gradient_scale = gradient_scale

    def forward(self, batch: Batch) -> Tensor:
        tokens_BS = batch["tokens"]
        # The model casts for itself; autocast would run its norms in fp32.
        with torch.autocast(tokens_BS.device.type, enabled=False):
            loss: Tensor = self.model(tokens_BS, batch.get("targets", targets_of(tokens_BS)))
        # The value stays exact, its gradient is scaled.
        return loss.detach() + (loss - loss.detach()) * self._gradient_scale

    def loss(self, outputs: Tensor, _batch: Batch) -> Tensor:
        return outputs


class StepCallback(Callback):
    """Gives each step of the Trainer what every engine's steps have."""

    steps: Steps

    def __init__(self, job: TrainingJob, model: Model, engine: Engine) -> None:
        self._job, self._engine = job, engine
        self._tracer = building.tracer_of(job, model)

    def fit_start(self, state: State, _logger: Logger) -> None:
        self._sync = GradientSync(state.model, self._job)
        if self.steps.done and self._engine.parallelism == "ddp":
            device = next(state.model.parameters()).device
            settle_buckets(
                self._job, lambda one: state.model({"tokens": one}), state.optimizers[0], device=device
            )
        self.steps.start()

    def batch_start(self, state: State, _logger: Logger) -> None:
        # One copy for the step; Composer would copy, and wait, for each microbatch.
        state.batch, rate = self.steps.begin(state.batch)
        # Set here, not by a scheduler: FSDP makes new parameter groups after schedulers have run.
        set_learning_rate(state.optimizers[0], rate)
        if self._tracer:
            self._tracer.begin()

    def before_forward(self, _state: State, _logger: Logger) -> None:
        self._sync.before_forward()

    def after_loss(self, state: State, _logger: Logger) -> None:
        self.steps.add_loss(state.loss, _count_samples(state.batch))

    def after_train_batch(self, state: State, _logger: Logger) -> None:
        if self._tracer:
            self._tracer.end()
        self._engine.norm = clip_norm(state.model, self._job.training.optimizer.gradient_clip)

    def batch_end(self, state: State, _logger: Logger) -> None:
        self.steps.end(
            lambda tokens_BS, targets_BS: state.model({"tokens": tokens_BS, "targets": targets_BS}),
            norm=self._engine.norm,
        )


def _device(job: TrainingJob) -> Device:
    """Return the kind of device; Composer would compute fp32 in TF32, with 10 bits of mantissa."""
    return DeviceGPU(allow_tf32=job.training.precision != "fp32") if job.accelerator else DeviceCPU()


def _count_samples(batch: Batch) -> int:
    return len(batch["tokens"])


def _sharding(job: TrainingJob) -> dict[str, Any]:
    """Return the Trainer's arguments for FSDP2; raises InputError where Composer has none, before 0.31."""
    try:
        from composer.utils.parallelism import FSDP2Config, ParallelismConfig
    except ImportError:
        message, allowed = "this Composer does not shard by FSDP2", "none, or Composer 0.31 or later"
        raise InputError(message, place="--set sharding", found=job.sharding, allowed=allowed) from None
    every = job.training.reduction == "microbatch"
    # PURE: parameters are gathered and gradients reduced in the arithmetic's type, as published
    # (github:mosaicml/llm-foundry@2e852dbf80fd:scripts/train/yamls/pretrain/mpt-1b.yaml). DEFAULT: gradients
    # are summed over microbatches, and then reduced, in fp32.
    options = FSDP2Config(mixed_precision="PURE" if every else "DEFAULT", reshard_after_forward=every)
    return {"parallelism_config": ParallelismConfig(fsdp2=options)}
