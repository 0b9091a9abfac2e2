"""The ring as a communication hook of DistributedDataParallel.

`model.register_comm_hook(RingGradients(), average_gradients)` is all that a recipe needs.
Annotations are not postponed here: torch compares those of a hook with the types themselves.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from compression import Codec
from links import Links
from ring import IN_FLIGHT, Ring
from torch import Tensor
from torch.futures import Future


class RingGradients:
    """What the hook keeps: the ring, what compression has lost, and where transfers are started from."""

    def __init__(
        self,
        group: Any = None,
        *,
        bucket_bytes: int | None = None,
        in_flight: int = IN_FLIGHT,
        codec: Codec | None = None,
    ) -> None:
        self.links = Links(group)
        self._ring = Ring(self.links, bucket_bytes=bucket_bytes, in_flight=in_flight, codec=codec)
        self._compressed = codec is not None
        self._residuals: dict[int, Tensor] = {}
        self._streams: dict[torch.device, Any] = {}

    def average(self, index: int, gradient: Tensor) -> Future[Tensor]:
        """Average one bucket of gradients in place; on a GPU while the backward pass goes on."""
        device = gradient.device
        found: Future[Tensor] = Future(devices=[device] if device.type == "cuda" else None)
        with self._beside(device):
            self._ring.all_reduce(gradient, residual=self._residual(index, gradient))
            found.set_result(gradient.div_(self.links.size))
        return found

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context whose kernels run beside those of the backward pass."""
        if device.type != "cuda":
            return nullcontext()
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        beside: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return beside

    def _residual(self, index: int, gradient: Tensor) -> Tensor | None:
        """Return what was lost of this bucket; nothing yet where the buckets were cut anew."""
        if not self._compressed:
            return None
        kept = self._residuals.get(index)
        if kept is None or kept.numel() != gradient.numel():
            kept = torch.zeros(gradient.numel(), dtype=torch.float32, device=gradient.device)
            self._residuals[index] = kept
        return kept


def average_gradients(state: RingGradients, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket of DistributedDataParallel over the ranks of `state`."""
    return state.average(bucket.index(), bucket.buffer())
