"""Published and recorded steps that predictions are held against; each row says whether it was fitted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen, load_rows
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Calibration, Software
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.prediction import Prediction, predict
from twinrun.protocol.models import ModelShape, member
from twinrun.protocol.models.mpt import MptShape
from twinrun.protocol.models.shape import ActivationCheckpointing

ROWS = Path(__file__).with_name("rows.csv")


class Row(Frozen):
    """One line of rows.csv."""

    part: Literal["fit", "test"]
    source: str
    """Key of `SOURCES`."""
    software: str
    gpu: str
    devices_per_node: int
    nodes: int
    network_gbit: float
    model: str
    """Member of a family, or nothing for a GPT of the sizes that follow."""
    width: int
    heads: int
    layers: int
    vocabulary: int
    sequence: int
    global_batch: int
    microbatch: int
    tensor: int
    pipeline: int
    interleaved: int
    context: int
    sequence_parallel: bool
    fp8: bool
    shards: Literal["none", "optimizer", "gradients", "parameters"]
    recomputation: ActivationCheckpointing
    kept_whole: bool
    seconds: float = Field(gt=0)
    """Seconds of an optimizer step, as published or as recorded."""

    @property
    def shape(self) -> ModelShape:
        """The model."""
        if self.model:
            return member(f"{self.model}-{self.sequence}", place=ROWS.name)
        sizes = ("width", "heads", "layers", "vocabulary", "sequence")
        return MptShape(**{name: getattr(self, name) for name in sizes})

    def machines(self, gpus: Mapping[str, Gpu]) -> Machines:
        """Return what it ran on."""
        network = self.network_gbit * 1e9 / 8 or None
        return Machines(gpus[self.gpu], self.devices_per_node, self.nodes, network)

    def layout(self, software: Software) -> ParallelLayout:
        """Return how the devices shared it."""
        shares = set(Row.model_fields) & {one.name for one in fields(ParallelLayout)}
        return software.applied(ParallelLayout(**{name: getattr(self, name) for name in shares}))

    def predicted(self, gpus: Mapping[str, Gpu], calibration: Calibration) -> Prediction:
        """Return what is predicted for it."""
        software = calibration.of(self.software)
        return predict(
            self.shape,
            self.machines(gpus),
            self.layout(software),
            software=software,
            calibration=calibration,
        )


@dataclass(frozen=True)
class Residual:
    """A row beside its prediction."""

    row: Row
    prediction: Prediction

    @property
    def error(self) -> float:
        """Predicted over published time, less one."""
        assert self.prediction.time is not None
        return self.prediction.time.seconds / self.row.seconds - 1

    @property
    def covered(self) -> bool:
        """Whether the published time lies in the interval."""
        return abs(math.log1p(self.error)) <= self.prediction.half


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows."""
    return load_rows(ROWS, Row)


def residuals(
    gpus: Mapping[str, Gpu], calibration: Calibration, *, part: Literal["fit", "test"] = "test"
) -> tuple[Residual, ...]:
    """Return the rows of a part beside their predictions."""
    return tuple(Residual(row, row.predicted(gpus, calibration)) for row in rows() if row.part == part)
