"""Times of this project's kernels on GPUs that few have; `tools.kernel_code.table` writes them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

from twinrun.foundation.manifest import Frozen, load_rows
from twinrun.manifests.vendor import Gpu

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


@cache
def scan_of(gpu: Gpu) -> tuple[float, float] | None:
    """Return a scan as compiled code for the architecture predicts it; None where nobody compiled it.

    It is elements a second of the forward pass, and forward passes that the backward one takes.
    """
    rows = [
        one
        for one in kernel_times()
        if one.arch == gpu.arch.replace("_", "") and one.kernel.startswith("scan-")
    ]
    if not rows:
        return None
    forward, backward = (
        next(one for one in rows if one.kernel.endswith(name)) for name in ("forward", "backward")
    )
    units = (gpu.compute_units or rows[0].units) / rows[0].units
    rate = math.prod(forward.shape) / (forward.ms / 1e3) * units
    return rate, backward.ms / forward.ms
