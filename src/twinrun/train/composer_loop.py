"""The training loop of Composer with our model, data and measurements."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from composer import Algorithm, Callback, ComposerModel, DataSpec, Event, Logger, State, Trainer
from composer.devices import Device, DeviceCPU, DeviceGPU
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

from twinrun.foundation.errors import InputError
from twinrun.protocol.digests import Tracer
from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import attention, ranks, worker
from twinrun.train.checkpoint.session import CheckpointCalls, checkpoints_of
from twinrun.train.checkpoint.state import InPlaceState
from twinrun.train.corpus import Corpus
from twinrun.train.data import STREAMING_CHANGES, Batch, load_batches, load_corpus, set_position, targets_of
from twinrun.train.device import device_of
from twinrun.train.metrics import Meter
from twinrun.train.models import Model
from twinrun.train.optimizer import adamw, learning_rate, set_learning_rate
from twinrun.train.sharding import GradientSync, gradient_excess, settle_buckets
from twinrun.train.trace import tracer_of
from twinrun.train.validation import ValidationLoss

# Changes of Composer and Streaming, as the record and the recipes' deviations name them.
CHANGES = {
    "composer": "the optimizer starts without a closure, which would wait for the loss",
    **STREAMING_CHANGES,
}
# Compilation can keep one rank busy for minutes while the others wait in a collective.
TIMEOUT_SECONDS = 1800.0
PRECISIONS = {"fp32": "fp32", "bf16": "amp_bf16", "fp8": "amp_bf16"}
# PURE: parameters are gathered and gradients reduced in the arithmetic's type, as published
# (github:mosaicml/llm-foundry@2e852dbf80fd:scripts/train/yamls/pretrain/mpt-1b.yaml). DEFAULT: gradients are
# summed over microbatches, and then reduced, in fp32.
MIXED_PRECISION = {"microbatch": "PURE", "step": "DEFAULT"}


def train(job: TrainingJob) -> TrainingResult:
    """Train for the job's steps; return what was measured."""
    start(job)
    device = device_of(job)
    corpus = load_corpus(job)
    kernel = worker.choose_attention(job, device)
    model = worker.build_model(job, device)
    weights_hash = worker.digest_of(model)
    meter = Meter(job, device)
    trainer = build_trainer(job, model=model, batches=load_batches(job, corpus), meter=meter)
    with attention.only(kernel):
        fit(trainer, job, model=model, corpus=corpus, meter=meter)
    return worker.collect(
        job,
        model=None,
        meter=meter,
        device=device,
        kernel=kernel,
        parallelism=parallelism(job),
        data_hash=corpus.sha256,
        data_server=corpus.server,
        weights_hash=weights_hash,
        changes=CHANGES,
    )


def start(job: TrainingJob) -> None:
    """Join the ranks of `job`.

    Raises:
        InputError: the launcher started another number of ranks than the job has.
    """
    # torchrun numbers nodes under another name than Composer reads.
    os.environ.setdefault("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    # Composer would send metrics of runs on its makers' platform to that platform.
    os.environ["MOSAICML_PLATFORM"] = "false"
    ranks.join(job, alone=parallelism(job) != "single", timeout=TIMEOUT_SECONDS)


def parallelism(job: TrainingJob) -> str:
    """Return how the ranks share the work: `single`, `ddp`, `fsdp1` or `fsdp2`."""
    if job.sharding == "full":
        return "fsdp2" if _sharding_2(job) else "fsdp1"
    return "single" if job.world_size == 1 else "ddp"


def build_trainer(job: TrainingJob, *, model: Model, batches: DataLoader[Batch], meter: Meter) -> Trainer:
    """Return a Trainer that runs `job.training.steps` steps and reports each to `meter`.

    It shows no progress bar, writes no log, no checkpoint, and talks to nobody but its ranks.
    """
    settings = job.training
    shared = parallelism(job)
    excess = gradient_excess(next(model.parameters()).device) if shared == "fsdp2" else 1.0
    tracer = tracer_of(job, model, parallelism=shared)
    return ClosurelessTrainer(
        model=ComposerLanguageModel(model, gradient_scale=1 / excess),
        train_dataloader=DataSpec(batches, get_num_samples_in_batch=_count_samples),
        optimizers=adamw(model, settings.optimizer),
        algorithms=[NormClipping(settings.optimizer.gradient_clip, tracer)],
        callbacks=[StepCallback(job, meter, tracer)],
        device=_device(job),
        precision=PRECISIONS[settings.precision],
        device_train_microbatch_size=job.microbatch,
        seed=settings.seed,
        dist_timeout=TIMEOUT_SECONDS,
        run_name=job.recipe,
        progress_bar=False,
        **_sharding(job, shared),
    )


def fit(trainer: Trainer, job: TrainingJob, *, model: Model, corpus: Corpus, meter: Meter) -> None:
    """Train the steps that no checkpoint has, saving on the way.

    Raises:
        InputError: the ranks share the work by FSDP1, whose flat parameters are not saved.
    """
    if job.checkpointing and parallelism(job) == "fsdp1":
        raise InputError("FSDP1 is not saved", place="--checkpoint", hint="choose a stack that has FSDP2")
    (optimizer,) = trainer.state.optimizers
    saves = checkpoints_of(job, corpus=corpus, parts=lambda: InPlaceState(model, optimizer), meter=meter)
    done = saves.resume()
    set_position(trainer.state.train_dataloader, job, corpus, step=done)
    (steps,) = (one for one in trainer.state.callbacks if isinstance(one, StepCallback))
    steps.go_on(done, saves)
    if done < job.training.steps:
        # Composer counts from 0 again: where training stands is ours to know.
        trainer.fit(duration=f"{job.training.steps - done}ba")
    saves.wait()
    trainer.close()


class ClosurelessTrainer(Trainer):
    """Starts the optimizer while the GPU still computes gradients: a closure waits for the loss first."""

    def _use_closures(self) -> bool:
        return False


class ComposerLanguageModel(ComposerModel):
    """The model as Composer calls it: one forward pass gives the loss."""

    def __init__(self, model: Model, *, gradient_scale: float = 1.0) -> None:
        super().__init__()
        # Both FSDP generations ask the Trainer's direct child which modules to shard one by one.
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


class NormClipping(Algorithm):
    """Clips the norm of all gradients, which are traced before it, as Composer's GradientClipping does.

    That one lies in a package with all of Composer's algorithms, whose imports take seconds of each start.
    """

    def __init__(self, most: float, tracer: Tracer | None = None) -> None:
        self._most, self._tracer = most, tracer

    def match(self, event: Event, state: State) -> bool:  # noqa: ARG002
        return bool(event == Event.AFTER_TRAIN_BATCH)

    def apply(self, event: Event, state: State, logger: Logger) -> None:  # noqa: ARG002
        if self._tracer:
            self._tracer.end()
        clip_norm(state.model, self._most)


def clip_norm(model: nn.Module, most: float) -> None:
    """Scale the gradients of `model` so that their norm over all ranks is `most` at the largest."""
    wrapped = [one for one in model.modules() if isinstance(one, FullyShardedDataParallel)]
    for module in wrapped:
        if module.check_is_root():
            module.clip_grad_norm_(max_norm=most)
    if not wrapped:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=most)


class StepCallback(Callback):
    """Sets the learning rate of each step and reports its samples, losses and time."""

    def __init__(self, job: TrainingJob, meter: Meter, tracer: Tracer | None = None) -> None:
        self._job = job
        self._tracer = tracer
        self._settings = job.training.optimizer
        self._meter = meter
        self._step = 0
        self._once: GradientSync | None = None
        self._saves: CheckpointCalls | None = None
        self._validation = ValidationLoss(job, meter)

    def go_on(self, done: int, saves: CheckpointCalls) -> None:
        """Count from `done` steps, and give each that ends to `saves`."""
        self._step, self._saves = done, saves

    def fit_start(self, state: State, _logger: Logger) -> None:
        if parallelism(self._job) == "fsdp2" and self._job.training.reduction == "step":
            self._once = GradientSync(state.model, microbatches=self._job.microbatches)
        if self._step and parallelism(self._job) == "ddp":
            size_BS = (self._job.microbatch, self._job.shape.sequence)
            tokens_BS = torch.zeros(size_BS, dtype=torch.int64, device=next(state.model.parameters()).device)
            settle_buckets(state.model({"tokens": tokens_BS}), state.optimizers[0])
        self._meter.start()

    def before_forward(self, _state: State, _logger: Logger) -> None:
        if self._once:
            self._once.before_forward()

    def batch_start(self, state: State, _logger: Logger) -> None:
        rate = learning_rate(self._step, self._settings, step_tokens=self._job.step_tokens)
        # Set here, not by a scheduler: FSDP makes new parameter groups after schedulers have run.
        set_learning_rate(state.optimizers[0], rate)
        self._step += 1
        # One copy for the step; Composer would copy, and wait, for each microbatch.
        state.batch = state.device.batch_to_device(state.batch)
        self._meter.add_samples(state.batch["hashes"])
        if self._tracer:
            self._tracer.begin()

    def after_loss(self, state: State, _logger: Logger) -> None:
        self._meter.add_loss(state.loss, _count_samples(state.batch))

    def batch_end(self, state: State, _logger: Logger) -> None:
        self._meter.end_step()
        self._validation.after_step(
            self._step,
            lambda tokens_BS, targets_BS: state.model({"tokens": tokens_BS, "targets": targets_BS}),
        )
        if self._saves:
            self._saves.after_step(self._step)


def _device(job: TrainingJob) -> Device:
    """Return the kind of device; Composer would compute fp32 in TF32, with 10 bits of mantissa."""
    return DeviceGPU(allow_tf32=job.training.precision != "fp32") if job.accelerator else DeviceCPU()


def _count_samples(batch: Batch) -> int:
    return len(batch["tokens"])


def _sharding(job: TrainingJob, parallelism: str) -> dict[str, Any]:
    """Return the Trainer's arguments for sharding in this generation of Composer."""
    if parallelism in ("single", "ddp"):
        return {}
    if parallelism == "fsdp2":
        return _sharding_2(job)
    if job.training.reduction == "step":
        raise InputError("FSDP1 reduces for every microbatch", place="--set reduction", allowed="microbatch")
    options = {"sharding_strategy": "FULL_SHARD", "mixed_precision": MIXED_PRECISION["microbatch"]}
    if "parallelism_config" in inspect.signature(Trainer).parameters:
        return {"parallelism_config": {"fsdp": options}}
    return {"fsdp_config": options}


def _sharding_2(job: TrainingJob) -> dict[str, Any]:
    """Return the Trainer's arguments for FSDP2; empty before Composer 0.31."""
    try:
        from composer.utils.parallelism import FSDP2Config, ParallelismConfig
    except ImportError:
        return {}
    reduction = job.training.reduction
    options = FSDP2Config(
        mixed_precision=MIXED_PRECISION[reduction], reshard_after_forward=reduction == "microbatch"
    )
    return {"parallelism_config": ParallelismConfig(fsdp2=options)}
