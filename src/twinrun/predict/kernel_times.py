"""Times of this project's kernels on GPUs that few have; `tools.kernel_code.table` writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from twinrun.foundation.manifest import Frozen, load_rows
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Software

TABLE = Path(__file__).with_name("kernel_times.csv")


class KernelTime(Frozen):
    """One line of kernel_times.csv."""

    arch: str
    gpu: str
    units: int
    """Compute units of a device."""
    kernel: str
    batch: int
    heads: int
    """Heads, or channels."""
    length: int
    size: int
    """Features of a head, or states, or taps."""
    causal: bool
    ms: float
    low: float
    """Lower end of the 90 % interval, in ms."""
    high: float
    bound: str
    """What takes the time."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch, heads, length and size."""
        return self.batch, self.heads, self.length, self.size


@cache
def kernel_times() -> tuple[KernelTime, ...]:
    """Return the table."""
    return load_rows(TABLE, KernelTime)


@dataclass(frozen=True)
class PredictedScan:
    """A software with the scan that compiled code predicts, and with both ends of its interval."""

    gpu: str
    middle: Software
    fast: Software
    slow: Software


def predicted_scan(software: Software, gpu: Gpu) -> PredictedScan | None:
    """Return the scan of a GPU by its own row or by that of its architecture; None where there is none."""
    rows = [one for one in kernel_times() if one.arch == gpu.arch and one.kernel.startswith("scan-")]
    if not rows or not gpu.compute_units:
        return None
    units = gpu.compute_units / rows[0].units

    def at(end: str) -> Software:
        forward, backward = (getattr(_phase(rows, name), end) for name in ("forward", "backward"))
        rate = math.prod(rows[0].shape) / (forward / 1e3) * units
        return software.model_copy(update={"scan": {gpu.id: rate}, "scan_backward": backward / forward})

    return PredictedScan(rows[0].gpu, at("ms"), at("low"), at("high"))


def _phase(rows: Sequence[KernelTime], phase: str) -> KernelTime:
    return next(one for one in rows if one.kernel.endswith(phase))
