"""The state of a run whose weights and moments ZeRO has split, gathered for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

from twinrun.checkpoints.manifest import CheckpointManifest
from twinrun.train.checkpoint.state import MODEL, OPTIMIZER

# AdamW's state of a parameter: two moments of its size, and how many steps it took.
MOMENTS, STEP = ("exp_avg", "exp_avg_sq"), "step"


class GatheredState:
    """Weights and moments whole on every rank, in fp32, as without ZeRO; loads of DeepSpeed's run code."""

    def __init__(self, engine: Any, warm_up: Callable[[], None]) -> None:
        """Take an engine with ZeRO, and what lets it take a step that changes no weight."""
        self._module: nn.Module = engine.module
        self._optimizer: torch.optim.Optimizer = engine.optimizer.optimizer
        self._warm_up = warm_up

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run goes on from; every rank gathers all of it."""
        found, (step, *_) = {}, self._steps()
        for name, parameter in self._module.named_parameters():
            found[MODEL + name] = safe_get_full_fp32_param(parameter)
            for key in MOMENTS:
                found[f"{OPTIMIZER}{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
            found[f"{OPTIMIZER}{name}.{STEP}"] = step.cpu()
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def prepare(self, _manifest: CheckpointManifest) -> dict[str, Tensor]:
        """Let the engine make its moments, which it does in its first step, and return room for all."""
        self._warm_up()
        return {name: torch.zeros_like(tensor) for name, tensor in self.tensors().items()}

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Give each rank its part of weights, moments and the count of steps."""
        for name, parameter in self._module.named_parameters():
            whole = tensors[MODEL + name]
            safe_set_full_fp32_param(parameter, whole)
            _set_arithmetic(parameter, whole)
            for key in MOMENTS:
                safe_set_full_optimizer_state(parameter, tensors[f"{OPTIMIZER}{name}.{key}"], key)
            for step in self._steps():
                step.copy_(tensors[f"{OPTIMIZER}{name}.{STEP}"])

    def _steps(self) -> Iterator[Tensor]:
        return iter([state[STEP] for state in self._optimizer.state.values()])


def _set_arithmetic(parameter: Any, whole: Tensor) -> None:
    """Give the parameter that layers compute with, or this rank's part of it, the master's value."""
    part = getattr(parameter, "ds_tensor", None)
    if part is not None:
        rank = dist.get_rank()
        mine = whole.flatten()[part.numel() * rank : part.numel() * (rank + 1)]
        part.data.flatten()[: mine.numel()].copy_(mine)
    if parameter.data.shape == whole.shape:
        parameter.data.copy_(whole)
