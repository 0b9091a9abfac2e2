"""Tables of steps that ran, of how well sources were predicted, and of claims that are predicted.

The calibration's `source` says where the steps are from; what is predicted of a claim is never a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Literal

from twinrun.foundation.manifest import Frozen, load_rows, load_toml
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import calibration
from twinrun.predict.parallel_layout import Machines
from twinrun.predict.prediction import Prediction, predict
from twinrun.predict.request import GLOBAL_BATCH, LayoutSettings
from twinrun.predict.step import kernel_times
from twinrun.protocol.models import member

ROWS = Path(__file__).with_name("rows.csv")
# Where activations of a device's share do not fit, the published runs recomputed them.
RECOMPUTED_FROM = 6e9


class Score(Frozen):
    """One line of scores.csv: how a source was predicted while none of its rows was known."""

    source: str
    rows: int
    runs: int
    """Runs of the source on the same GPU that each prediction learned from."""
    error: float
    """Mean of predicted over measured time less one, without its sign."""
    bias: float
    inside: float
    """Share of rows inside their interval of 90 %."""
    half: float
    """Half of the mean interval, as a logarithm."""


@cache
def scores() -> tuple[Score, ...]:
    """Return the scores that `python -m tools.fit_predictions --score` wrote."""
    return load_rows(ROWS.with_name("scores.csv"), Score)


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
        machines = Machines.of(gpus[self.gpu], self.nodes, self.devices, self.network)
        software, found = calibration().of(self.software), []
        for model in self.models:
            shape = member(model, place="models")
            again = shape.parameters() > RECOMPUTED_FROM
            settings = LayoutSettings(global_batch=self.global_batch, recomputation=again)
            found.append(predict(settings.subject(shape, machines, software)))
        return found


class PredictedClaim(Frozen):
    """A claim of a recipe, and what predicts it: a step over another, or a row of kernel_times.csv."""

    recipe: str
    claim: str
    unit: Literal["TFLOP/s a card", "tokens/s", "ratio", "ms"]
    over: PredictedSide | None = None
    under: PredictedSide | None = None
    gpu: str | None = None
    kernel: str | None = None
    shape: str | None = None
    """Batch, heads, length and size; None where the kernel has one row."""

    def interval(self, gpus: Mapping[str, Gpu]) -> tuple[float, float, float] | None:
        """Return the value in the claim's unit with the interval of the side above; None where none is.

        Of a kernel it is one without a causal mask where there are two.
        """
        if self.over is None:
            kernels = (one for one in kernel_times() if (one.gpu, one.kernel) == (self.gpu, self.kernel))
            row = next(one for one in kernels if self.shape in {None, one.shape})
            return row.ms, row.low, row.high
        over, under = (side.predictions(gpus) if side else [] for side in (self.over, self.under))
        if any(one.unknown for one in (*over, *under)):
            return None
        rates = [one.rate if self.unit == "tokens/s" else _card(one) for one in over]
        middle = mean(a / _card(b) for a, b in zip(rates, under, strict=True)) if under else mean(rates)
        factor = math.exp(max(one.half for one in over))
        return middle, middle / factor, middle * factor


class PredictedClaims(Frozen):
    """predict/claims.toml."""

    claim: tuple[PredictedClaim, ...]


@cache
def predicted_claims() -> tuple[PredictedClaim, ...]:
    """Return all of them."""
    return load_toml(ROWS.with_name("claims.toml"), PredictedClaims).claim


def _card(one: Prediction) -> float:
    """Return the model TFLOP/s of a card."""
    gpu = one.machines.gpu
    return (one.model_flops_share or 0.0) * gpu.device_peak_flops * gpu.devices_per_card / 1e12
