"""How the ranks of a point share a training: rows of a recipe's `[layouts]`, and the disk of an offload."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.protocol.models.shape import Positive

Precision = Literal["fp32", "bf16", "fp16"]
Arithmetic = Precision | Literal["fp8"]
"""Of a training, whose matrix products may be in fp8, the rest in bf16."""
# A layout that names no number of ranks has as many on a processor.
PROCESSOR_RANKS = 2
# Features of which no checkpoint is made: a rank has weights of its own, under other names.
UNSAVED = ("pipeline", "tensor", "experts")
FEATURES = ("ZeRO-1", "ZeRO-2", "ZeRO-3", "offload", "pipeline", "tensor", "experts")


class Layout(Frozen):
    """Who holds and computes what; ranks with the same part of the model are its data-parallel group."""

    framework: str = "torch"
    """`torch` is PyTorch's own data parallelism, which the others are held against; every other name is that
    of the recipe's `[engine]`, and the default where the recipe has one."""
    devices: Positive | None = None
    """Ranks; where not given all GPUs of the machine, or two processes of a processor."""
    variant: str | None = None
    """Variant of the training's model: `moe` trains MODEL-moe of the recipe's models in place of MODEL."""
    precision: Precision | None = None
    """Arithmetic, where not the training's."""
    microbatch: Positive | None = None
    """Sequences of one forward pass, where not the training's."""
    sharding: Literal["none", "full"] = "none"
    """`full` is FSDP2, of PyTorch alone: a rank keeps its share of parameters, gradients and moments."""
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    """What is split over the data-parallel ranks: 1 optimizer state, 2 gradients too, 3 parameters too."""
    offload: Literal["none", "optimizer", "parameters"] = "none"
    """What waits in the host's memory; `parameters` means both."""
    storage: str | None = None
    """Folder of an NVMe disk that what is offloaded waits on, in place of the host's memory."""
    pipeline: Positive = 1
    """Stages that the layers are cut into."""
    tensor: Positive = 1
    """Ranks that the matrices of a layer are cut into."""
    experts: Positive | None = None
    """Data-parallel ranks that the experts of a layer are spread over."""
    settings: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Further keys of the engine's configuration; dotted names reach into its tables."""

    @property
    def plain(self) -> bool:
        """Whether PyTorch copies the whole model to every rank, which the others are held against."""
        return self.framework == "torch" and self.sharding == "none"

    @property
    def replicas(self) -> int:
        """Ranks that read the same sequences."""
        return self.pipeline * self.tensor

    @property
    def features(self) -> tuple[str, ...]:
        """Which of `FEATURES` it has."""
        has = {
            f"ZeRO-{self.zero}": True,
            "offload": self.offload != "none",
            "pipeline": self.pipeline > 1,
            "tensor": self.tensor > 1,
            "experts": self.experts is not None,
        }
        return tuple(name for name in FEATURES if has.get(name))

    def least_devices(self) -> int:
        """Return the fewest ranks that it needs."""
        return self.replicas * (self.experts or 1)


# Master weights and the two moments of Adam.
BYTES_PER_PARAMETER = 12


@dataclass(frozen=True, kw_only=True)
class StorageNeed:
    """A folder that takes the optimizer state of so many parameters."""

    folder: str
    parameters: int


def check_storage(folder: str, *, parameters: int, place: str) -> None:
    """Refuse a folder that does not take the optimizer state of so many parameters.

    Raises:
        InputError: it is no place to write to; names the setting at `place`.
        MachineError: the disk is too small.
    """
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK):
        allowed = "a folder on a disk of the machine that trains"
        raise InputError("no folder that can be written", place=place, found=folder, allowed=allowed)
    free, needed = shutil.disk_usage(folder).free, BYTES_PER_PARAMETER * parameters
    if free < needed:
        found, message = f"{free / 1e9:.1f} GB free", "the disk is too small for what is offloaded"
        allowed = f"{needed / 1e9:.1f} GB or more: {BYTES_PER_PARAMETER} bytes for each parameter"
        raise MachineError(message, place=folder, found=found, allowed=allowed)
