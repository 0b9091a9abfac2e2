"""The all-reduces that a case names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from algorithms import naive, two_level
from compression import CODECS
from links import Links
from ring import Ring
from torch import Tensor

from twinrun.train import rank

FEEDBACK = "-feedback"


class Reducer:
    """An all-reduce in place, by name."""

    def __init__(
        self, algorithm: str, reduce: Callable[..., None], *, compression: str = "none", name: str = "ours"
    ) -> None:
        self.name, self.algorithm, self.compression = name, algorithm, compression
        self._reduce = reduce
        self._residual: Tensor | None = None

    @classmethod
    def of_library(cls) -> Reducer:
        """Return the library's own, whatever algorithm it chooses."""
        return cls("library", dist.all_reduce, name="library")

    def __call__(self, buffer: Tensor) -> None:
        """Sum `buffer` over all ranks."""
        if not self.compression.endswith(FEEDBACK):
            self._reduce(buffer)
            return
        if self._residual is None:
            self._residual = torch.zeros(buffer.numel(), dtype=torch.float32, device=buffer.device)
        self._reduce(buffer, residual=self._residual)

    def forget(self) -> None:
        """Free what compression has lost."""
        self._residual = None


def chosen(settings: dict[str, Any], links: Links) -> list[Reducer]:
    """Return the all-reduces of a case; a two-level ring only where there are two levels."""
    pieces = {"bucket_bytes": settings["bucket_kib"] << 10 or None}
    overlap = pieces | {"in_flight": settings["in_flight"]}
    inside = settings["ranks_per_node"] or rank.variable("LOCAL_WORLD_SIZE", links.size)
    made = {"ring": lambda: Ring(links, **overlap).all_reduce, "naive": lambda: naive(links, **pieces)}
    if 1 < inside < links.size and links.size % inside == 0:
        made["two-level"] = lambda: two_level(links, ranks_per_node=inside, **overlap)
    found = [Reducer(name, made[name]()) for name in settings["algorithms"] if name in made]
    # The ring without compression is one of the algorithms.
    for name in (one for one in settings["compressions"] if one != "none"):
        codec = CODECS[name.removesuffix(FEEDBACK)]()
        found.append(Reducer("ring", Ring(links, codec=codec, **overlap).all_reduce, compression=name))
    return found
