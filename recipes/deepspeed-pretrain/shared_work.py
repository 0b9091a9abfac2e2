"""What the first rank of a layout holds and sends, beside what ZeRO leaves it to.

Every collective of c10d is counted, whoever calls it. The formulas are those of ZeRO's paper
(arXiv:1910.02054, sections 5 and 7), for each parameter that the first rank's part of the model has:
P that are no experts' over N ranks, experts over those ranks that have the same ones.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from twinrun.foundation.text import MIB
from twinrun.protocol.layout import Layout
from twinrun.protocol.training import Reduction, TrainingJob
from twinrun.train.metrics import Meter

# Master weights and the two moments of Adam, always in fp32.
OPTIMIZER_BYTES = 12
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

    def report(self, meter: Meter, module: nn.Module) -> None:
        """Report what this rank, the first, holds and sends, and both over their formulas."""
        job, traffic = self._job, self._traffic
        experts = sum(_size(one) for one in module.parameters() if not getattr(one, "allreduce", True))
        count = sum(_size(one) for one in module.parameters())
        ranks = job.world_size // job.replicas
        parts = Parts(count - experts, ranks, experts, ranks // (self._layout.experts or 1))
        held, sent = sum(self._held.values()) / count, traffic.sent / count
        found = {
            "state-memory": held,
            "state-on-host": self._held.get("host", 0) / count if job.accelerator else 0.0,
            "state-of-formula": held / state_bytes(self._layout, parts, job.training.precision),
            "traffic": sent,
            "traffic-bytes": traffic.bytes / MIB,
        }
        reduction = job.training.reduction
        if least := messages(self._layout, parts, microbatches=job.microbatches, reduction=reduction):
            found["traffic-of-formula"] = sent / least
        for name, value in found.items():
            if name in job.training.reports:
                meter.report(name, value, per="device")


@dataclass(frozen=True)
class Parts:
    """The parameters of a rank's part of a model, and the ranks over which they are split."""

    parameters: int
    """Without experts."""
    ranks: int
    experts: int = 0
    """Parameters of experts."""
    expert_ranks: int = 1
    """Ranks that have the same experts."""


def state_bytes(layout: Layout, parts: Parts, precision: str) -> float:
    """Return the bytes of parameters, gradients and optimizer state for each parameter, between two steps.

    With 16-bit parameters 2 + 12 / N and, with parameters and gradients split, 16 / N; fp32 has 4 for
    each 2. Without ZeRO there is no second copy: parameters and moments, and gradients where they are kept;
    FSDP2 splits these and keeps no gradients.
    """
    width = 4 if precision == "fp32" else 2

    def each(ranks: int) -> float:
        if layout.framework == "torch":
            return 12 / ranks if layout.sharding == "full" else 16
        if not layout.zero:
            return 12
        split = (2 * width if layout.zero == 3 else 0) + OPTIMIZER_BYTES
        return (0 if layout.zero == 3 else width) + split / ranks

    whole = parts.parameters * each(parts.ranks) + parts.experts * each(parts.expert_ranks)
    return whole / (parts.parameters + parts.experts)


def messages(
    layout: Layout, parts: Parts, *, microbatches: int, reduction: Reduction = "microbatch"
) -> float | None:
    """Return the numbers that a rank sends in a step for each parameter; None where activations are sent too.

    An all-reduce is 2 (N - 1) / N of its message, a gather or a reduce-scatter half of that. Without ZeRO
    gradients are all-reduced once a step; ZeRO-1 reduces them to their owners once and gathers the new
    parameters, ZeRO-2 reduces after each microbatch; ZeRO-3 also gathers parameters in each pass, two of a
    microbatch, and none afterwards. So does FSDP2, which with the reduction `step` gathers and reduces once.
    """
    if layout.replicas > 1 or layout.experts is not None or parts.experts:
        return None
    passes = {0: 2, 1: 2, 2: microbatches + 1, 3: 3 * microbatches}[layout.zero]
    if layout.sharding == "full":
        passes = 2 if reduction == "step" else 3 * microbatches
    return passes * (parts.ranks - 1) / parts.ranks


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
