"""The engine of this recipe's layouts: PyTorch's data parallelism with quantised products in the blocks."""

from __future__ import annotations

import torch
from products import Quantiser, Settings, quantise
from torch import Tensor

from twinrun.checkpoints.manifest import CheckpointManifest
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import validate
from twinrun.protocol.training import TrainingJob
from twinrun.train import building, data_parallel, rank
from twinrun.train.checkpoint.state import Parts
from twinrun.train.data import Batch
from twinrun.train.models import Model

# Name of the steps so far in a checkpoint: they decide the random numbers of the next.
STEPS = "rounding.steps"


def start(job: TrainingJob) -> None:
    """Join the ranks of `job`.

    Raises:
        InputError: blocks are compiled or computed twice, and random numbers could not be drawn again.
    """
    for name in ("compile", "activation_checkpointing"):
        if found := getattr(job.training, name):
            raise InputError(
                "quantised products are neither compiled nor recomputed",
                place=f"--set {name}",
                found=found,
                allowed=False,
            )
    data_parallel.start(job)


def build(job: TrainingJob, device: torch.device) -> QuantisedReplica:
    """Return what trains `job`; embedding, norms, attention, head and optimizer are PyTorch's own."""
    model = building.build_model(job, device)
    return QuantisedReplica(job, model, data_parallel.fused_loss(model))


class QuantisedReplica(data_parallel.DdpReplica):
    """DistributedDataParallel of a model whose linear layers have quantised products."""

    def share(self, model: Model) -> None:
        """Quantise the products of the blocks, then wrap the model."""
        job = self._job
        assert job.layout is not None
        place = f"recipe.toml:layouts.{job.point}.settings"
        settings = validate(job.layout.settings, Settings, place=place)
        self._quantiser = Quantiser(settings, seed=job.training.seed, rank=rank.number(), device=self._device)
        quantise(model.blocks, self._quantiser, tokens=job.microbatch * job.shape.sequence, place=place)
        self._quantiser.begin(0)
        self._steps = torch.zeros((), dtype=torch.int64)
        super().share(model)

    def parts(self) -> Parts:
        """Return what a checkpoint has of the run, the place in the random numbers included."""
        return StateWithSteps(super().parts(), self._steps)

    def step(self, batch: Batch, rate: float) -> Tensor:
        """Train one step on this rank's sequences; return their mean loss, in nats per token."""
        self._quantiser.begin(int(self._steps))
        self._steps += 1
        return super().step(batch, rate)


class StateWithSteps:
    """The state of a replica, and how many steps it has done."""

    def __init__(self, replica: Parts, steps: Tensor) -> None:
        self._replica, self._steps = replica, steps

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors where they are."""
        return {**self._replica.tensors(), STEPS: self._steps}

    def prepare(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        """Make room for what `manifest` has."""
        return {**self._replica.prepare(manifest), STEPS: self._steps}

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what was loaded."""
        self._replica.take(tensors)
