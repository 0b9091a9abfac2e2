"""What the model says of published claims whose hardware few have: a third value, never a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Literal

from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Calibration
from twinrun.predict.kernel_times import KernelTime, kernel_times
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import LayoutSettings, predict_at
from twinrun.protocol.models import member

# Sequences of a step in the tables of one node.
GLOBAL_BATCH = 512
# Where activations of a device's share do not fit, the published runs recomputed them.
RECOMPUTED_FROM = 6e9


class PredictedSide(Frozen):
    """Models on machines of one kind."""

    gpu: str
    software: str
    models: tuple[str, ...]
    nodes: int = 1
    network: float | None = None
    """Gbit/s of a node."""
    global_batch: int = GLOBAL_BATCH
    devices: int = 8
    """Devices of a node."""

    def predictions(self, gpus: Mapping[str, Gpu], calibration: Calibration) -> tuple[Prediction, ...]:
        """Return one for each model."""
        return tuple(self._one(model, gpus, calibration) for model in self.models)

    def _one(self, model: str, gpus: Mapping[str, Gpu], calibration: Calibration) -> Prediction:
        shape = member(model, place="models")
        settings = LayoutSettings(
            model=model, global_batch=self.global_batch, recomputation=shape.parameters() > RECOMPUTED_FROM
        )
        return predict_at(
            shape,
            gpus[self.gpu],
            settings,
            nodes=self.nodes,
            devices_per_node=self.devices,
            network=self.network,
            software=calibration.of(self.software),
            calibration=calibration,
        )


class PredictedClaim(Frozen):
    """A claim of a recipe, and what predicts it."""

    recipe: str
    claim: str
    unit: Literal["TFLOP/s a card", "tokens/s", "ratio"]
    over: PredictedSide
    under: PredictedSide | None = None

    def unknown(self, gpus: Mapping[str, Gpu], calibration: Calibration) -> str | None:
        """Return why the model cannot say, and which measurement would tell; None where it can."""
        found = [
            one for side in (self.over, self.under) if side for one in side.predictions(gpus, calibration)
        ]
        return next((one.unknown for one in found if one.unknown), None)

    def value(self, gpus: Mapping[str, Gpu], calibration: Calibration) -> float:
        """Return the predicted value in the claim's unit: a rate, or a mean of ratios of cards."""
        predictions = self.over.predictions(gpus, calibration)
        if self.unit == "tokens/s":
            return mean((one.tokens_per_second or 0.0) * one.machines.devices for one in predictions)
        over = [_card(one) for one in predictions]
        if self.under is None:
            return mean(over)
        under = [_card(one) for one in self.under.predictions(gpus, calibration)]
        return mean(a / b for a, b in zip(over, under, strict=True))

    def interval(self, gpus: Mapping[str, Gpu], calibration: Calibration) -> tuple[float, float, float]:
        """Return the predicted value, and the ends of its 90 % interval: that of the side above."""
        half = max(one.half for one in self.over.predictions(gpus, calibration))
        middle = self.value(gpus, calibration)
        return middle, middle * math.exp(-half), middle * math.exp(half)


class PredictedKernel(Frozen):
    """A claim about a kernel alone, and the row of kernel_times.csv that predicts it."""

    recipe: str
    claim: str
    gpu: str
    kernel: str
    shape: tuple[int, int, int, int] | None = None
    """Batch, heads, length and size; None where the kernel has one row."""
    unit: Literal["ms"] = "ms"

    def time(self) -> KernelTime:
        """Return the row; one without a causal mask where there are two."""
        return next(
            one
            for one in kernel_times()
            if (one.gpu, one.kernel) == (self.gpu, self.kernel) and self.shape in {None, one.shape}
        )


class PredictedClaims(Frozen):
    """predict/claims.toml."""

    claim: tuple[PredictedClaim, ...]
    kernel: tuple[PredictedKernel, ...]


@cache
def predicted_claims() -> PredictedClaims:
    """Return all of them."""
    return load_toml(Path(__file__).with_name("claims.toml"), PredictedClaims)


def _card(one: Prediction) -> float:
    """Return the model TFLOP/s of a card."""
    assert one.model_flops_share is not None
    gpu = one.machines.gpu
    return one.model_flops_share * gpu.device_peak_flops * gpu.devices_per_card / 1e12
