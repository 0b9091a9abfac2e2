"""The rate of matrix products that a device was measured to do at most."""

from __future__ import annotations

import statistics

import torch
from attention import DTYPES

from twinrun.protocol.bench import PeakRate
from twinrun.train.measure import Clock

SIDE = 8192
REPEATS = 10


def products(device: torch.device, dtype: str) -> PeakRate:
    """Measure floating-point operations a second of a square matrix product of random numbers."""
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    (milliseconds,) = Clock(device, warmup=3, repeats=REPEATS).times([lambda: left @ right])
    rate = 2 * SIDE**3 / statistics.median(milliseconds) * 1e3
    how = f"floating-point operations of a product of two {SIDE} x {SIDE} matrices, median"
    return PeakRate(resource=f"{dtype}-products", rate=rate, how=how)
