"""A point of a sweep over layouts: one step after another, whoever shares the work."""

from __future__ import annotations

import contextlib
import itertools
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn

from twinrun.foundation.errors import InputError
from twinrun.protocol.training import SharedWork, TrainingJob, TrainingResult
from twinrun.train import attention, ranks, worker
from twinrun.train.checkpoint.session import CheckpointCalls, NoCheckpoints, checkpoints_in
from twinrun.train.checkpoint.state import Parts
from twinrun.train.corpus import Corpus
from twinrun.train.data import load_batches, load_corpus, set_position
from twinrun.train.device import device_of, held_bytes
from twinrun.train.metrics import Meter
from twinrun.train.optimizer import learning_rate
from twinrun.train.wire import TrafficCounter

# Whose messages are counted: the first sets buckets and traces up, and says what later ones do not.
COUNTED_STEP = 2


class LayoutEngine(Protocol):
    """What takes a step."""

    module: nn.Module

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run; raises InputError where there is none."""

    def step(self, tokens_BS: Tensor, rate: float) -> Tensor:
        """Train one step; return the mean loss of this rank's sequences, or of all."""


def train(job: TrainingJob) -> TrainingResult:
    """Train for the job's steps; return what was measured."""
    if job.layout is None:
        raise InputError("this script trains layouts", place=job.point, found="a point without one")
    device = device_of(job)
    ranks.check_world_size(job)
    framework = _framework(job)
    framework.start(job)
    corpus = load_corpus(job)
    kernel = worker.choose_attention(job, device)
    before = held_bytes(device)
    engine: LayoutEngine = framework.build(job, device)

    meter, wire = Meter(job, device), TrafficCounter()
    held: dict[str, int] = {}
    with attention.only(kernel):
        saves = _saves(job, corpus, engine, meter)
        done = saves.resume()
        counted = done + COUNTED_STEP
        batches = load_batches(job, corpus)
        set_position(batches, job, corpus, step=done)
        epochs = itertools.chain.from_iterable(itertools.repeat(batches))
        meter.start()
        for step, batch in zip(range(done, job.training.steps), epochs, strict=False):
            rate = learning_rate(step, job.training.optimizer, step_tokens=job.step_tokens)
            tokens_BS = batch["tokens"].to(device, non_blocking=True)
            with wire if step + 1 == counted else contextlib.nullcontext():
                loss = engine.step(tokens_BS, rate)
            # Ranks of one replica read the same sequences, which count once.
            if ranks.rank() % job.replicas == 0:
                meter.add_samples(batch["hashes"].to(device))
                meter.add_loss(loss, len(tokens_BS))
            del tokens_BS, loss
            if step + 1 == counted:
                held = {name: size - before[name] for name, size in held_bytes(device).items()}
            meter.end_step()
            saves.after_step(step + 1)
        saves.wait()

    result = worker.collect(
        job,
        meter=meter,
        device=device,
        kernel=kernel,
        parallelism=_name(job),
        data_hash=corpus.sha256,
        # The first rank has a part of them.
        weights_hash="",
    )
    return result.model_copy(update={"shared": _shared(job, engine.module, held, wire)})


def _saves(job: TrainingJob, corpus: Corpus, engine: LayoutEngine, meter: Meter) -> CheckpointCalls:
    if job.checkpointing is None:
        return NoCheckpoints()
    return checkpoints_in(job, corpus=corpus, parts=engine.parts(), meter=meter)


def _framework(job: TrainingJob) -> ModuleType:
    """Return the module that starts ranks and builds engines; DeepSpeed is imported only where it runs."""
    assert job.layout is not None
    if job.layout.framework == "torch":
        from twinrun.train import data_parallel

        return data_parallel
    from twinrun.train import deepspeed_adapter

    return deepspeed_adapter


def _name(job: TrainingJob) -> str:
    assert job.layout is not None
    if job.layout.framework == "torch":
        return "ddp" if job.layout.plain else "fsdp2"
    return ", ".join(job.layout.features) or "ZeRO-0"


def _shared(job: TrainingJob, module: nn.Module, held: dict[str, int], wire: TrafficCounter) -> SharedWork:
    """Return what the first rank holds and sends."""
    assert job.layout is not None
    experts = sum(_size(one) for one in module.parameters() if not getattr(one, "allreduce", True))
    data_ranks = job.world_size // job.replicas
    return SharedWork(
        parameters=sum(_size(one) for one in module.parameters()) - experts,
        expert_parameters=experts,
        data_ranks=data_ranks,
        expert_ranks=data_ranks // (job.layout.experts or 1),
        state_bytes=sum(held.values()),
        host_state_bytes=held.get("host", 0) if job.accelerator else 0,
        sent_elements=wire.sent,
        sent_bytes=wire.bytes,
        sent_by_operation=dict(wire.elements),
    )


def _size(parameter: torch.nn.Parameter) -> int:
    """Return the numbers of a parameter, of which ZeRO-3 leaves a rank a part."""
    whole: int = getattr(parameter, "ds_numel", parameter.numel())
    return whole
