"""Our models and optimizer in DeepSpeed's engines, and all that is changed of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compilation
import deepspeed
import stages
import torch
import torch.distributed as dist
from configuration import configuration, refuse
from decoders import decoder_of
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import safe_set_full_fp32_param
from gathered_state import GatheredState
from pydantic import ValidationError
from torch import Tensor, nn

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import TrainingJob
from twinrun.train import building, rank, ranks
from twinrun.train.building import adamw, parameter_groups, set_learning_rate
from twinrun.train.checkpoint.state import InPlaceState, Parts
from twinrun.train.data import Batch, targets_of
from twinrun.train.loop import Engine
from twinrun.train.models import Model

CONFIG = "ds_config.json"
# Changes of this module to DeepSpeed, as the record and the recipe's deviations name them.
NOTHING_COMPILED = "compiles no operation that the layout does not ask for"
UNROUNDED_MASTERS = "fp32 masters start from weights that were not rounded"
SHARED_BUFFERS = "new weights leave the host in the memory of their gradients"


def start(job: TrainingJob) -> None:
    """Join the ranks of `job`; nothing is compiled that the layout does not ask for.

    Raises:
        TwinrunError: see `configuration.refuse` and `compilation.check`.
    """
    # Ranks of one host would compile a shared-memory all-reduce when they join, for minutes; to find out what
    # could be compiled at all, DeepSpeed starts compilers.
    deepspeed.ops.__compatible_ops__ = {}
    refuse(job)
    compilation.check(job)
    ranks.join(job, alone=True)
    deepspeed.init_distributed(verbose=False)


def build(job: TrainingJob, device: torch.device) -> ZeroEngine | PipelineEngine:
    """Return the engine of a job that has a layout, and write its configuration beside the result."""
    assert job.layout is not None
    config = configuration(job)
    if rank.number() == 0:
        write_atomically(Path(job.out) / CONFIG, json.dumps(config, indent=1) + "\n")
    model = building.build_model(job, device)
    # Before anything splits them.
    digest = building.digest_of(model)
    if job.layout.replicas > 1:
        return PipelineEngine(job, _pipeline(model, job), config, weights_hash=digest)
    if job.layout.experts is not None:
        _spread_experts(model, job.layout)
    return ZeroEngine(job, model, config, weights_hash=digest)


class DeepSpeedEngine(Engine):
    """A model in the engine of DeepSpeed that suits it."""

    def __init__(
        self, job: TrainingJob, model: nn.Module, config: dict[str, Any], *, weights_hash: str
    ) -> None:
        assert job.layout is not None
        self.weights_hash = weights_hash
        self._job, self._layout = job, job.layout
        self.module = model
        self.engine, changed = _initialize(job, model, config)
        self.changes = {"deepspeed": "; ".join(changed)}
        self.parallelism = ", ".join(job.layout.features) or "ZeRO-0"


class ZeroEngine(DeepSpeedEngine):
    """Data parallelism with what ZeRO splits and offloads."""

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run; raises InputError for experts, which are not gathered."""
        if self._layout.experts is not None:
            raise _not_saved("experts")
        if self._layout.zero:
            return GatheredState(self.engine, self._warm_up)
        return InPlaceState(self.module, self.engine.optimizer)

    def _warm_up(self) -> None:
        size_BS = (self._job.device_batch, self._job.shape.sequence)
        self.step({"tokens": torch.zeros(size_BS, dtype=torch.int64, device=self.engine.device)}, 0.0)

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Train one step on this rank's sequences; return their mean loss, in nats per token."""
        tokens_BS = batch["tokens"]
        set_learning_rate(self.engine.optimizer, rate)
        total = torch.zeros((), dtype=torch.float64, device=tokens_BS.device)
        for part_BS in tokens_BS.split(self._job.microbatch):
            loss = self.engine(part_BS, targets_of(part_BS))
            rank.beat("backward and optimizer")
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach().double() * len(part_BS)
        return total / len(tokens_BS)


class PipelineEngine(DeepSpeedEngine):
    """Layers cut into stages, their matrices into tensor-parallel parts."""

    def parts(self) -> Parts:
        """Raise InputError: a stage has its own layers, under other names."""
        raise _not_saved("pipeline and tensor")

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Train one step; return the mean loss of the global batch, the same on every rank."""
        set_learning_rate(self.engine.optimizer, rate)
        loss: Tensor = self.engine.train_batch(self._parts(batch["tokens"]))
        return loss.detach().double()

    def _parts(self, tokens_BS: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for part_BS in tokens_BS.split(self._job.microbatch):
            yield part_BS, targets_of(part_BS)


def _not_saved(what: str) -> InputError:
    said, allowed = "no checkpoint is made of this layout", "layouts of data parallelism and ZeRO"
    return InputError(said, place="--checkpoint", found=what, allowed=allowed)


def _initialize(job: TrainingJob, model: nn.Module, config: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """Return DeepSpeed's engine, and what is changed of it."""
    groups = parameter_groups(model, job.training.optimizer)
    if job.layout and job.layout.experts is not None:
        named = [{**group, "name": str(place)} for place, group in enumerate(groups)]
        groups = split_params_into_different_moe_groups_for_optimizer(named)
    optimizer = adamw(model, job.training.optimizer, groups=groups)
    initial = _unrounded(model, job)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place, found = f"layouts.{job.point}.settings", ".".join(map(str, fault["loc"]))
        raise InputError(f"DeepSpeed refuses a setting: {fault['msg']}", place=place, found=found) from None
    for parameter, whole in initial:
        safe_set_full_fp32_param(parameter, whole)
    shared = _share_gradients(engine.optimizer)
    done = {NOTHING_COMPILED: True, UNROUNDED_MASTERS: bool(initial), SHARED_BUFFERS: shared}
    return engine, tuple(change for change, made in done.items() if made)


def _share_gradients(optimizer: Any) -> bool:
    """Let new weights leave the host through the memory of the gradients that made them; say whether any do.

    ZeRO-1 and ZeRO-2 keep a buffer of the weights for that, 2 bytes a parameter; by then a step is done with
    its gradients, and the next ones come after the weights are used.
    """
    buffers: list[Tensor] = getattr(optimizer, "param_buffer_of_bit16_for_cpu_offload_groups", [])
    for place, buffer in enumerate(buffers):
        gradients = optimizer.single_partition_of_fp32_groups[place].grad
        buffers[place] = gradients.view(buffer.dtype)[: buffer.numel()]
    return bool(buffers)


def _unrounded(model: nn.Module, job: TrainingJob) -> list[tuple[nn.Parameter, Tensor]]:
    """Return what ZeRO's fp32 masters are to start from; DeepSpeed copies weights that it has rounded."""
    assert job.layout is not None
    if job.training.precision == "fp32" or not job.layout.zero:
        return []
    # A device that needs offloading has no room for them: DeepSpeed would flatten its weights on the host,
    # which would then hold as much again.
    place = "cpu" if job.layout.offload != "none" else None
    return [(one, one.detach().to(place or one.device, copy=True)) for one in model.parameters()]


def _pipeline(model: Model, job: TrainingJob) -> PipelineModule:
    """Return this rank's stage; ranks of one replica have consecutive numbers, as the data has it."""
    assert job.layout is not None
    layout = job.layout
    dims = [job.world_size // layout.replicas, layout.pipeline, layout.tensor]
    topology = ProcessTopology(axes=["data", "pipe", "model"], dims=dims)
    if layout.tensor > 1:
        stages.split_tensors(model, _tensor_group(topology), rank=rank.number() % layout.tensor)
    first, last = _ends(model)
    middle = stages.middle(model, recompute=job.training.activation_checkpointing is True)
    return PipelineModule(
        layers=[first, *middle, last],
        topology=topology,
        loss_fn=stages.loss,
        partition_method="uniform",
    )


def _ends(model: Model) -> tuple[Any, Any]:
    """Return the layers at the two ends; DeepSpeed sums the gradients of a matrix that both have."""
    around = decoder_of(model)
    if around.head is not around.embedding.weight:
        return stages.Rows(around.embedding.weight), stages.Head(around.head)
    tied = ("tokens", stages.Rows, around.head)
    first = TiedLayerSpec(*tied, tied_weight_attr=["weight"])
    return first, TiedLayerSpec(*tied, forward_fn=stages.with_weight, tied_weight_attr=["weight"])


def _tensor_group(topology: ProcessTopology) -> dist.ProcessGroup:
    """Return the group of the ranks that this rank shares matrices with; every rank makes all groups."""
    lists = topology.get_axis_comm_lists("model")
    groups = [dist.new_group(ranks=members) for members in lists]
    return next(group for group, members in zip(groups, lists, strict=True) if dist.get_rank() in members)


class DeepSpeedExperts(nn.Module):
    """DeepSpeed's layer of experts with the weights of ours: no token is dropped, the same is computed."""

    def __init__(self, ours: Any, *, ranks_of_experts: int) -> None:
        super().__init__()
        count = len(ours.experts)
        self.layer = MoE(
            ours.router.in_features,
            ours.experts[0],
            num_experts=count,
            ep_size=ranks_of_experts,
            drop_tokens=False,
            use_rts=False,
            min_capacity=0,
        )
        local = count // ranks_of_experts
        first = dist.get_rank() % ranks_of_experts * local
        inner = self.layer.deepspeed_moe
        inner.gate.wg.load_state_dict(ours.router.state_dict())
        for place, expert in enumerate(inner.experts.deepspeed_experts):
            expert.load_state_dict(ours.experts[first + place].state_dict())

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return what the chosen expert of each token makes of it, times the router's share."""
        y_BSD: Tensor = self.layer(x_BSD)[0]
        return y_BSD


def _spread_experts(model: Model, layout: Layout) -> None:
    assert layout.experts is not None
    device = next(model.parameters()).device
    for block in model.blocks:
        block.ffn = DeepSpeedExperts(block.ffn, ranks_of_experts=layout.experts).to(device)
