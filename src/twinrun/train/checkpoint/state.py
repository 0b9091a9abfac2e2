"""The tensors of a run, by names that are the same however it is sharded and whatever trains it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from twinrun.checkpoints.manifest import CheckpointManifest, StoredTensor
from twinrun.foundation.errors import InputError
from twinrun.train.metrics import Meter

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MODEL, OPTIMIZER, HISTORY = "model.", "optimizer.", "history."
# A wrapper adds these to the name of a parameter.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


class Parts(Protocol):
    """Weights and optimizer state of a run, whoever trains it; every rank calls each method."""

    def tensors(self) -> dict[str, Tensor]:
        """Return what a run goes on from."""

    def prepare(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        """Return room for what `manifest` has of it."""

    def take(self, tensors: dict[str, Tensor]) -> None:
        """Go on from what was loaded into that room."""


class InPlaceState:
    """A model and its optimizer, whose own tensors are saved and loaded into."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, taken: Callable[[], None] = lambda: None
    ) -> None:
        """Take what is saved, and what is called once it has been loaded."""
        self._model, self._optimizer, self._taken = model, optimizer, taken

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a run goes on from, in the memory where it is; settings are no part of it."""
        state = self._weights()
        for name, parameter in self._model.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"{OPTIMIZER}{_plain(name)}.{key}"] = value
        return state

    def prepare(self, manifest: CheckpointManifest) -> dict[str, Tensor]:
        """Make the optimizer state that `manifest` has, and return all tensors to load into."""
        groups = {one: group for group in self._optimizer.param_groups for one in group["params"]}
        for name, parameter in self._model.named_parameters():
            prefix = f"{OPTIMIZER}{_plain(name)}."
            self._optimizer.state[parameter] = {
                key.removeprefix(prefix): _empty(one, parameter, groups[parameter])
                for key, one in manifest.tensors.items()
                if key.startswith(prefix)
            }
        return self.tensors()

    def _weights(self) -> dict[str, Tensor]:
        return {MODEL + _plain(name): tensor for name, tensor in self._model.state_dict().items()}

    def take(self, tensors: dict[str, Tensor]) -> None:  # noqa: ARG002 - they are in place
        """Go on: the tensors are the run's own."""
        self._taken()


def history(meter: Meter) -> dict[str, Tensor]:
    """Return the steps so far, by the names that they are saved under."""
    return {HISTORY + name: values for name, values in meter.history().items()}


def history_room(manifest: CheckpointManifest) -> dict[str, Tensor]:
    """Return room for the steps that `manifest` has."""
    return {
        name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for name, stored in manifest.tensors.items()
        if name.startswith(HISTORY)
    }


def history_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what `Meter.history` returned when the state was saved."""
    return {name.removeprefix(HISTORY): one for name, one in state.items() if name.startswith(HISTORY)}


def check_same(state: dict[str, Tensor], manifest: CheckpointManifest, *, place: str) -> None:
    """Refuse a checkpoint whose tensors are not those of this run; raises InputError naming the first."""
    ours = {name: f"{NAMES[tensor.dtype]} {list(tensor.shape)}" for name, tensor in state.items()}
    theirs = {name: f"{one.dtype} {list(one.shape)}" for name, one in manifest.tensors.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise InputError(
                "the checkpoint is of another model or optimizer",
                place=f"{place}:{name}",
                found=theirs.get(name, "no such tensor"),
                allowed=ours.get(name, "no such tensor"),
            )


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _empty(stored: StoredTensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Return room for a part of the optimizer state: like its parameter, or a count of steps."""
    if stored.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=DTYPES[stored.dtype])
    on_device = group.get("fused") or group.get("capturable")
    device = parameter.device if on_device and math.prod(stored.shape) == 1 else torch.device("cpu")
    return torch.zeros(stored.shape, dtype=DTYPES[stored.dtype], device=device)


class Staging:
    """The copies of one run; the save before must be written when the next is copied."""

    def __init__(self) -> None:
        # Pinned memory takes seconds to get and is copied into at the full rate of the link, so it is kept.
        self._pinned = BlockingAsyncStager(cache_staged_state_dict=True)
        # Memory that was written to before is copied into at several times the rate of new pages.
        self._pageable: dict[str, Tensor] = {}

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` on the host; those of a device have the same names and shapes in every save."""
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        rest = {name: tensor for name, tensor in tensors.items() if name not in on_device}
        pinned = self._pinned.stage(on_device) if on_device else {}
        return {**pinned, **{name: self._copied(name, tensor) for name, tensor in rest.items()}}

    def _copied(self, name: str, tensor: Tensor) -> Tensor:
        room = self._pageable.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = self._pageable[name] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return room.copy_(tensor)
