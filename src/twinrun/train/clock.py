"""Times of calls: cold caches and queued launches on the device, or from call to call on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from twinrun.protocol.bench import COPY, PeakRate
from twinrun.train import pulse, ranks
from twinrun.train.device import synchronise

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

    def times(self, calls: Sequence[Function], *, clock: TimedOn = "device") -> list[tuple[float, ...]]:
        """Return milliseconds of each repeat of each call.

        Args:
            clock: `device` is the device's part of a call, caches cold; `host` is from call to call in a
                row, the host's part included, caches warm.
        """
        spins = [self._warm(call) for call in calls]
        spent: list[list[float]] = [[] for _ in calls]
        turns = list(zip(calls, spins, spent, strict=True))
        for repeat in range(self._repeats):
            # In turns on an H200 every second short call read 0.3 microseconds more: not always the same.
            pulse.beat("times its calls")
            for call, spin, times in turns[:: -1 if repeat % 2 else 1]:
                ranks.wait()
                times.append(self._on_device(call, spin) if clock == "device" else self._on_host(call))
        return [tuple(ranks.largest(times, self._device)) for times in spent]

    def _warm(self, call: Function) -> int:
        """Return for how many cycles the device must spin while `call` is queued."""
        took = []
        for _ in range(self._warmup):
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        least, most = SPIN_CYCLES
        # The median, since the first calls also load and compile; the longest, for ranks to start together.
        (seconds,) = ranks.largest([statistics.median(took or [0.0])], self._device)
        return min(max(int(seconds * SPIN_FACTOR * CLOCK_HZ), least), most)

    def _on_device(self, call: Function, spin: int) -> float:
        if self._device.type != "cuda":
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(spin)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def _on_host(self, call: Function) -> float:
        synchronise(self._device)
        began = time.perf_counter()
        for _ in range(CALLS_IN_A_ROW):
            call()
        synchronise(self._device)
        return (time.perf_counter() - began) * 1e3 / CALLS_IN_A_ROW


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
