"""Published and recorded steps, which rates are fitted on; the calibration's `source` says from where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path

from pydantic import Field

from twinrun.foundation.manifest import Frozen, load_rows
from twinrun.manifests.vendor import Gpu
from twinrun.predict.calibration import Calibration, Run, Subject
from twinrun.predict.configured_model import of_config, published_configs
from twinrun.predict.parallel_layout import Machines, ParallelLayout, Precision, Shards
from twinrun.protocol.models import ModelShape, member
from twinrun.protocol.models.mpt import MptShape
from twinrun.protocol.models.shape import ActivationCheckpointing

ROWS = Path(__file__).with_name("rows.csv")


class Row(Frozen):
    """One line of rows.csv."""

    source: str
    software: str
    gpu: str
    devices_per_node: int
    """Devices that links join: of a rack of GB200 all that the run used of it."""
    nodes: int
    network_gbit: float
    model: str
    """Member of a family, a key of configs.json, or nothing for a GPT of the sizes that follow."""
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
    experts: int
    sequence_parallel: bool
    precision: Precision
    shards: Shards
    recomputation: ActivationCheckpointing
    kept_whole: bool
    seconds: float = Field(gt=0)
    """Seconds of an optimizer step, as published or as recorded."""

    @property
    def shape(self) -> ModelShape:
        """The model."""
        if config := published_configs().get(self.model):
            return of_config(config, sequence=self.sequence, file=self.model)[0]
        if self.model:
            return member(f"{self.model}-{self.sequence}", place=ROWS.name)
        sizes = ("width", "heads", "layers", "vocabulary", "sequence")
        return MptShape(**{name: getattr(self, name) for name in sizes})

    def run(self, gpus: Mapping[str, Gpu], known: Calibration) -> Run:
        """Return what ran, and how long its step took."""
        software, network = known.of(self.software), self.network_gbit * 1e9 / 8 or None
        shares = set(Row.model_fields) & {one.name for one in fields(ParallelLayout)}
        layout = ParallelLayout(**{name: getattr(self, name) for name in shares})
        machines = Machines(gpus[self.gpu], self.devices_per_node, self.nodes, network)
        return Run(
            Subject(self.shape, machines, software.applied(layout), software, self.source), self.seconds
        )


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


@cache
def rows() -> tuple[Row, ...]:
    """Return all rows."""
    return load_rows(ROWS, Row)
