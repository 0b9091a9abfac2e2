"""What benchmark scripts share: check before timing, cold caches, calls that take turns."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from twinrun.benchmark import (
    COPY,
    BenchJob,
    BenchResult,
    Ceiling,
    Measured,
    MeasuredLine,
    Timing,
    Work,
    furthest,
)
from twinrun.errors import RunError
from twinrun.train import device as devices

Call = Callable[[], object]

# Written before every timed call: more than the last level of any cache, MI300X's 256 MiB included.
FLUSH_BYTES = 512 << 20
# Before the first event the device spins this many times as long as a call took the host, so that launches
# are queued when it starts; at a clock that no device exceeds, and at least and at most so many cycles.
HEAD_STARTS, CLOCK_HZ = 2, 3e9
HEAD_START_CYCLES = 1_000_000, 6_000_000
# Calls in a row of which the turnaround is the mean.
CALLS_IN_A_ROW = 20
COPY_BYTES = 2 << 30
COPY_REPEATS = 20


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One implementation of a call, checked already."""

    implementation: str
    version: str
    call: Call
    errors: Mapping[str, float]
    """Relative distance from the float64 reference of each tensor that is returned, of one at least; may be
    infinite."""
    kept_bytes: int | None = None


class Session:
    """The measurements of one case on one device."""

    def __init__(self, job: BenchJob) -> None:
        self.job = job
        self.device = torch.device("cuda", 0) if job.accelerator else torch.device("cpu")
        # Inputs that are the same in every run would let a kernel pass by luck for ever.
        self.seed = random.SystemRandom().getrandbits(31) if job.bench.seed is None else job.bench.seed
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self._clock = Clock(self.device, warmup=job.bench.warmup, repeats=job.bench.repeats)
        self._measured: list[Measured] = []

    @property
    def timed(self) -> bool:
        """Whether this run times what it checks."""
        return self.job.bench.repeats > 0

    def measure(
        self,
        *,
        name: str,
        operation: str,
        element: str,
        way: str,
        work: Work,
        allowed_error: float,
        ours: Candidate,
        baseline: Candidate | None,
        absent: str | None = None,
    ) -> None:
        """Time ours and the baseline in turns, once ours is right.

        Args:
            absent: why there is no baseline.

        Raises:
            RunError: ours is further from the reference than `allowed_error`.
        """
        place = f"{self.job.point}, {name}"
        tensor, error = furthest(ours.errors)
        if error > allowed_error:
            raise RunError(
                "the result is not the reference's",
                place=place,
                found=f"relative distance {error:.3g} of {tensor}",
                allowed=f"at most {allowed_error:g}",
            )
        candidates = [ours, *([baseline] if baseline else [])]
        measure = self._clock.turnarounds if way == "call" else self._clock.times
        times = measure([one.call for one in candidates]) if self.timed else [() for _ in candidates]
        timings = [_timing(one, spent) for one, spent in zip(candidates, times, strict=True)]
        measured = Measured(
            id=name,
            operation=operation,
            element=element,
            way=way,
            work=work,
            allowed_error=allowed_error,
            ours=timings[0],
            baseline=timings[1] if baseline else None,
            baseline_absent=absent if baseline is None else None,
        )
        self._measured.append(measured)
        self._tell(measured)

    def result(self, ceilings: Sequence[Ceiling]) -> BenchResult:
        """Return what this case measured, beside the `ceilings` of the device."""
        return BenchResult(
            point=self.job.point,
            seed=self.seed,
            ceilings=tuple(ceilings),
            measurements=tuple(self._measured),
            device_name=devices.name(self.device),
            device_memory_bytes=devices.memory_bytes(self.device),
            peak_memory_bytes=devices.peak_memory_bytes(self.device),
            libraries=devices.libraries(self.device),
        )

    def _tell(self, measured: Measured) -> None:
        line = MeasuredLine(point=self.job.point, measurement=measured)
        with Path(self.job.metrics).open("a", encoding="utf-8") as stream:
            stream.write(line.model_dump_json() + "\n")
        beside = measured.baseline
        told = "; ".join(_told(timing) for timing in (measured.ours, beside) if timing)
        sys.stdout.write(f"{self.job.point} {measured.id}: {told}\n")


class Clock:
    """Times calls of a device; a call starts with cold caches and its launches queued."""

    def __init__(self, device: torch.device, *, warmup: int, repeats: int) -> None:
        self._device = device
        self._warmup = warmup
        self._repeats = repeats
        size = FLUSH_BYTES if device.type == "cuda" and repeats else 0
        self._flush = torch.empty(size, dtype=torch.uint8, device=device)

    def times(self, calls: Sequence[Call]) -> list[tuple[float, ...]]:
        """Return the device's milliseconds of each call of each, which take turns, there and back."""
        head_starts = [self._warm(call) for call in calls]
        spent: list[list[float]] = [[] for _ in calls]
        turns = list(zip(calls, head_starts, spent, strict=True))
        for repeat in range(self._repeats):
            # In turns on an H200 every second short call read 0.3 microseconds more: not always the same.
            for call, head_start, list_ in turns[:: -1 if repeat % 2 else 1]:
                list_.append(self._once(call, head_start))
        return [tuple(list_) for list_ in spent]

    def turnarounds(self, calls: Sequence[Call]) -> list[tuple[float, ...]]:
        """Return milliseconds from call to call in a row, the host's part included, caches warm."""
        for call in calls:
            self._warm(call)
        spent: list[list[float]] = [[] for _ in calls]
        for _ in range(self._repeats):
            for call, list_ in zip(calls, spent, strict=True):
                devices.synchronise(self._device)
                began = time.perf_counter()
                for _ in range(CALLS_IN_A_ROW):
                    call()
                devices.synchronise(self._device)
                list_.append((time.perf_counter() - began) * 1e3 / CALLS_IN_A_ROW)
        return [tuple(list_) for list_ in spent]

    def _warm(self, call: Call) -> int:
        """Return the cycles of head start that a call needs."""
        took = []
        for _ in range(self._warmup):
            began = time.perf_counter()
            call()
            took.append(time.perf_counter() - began)
        least, most = HEAD_START_CYCLES
        # The first calls also load and compile.
        return min(max(int(statistics.median(took or [0.0]) * HEAD_STARTS * CLOCK_HZ), least), most)

    def _once(self, call: Call, head_start: int) -> float:
        if self._device.type != "cuda":
            began = time.perf_counter()
            call()
            return (time.perf_counter() - began) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        torch.cuda._sleep(head_start)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))


def copy_ceiling(device: torch.device) -> Ceiling:
    """Measure the bandwidth of a large copy in device memory, bytes read and written."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(COPY_BYTES, free // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = Clock(device, warmup=3, repeats=COPY_REPEATS)
    (milliseconds,) = clock.times([lambda: target.copy_(source)])
    rate = 2 * size / statistics.median(milliseconds) * 1e3
    return Ceiling(id=COPY, rate=rate, what=f"bytes read and written by a copy of {size >> 20} MiB, median")


def distance(found: Tensor, reference: Tensor) -> float:
    """Return ||found - reference|| over ||reference||, computed in float64; infinite where not a number."""
    found, reference = found.detach().double(), reference.detach().double()
    norm = float(torch.linalg.vector_norm(reference))
    apart = float(torch.linalg.vector_norm(found - reference))
    relative = apart / norm if norm else apart
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


def kept_bytes(forward: Callable[[], Tensor], device: torch.device) -> int | None:
    """Return the memory that `forward` keeps beside its output; None where it cannot be known."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated(device)
    out = forward()
    return int(torch.cuda.memory_allocated(device) - before - out.nbytes)


def _timing(candidate: Candidate, milliseconds: tuple[float, ...]) -> Timing:
    return Timing(
        implementation=candidate.implementation,
        version=candidate.version,
        milliseconds=milliseconds,
        # A record holds finite numbers.
        errors={name: error if math.isfinite(error) else None for name, error in candidate.errors.items()},
        kept_bytes=candidate.kept_bytes,
    )


def _told(timing: Timing) -> str:
    spent = f"{statistics.median(timing.milliseconds):.4f} ms" if timing.milliseconds else "not timed"
    tensor, error = furthest(timing.errors)
    return f"{timing.implementation} {spent}, error {error:.2g} of {tensor}"
