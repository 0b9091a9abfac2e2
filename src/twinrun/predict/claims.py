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
from twinrun.predict.calibration import basis
from twinrun.predict.kernel_times import kernel_times
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import LayoutSettings, machines_of, predict_at
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

    def predictions(self, gpus: Mapping[str, Gpu]) -> list[Prediction]:
        """Return one for each model."""
        machines, found = machines_of(gpus[self.gpu], self.nodes, self.devices, self.network), []
        for model in self.models:
            shape = member(model, place="models")
            again = shape.parameters() > RECOMPUTED_FROM
            settings = LayoutSettings(model=model, global_batch=self.global_batch, recomputation=again)
            found.append(predict_at(shape, machines, settings, basis(self.software)))
        return found


class PredictedClaim(Frozen):
    """A claim of a recipe, and what predicts it."""

    recipe: str
    claim: str
    unit: Literal["TFLOP/s a card", "tokens/s", "ratio"]
    over: PredictedSide
    under: PredictedSide | None = None

    def interval(self, gpus: Mapping[str, Gpu]) -> tuple[float, float, float] | None:
        """Return the value in the claim's unit with the interval of the side above; None where none is."""
        over = self.over.predictions(gpus)
        under = self.under.predictions(gpus) if self.under else []
        if any(one.unknown for one in (*over, *under)):
            return None
        whole = self.unit == "tokens/s"
        rates = [one.tokens_per_second * one.machines.devices if whole else _card(one) for one in over]  # type: ignore[operator]
        middle = mean(a / _card(b) for a, b in zip(rates, under, strict=True)) if under else mean(rates)
        factor = math.exp(max(one.half for one in over))
        return middle, middle / factor, middle * factor


class PredictedKernel(Frozen):
    """A claim about a kernel alone, and the row of kernel_times.csv that predicts it."""

    recipe: str
    claim: str
    gpu: str
    kernel: str
    shape: tuple[int, int, int, int] | None = None
    """Batch, heads, length and size; None where the kernel has one row."""
    unit: Literal["ms"] = "ms"

    def interval(self, gpus: Mapping[str, Gpu]) -> tuple[float, float, float]:  # noqa: ARG002
        """Return the ms of the row with their interval; one without a causal mask where there are two."""
        rows = (one for one in kernel_times() if (one.gpu, one.kernel) == (self.gpu, self.kernel))
        row = next(one for one in rows if self.shape in {None, one.shape})
        return row.ms, row.low, row.high


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
