"""What a rank sends: every collective of c10d that is called inside, whoever calls it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# How often each rank of n sends a message of a collective, over (n - 1) / n, by the ring algorithm: the least
# that a rank must send on average. A message is all that is reduced, gathered or scattered.
PASSES = {
    "allreduce_": 2,
    "allreduce_coalesced_": 2,
    "allgather_": 1,
    "_allgather_base_": 1,
    "allgather_coalesced_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "broadcast_": 1,
    "reduce_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
}
SEND = "send"
# Operations whose message is their second argument.
SCATTERED = ("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_base_")


class TrafficCounter(TorchDispatchMode):
    """Counts floating-point messages while it is entered; flags and shapes of a few bytes are no payload."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: defaultdict[str, float] = defaultdict(float)
        """Numbers that this rank sends at least, by operation."""
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("c10d::"):
            self._count(name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    @property
    def sent(self) -> float:
        """Numbers that this rank sends at least."""
        return sum(self.elements.values())

    def _count(self, name: str, args: Any) -> None:
        message = args[1 if name in SCATTERED else 0]
        share = 1.0 if name == SEND else PASSES.get(name, 0) * _others(args)
        for tensor in _tensors(message):
            if tensor.is_floating_point():
                self.elements[name] += share * tensor.numel()
                self.bytes += share * tensor.numel() * tensor.element_size()


def _others(args: Any) -> float:
    """Return (n - 1) / n of the group among the arguments."""
    group = next(one for one in args if isinstance(one, (torch.ScriptObject, dist.ProcessGroup)))
    # Up to PyTorch 2.7, at least, the group comes boxed.
    size: int = (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).size()
    return (size - 1) / size


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
