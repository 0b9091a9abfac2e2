"""A lint for other people's figures: which share of the peak a speed would be."""

from __future__ import annotations

from dataclasses import dataclass

from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Calibration
from twinrun.predict.configured_model import generic_flops
from twinrun.predict.step import FP8_PEAK
from twinrun.protocol.models.shape import ModelShape


@dataclass(frozen=True)
class CheckedSpeed:
    """A speed of a device beside what it can do."""

    gpu_name: str
    tokens_per_second: float
    flops_of_token: dict[str, int]
    """By formula: attention's causal half, and the whole of it."""
    peak: float
    """Dense FLOP/s of a device, of fp8 where it was asked for."""
    large_products: float
    """The most of it that a fitted software reaches in large products."""

    @property
    def shares(self) -> dict[str, float]:
        """Model FLOP/s over the peak, by formula."""
        return {name: self.tokens_per_second * one / self.peak for name, one in self.flops_of_token.items()}

    @property
    def impossible(self) -> bool:
        """Whether the work that cannot be left out is more than the peak."""
        return min(self.shares.values()) > 1

    @property
    def verdict(self) -> str:
        """What that says of the figure."""
        least, most = min(self.shares.values()), max(self.shares.values())
        if self.impossible:
            return "more than the peak: another unit of devices, a sparse peak, or another model"
        if most > 1:
            return "more than the peak where attention is counted whole: the figure counts the causal half"
        if least > self.large_products:
            return "possible, and more than large products alone reach with any software that was fitted"
        return "possible"


def checked_speed(
    shape: ModelShape, gpu: Gpu, *, tokens_per_second: float, fp8: bool, known: Calibration
) -> CheckedSpeed:
    """Hold a speed of a device against the data sheet."""
    half, whole = generic_flops(shape.work())
    flops = {"model-flops/6M+6LDS": half, "model-flops/6M+12LDS": whole, **shape.flops_by_formula()}
    what = "fp8" if fp8 else "products"
    return CheckedSpeed(
        gpu_name=gpu.name,
        tokens_per_second=tokens_per_second,
        flops_of_token=flops,
        peak=gpu.device_peak_flops * (FP8_PEAK if fp8 else 1),
        large_products=max(known.rate(what, one, gpu) for one in known.software),  # type: ignore[arg-type]
    )
