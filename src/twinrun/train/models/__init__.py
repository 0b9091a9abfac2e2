"""Models as the trainers know them: a family is one module here, named as in `twinrun.protocol.models`.

The module has `build`, see `build_of`; it imports torch alone and no other family.
"""

from __future__ import annotations

import importlib
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from twinrun.protocol.models import ModelShape

# Target that adds nothing to the loss; PyTorch's default.
IGNORED = -100
# In fp8 only matrix products are, between values in bf16.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


class Model(nn.Module):
    """What a trainer asks of any model."""

    blocks: nn.ModuleList
    """The layers, which sharding wraps one by one."""
    undecayed: tuple[str, ...] = ()
    """Endings of the names of matrices that are no weights of an embedding or a product."""
    options: dict[str, Any] | None = None
    """Options of Inductor for the blocks."""
    traced: bool = True
    """Whether torch.compile sees a whole block as one graph."""
    final_loss: Callable[..., Tensor]
    """Final norm, head and cross entropy: one region for torch.compile. Nats per token."""
    order: Any = None
    """What `twinrun.parity.renumber` returned, of a control run."""
    drawn_as: ClassVar[Mapping[str, str]] = {}
    """Parts of upstream's names, each with the part by which initial values are drawn and digests are made.

    These are older than upstream's names: a seed gives the weights that the committed records started from.
    """

    def drawn_name(self, name: str) -> str:
        """Return the name by which the initial values of the parameter `name` are drawn."""
        for part, drawn in self.drawn_as.items():
            name = name.replace(part, drawn)
        return name

    def key_of(self, name: str, seed: int) -> int:
        """Return the key of the initial values of the parameter `name`."""
        return zlib.crc32(f"{seed}/{self.drawn_name(name)}".encode())

    def initialise(self, seed: int) -> None:
        """Fill the parameters with values that follow from `seed`, the same at every world size."""
        raise NotImplementedError

    def compile_whole(self) -> None:
        """Compile forward pass and loss as one graph, where no hook of DDP or FSDP stands between layers.

        A block that cannot be compiled as one graph is an error: it would run, at half the speed.
        """
        self.compile(dynamic=False, fullgraph=True, options=self.options)

    def compile_regions(self) -> None:
        """Compile blocks and loss; hooks of DDP and FSDP must stay outside the compiled graphs."""
        for block in self.blocks:
            block.forward = torch.compile(
                block.forward, dynamic=False, fullgraph=self.traced, options=self.options
            )
        self.final_loss = torch.compile(self.final_loss, dynamic=False, fullgraph=True)

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """Return logits (B, S, V), or with targets their mean cross entropy in fp32, a scalar."""
        raise NotImplementedError


def normal(shape: torch.Size, key: int, device: torch.device) -> Tensor:
    """Draw standard normal numbers in fp32 by hashing positions; no generator state is used."""
    counter = torch.arange(shape.numel(), device=device)
    radius = torch.sqrt(-2 * torch.log(_hashed(2 * counter, key)))
    angle = 2 * math.pi * _hashed(2 * counter + 1, key)
    return (radius * torch.cos(angle)).view(shape)


def uniform(shape: torch.Size, key: int, device: torch.device) -> Tensor:
    """Draw numbers of (0, 1] in fp32 in the same way."""
    return _hashed(torch.arange(shape.numel(), device=device), key).view(shape)


def _hashed(counter: Tensor, key: int) -> Tensor:
    """Hash int64 counters to fp32 numbers in (0, 1]."""
    return (_scramble(_scramble(counter) ^ key) + 0.5) * 2.0**-32


def _scramble(word: Tensor) -> Tensor:
    """Mix 32-bit words held in int64: the lowbias32 constants of Wellons' hash prospector."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = ((word ^ (word >> shift)) * factor) & 0xFFFFFFFF
    return word ^ (word >> 16)


Build = Callable[..., "Model"]
"""Takes a shape and the keyword `training`; returns a model on the current device, not initialised.

Of the settings it heeds those that say how layers compute, and refuses what it does not have.
"""


_brought: list[Build] = []


def bring(build: Build) -> None:
    """Let `build(shape, *, training)` make every model of this process; called before the first."""
    _brought[:] = [build]


def build_of(shape: ModelShape) -> Build:
    """Return what builds `shape`: the script's own where it has brought one, else its family's."""
    found: Build = _brought[0] if _brought else importlib.import_module(f"{__name__}.{shape.family}").build
    return found
