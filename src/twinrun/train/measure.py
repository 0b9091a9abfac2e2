"""What is measured of a call: its error, the memory that it keeps, and its times.

Times are those of the device, caches cold and launches queued, or from call to call on the host.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from twinrun.protocol.bench import COPY, PeakRate
from twinrun.train import rank, ranks
from twinrun.train.device import synchronise


def distance(found: Tensor, reference: Tensor) -> float:
    """Return ||found - reference|| over ||reference||, computed in float64; infinite where not a number."""
    found, reference = found.detach().double(), reference.detach().double()
    norm = float(torch.linalg.vector_norm(reference))
    difference = float(torch.linalg.vector_norm(found - reference))
    relative = difference / norm if norm else difference
    return relative if math.isfinite(relative) else math.inf


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is handed out uninitialised with NaN, so that what is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Filling goes with this mode; kernels without a deterministic form are not our concern here.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def kept_bytes(forward: Callable[[], Tensor], inputs: Iterable[Tensor]) -> int:
    """Return the bytes that autograd keeps of `forward` for the backward pass, inputs and output left out."""
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: an output that its own node keeps would never be freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        out = forward()
    known = {one.untyped_storage().data_ptr() for one in (*inputs, out)}
    return sum(size for place, size in kept.items() if place not in known)


Function = Callable[[], object]
TimedOn = Literal["device", "host"]

# Written before every timed call: more than the last level of any cache, MI300X's 256 MiB included.
FLUSH_BYTES = 512 << 20
# Before the first event the device spins this many times as long as a call took the host, so that launches
# are queued when it starts; at a clock that no device exceeds, and at least and at most so many cycles.
SPIN_FACTOR, CLOCK_HZ = 2, 3e9
SPIN_CYCLES = 1_000_000, 6_000_000
# Calls in a row of which a time on the host is the mean.
CALLS_IN_A_ROW = 20
# So long lasts a time between ranks at least, of as many calls in a row as that takes: ranks enter a call
# some ten microseconds apart, and more where they share a processor.
LEAST_MILLISECONDS, MOST_CALLS = 20.0, 200
COPY_BYTES = 2 << 30
COPY_REPEATS = 20


class Clock:
    """Times calls, which take turns; on several ranks a repeat starts together and the slowest counts."""

    def __init__(self, device: torch.device, *, warmup: int, repeats: int) -> None:
        self._device = device
        self._warmup = warmup
        self._repeats = repeats
        size = FLUSH_BYTES if device.type == "cuda" and repeats else 0
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def times(
        self, calls: Sequence[Function], *, clock: TimedOn = "device", between_ranks: bool = False
    ) -> list[tuple[float, ...]]:
        """Return milliseconds of each repeat of each call.

        Args:
            clock: `device` is the device's part of a call, caches cold; `host` is from call to call in a
                row, the host's part included, caches warm.
            between_ranks: calls are collectives; of a short one a repeat is the mean of several in a row.
        """
        warm = [self._warm(call) for call in calls]
        counts = [_in_a_row(seconds) if between_ranks else 1 for seconds in warm]
        spent: list[list[float]] = [[] for _ in calls]
        turns = list(zip(calls, map(_spin, warm), counts, spent, strict=True))
        for repeat in range(self._repeats):
            # In turns on an H200 every second short call read 0.3 microseconds more: not always the same.
            rank.beat("times its calls")
            for call, spin, count, times in turns[:: -1 if repeat % 2 else 1]:
                ranks.wait()
                on_device = clock == "device"
                times.append(self._on_device(call, spin, count) if on_device else self._on_host(call))
        return [tuple(ranks.largest(times, self._device)) for times in spent]

    def _warm(self, call: Function) -> float:
        """Return the seconds that `call` takes the host, the same on every rank."""
        took = []
        for _ in range(self._warmup):
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        # The median, since the first calls also load and compile; the longest, for ranks to start together.
        (seconds,) = ranks.largest([statistics.median(took or [0.0])], self._device)
        return seconds

    def _on_device(self, call: Function, spin: int, count: int) -> float:
        """Return the mean of `count` calls in a row."""
        if self._device.type != "cuda":
            began = time.perf_counter()
            for _ in range(count):
                call()
            return (time.perf_counter() - began) * 1e3 / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(spin)
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    def _on_host(self, call: Function) -> float:
        synchronise(self._device)
        began = time.perf_counter()
        for _ in range(CALLS_IN_A_ROW):
            call()
        synchronise(self._device)
        return (time.perf_counter() - began) * 1e3 / CALLS_IN_A_ROW


def _spin(seconds: float) -> int:
    """Return for how many cycles the device must spin while a call of so many seconds is queued."""
    least, most = SPIN_CYCLES
    return min(max(int(seconds * SPIN_FACTOR * CLOCK_HZ), least), most)


def _in_a_row(seconds: float) -> int:
    """Return how many calls of so many seconds one time is the mean of."""
    return min(max(1, math.ceil(LEAST_MILLISECONDS / 1e3 / max(seconds, 1e-9))), MOST_CALLS)


def copy_rate(device: torch.device) -> PeakRate:
    """Measure the bandwidth of a large copy in device memory, bytes read and written."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(COPY_BYTES, free // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = Clock(device, warmup=3, repeats=COPY_REPEATS)
    (milliseconds,) = clock.times([lambda: target.copy_(source)])
    rate = 2 * size / statistics.median(milliseconds) * 1e3
    how = f"bytes read and written by a copy of {size >> 20} MiB, median"
    return PeakRate(resource=COPY, rate=rate, how=how)
