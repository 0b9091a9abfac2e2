"""What the first rank of a layout holds, and what it sends: every collective of c10d, whoever calls it."""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from twinrun.protocol.training import SharedWork, TrainingJob

# The step whose messages are counted, from 0: the first sets up buckets and traces what later ones do not.
COUNTED_STEP = 1

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


class SharedWorkMeter:
    """Counts the bytes of tensors between two steps, and the messages of one step."""

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        """Take the job before its engine is built: what is held by then is not the engine's."""
        assert job.layout is not None
        self._job, self._layout, self._device = job, job.layout, device
        self._traffic = TrafficCounter()
        self._before = held_bytes(device)
        self._held: dict[str, int] = {}

    def counting(self, step: int) -> AbstractContextManager[object]:
        """Count messages in `step` of this start, where it is the one that is counted."""
        return self._traffic if step == COUNTED_STEP else contextlib.nullcontext()

    def end_step(self, step: int) -> None:
        """Count what is held after the step whose messages are counted."""
        if step == COUNTED_STEP:
            self._held = {name: size - self._before[name] for name, size in held_bytes(self._device).items()}

    def result(self, module: nn.Module) -> SharedWork:
        """Return what this rank, the first, holds and sends."""
        experts = sum(_size(one) for one in module.parameters() if not getattr(one, "allreduce", True))
        data_ranks = self._job.world_size // self._job.replicas
        return SharedWork(
            parameters=sum(_size(one) for one in module.parameters()) - experts,
            expert_parameters=experts,
            data_ranks=data_ranks,
            expert_ranks=data_ranks // (self._layout.experts or 1),
            state_bytes=sum(self._held.values()),
            host_state_bytes=self._held.get("host", 0) if self._job.accelerator else 0,
            sent_elements=self._traffic.sent,
            sent_bytes=self._traffic.bytes,
            sent_by_operation=dict(self._traffic.elements),
        )


watch = SharedWorkMeter
"""What `twinrun.train.training` calls with a job and its device."""


def held_bytes(device: torch.device) -> dict[str, int]:
    """Return the bytes of all tensors that live now: of the device's allocator, and of those on the host."""
    kept: dict[int, int] = {}
    for found in gc.get_objects():
        # By its type: some objects warn when they are asked for their class. An undefined one has no device.
        with contextlib.suppress(RuntimeError):
            if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
                for tensor in (found, found.grad if found.is_leaf else None):
                    if tensor is not None:
                        storage = tensor.untyped_storage()
                        kept[storage.data_ptr()] = storage.nbytes()
    held = {"host": sum(kept.values())}
    return held | {"device": int(torch.cuda.memory_allocated(device))} if device.type == "cuda" else held


def _size(parameter: nn.Parameter) -> int:
    """Return the numbers of a parameter, of which ZeRO-3 leaves a rank a part."""
    whole: int = getattr(parameter, "ds_numel", parameter.numel())
    return whole


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
