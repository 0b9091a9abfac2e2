"""The links of this rank: point-to-point transfers, and the bytes that they carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from twinrun.train import ranks


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Sends and receives that are under way, with the memory that they need."""

    works: Sequence[Any]
    tensors: Sequence[Tensor]

    def wait(self) -> None:
        """Wait for the transfers; on a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()


class Links:
    """Transfers to and from other ranks; counts the bytes of both directions."""

    def __init__(self) -> None:
        joined = dist.is_initialized()
        self.rank: int = dist.get_rank() if joined else 0
        self.size: int = dist.get_world_size() if joined else 1
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.sent_bytes = self.received_bytes = 0

    def start(
        self, *, sends: Sequence[tuple[Tensor, int]] = (), receives: Sequence[tuple[Tensor, int]] = ()
    ) -> Transfer:
        """Begin transfers, each of a tensor and the rank at the other end; empty tensors are left out."""
        operations = [
            dist.P2POp(function, tensor, rank)
            for function, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in pairs
            if tensor.numel()
        ]
        self.sent_bytes += sum(tensor.nbytes for tensor, _ in sends)
        self.received_bytes += sum(tensor.nbytes for tensor, _ in receives)
        works = dist.batch_isend_irecv(operations) if operations else []
        return Transfer(works=works, tensors=[tensor for tensor, _ in (*sends, *receives)])

    def busiest_bytes(self, device: torch.device) -> int:
        """Return the most bytes that any rank's link carried in one direction; every rank must call it."""
        return int(max(ranks.largest([self.sent_bytes, self.received_bytes], device)))
