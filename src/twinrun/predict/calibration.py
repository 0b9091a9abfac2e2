"""What was measured or fitted beforehand, as data with its source."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.manifest import Frozen, load_toml

Share = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class Products(Frozen):
    """How the rate of a matrix product falls where it is small: the share of the most is 1 / (1 + sum)."""

    features: PositiveFloat
    """Features at which a product reaches half of its rate, on either side."""
    tokens: PositiveFloat
    """Tokens at which it does."""
    source: str


class Software(Frozen):
    """A generation of a training framework."""

    id: str
    title: str
    elements: PositiveFloat
    """Passes over memory beside the products, over those that are counted for eager kernels."""
    logits: PositiveFloat
    """Bytes moved for each logit, forward and backward."""
    host: PositiveFloat
    """Seconds that the host needs to start a block's forward pass."""
    tensor_host: float = 0.0
    """Seconds that it needs besides for each further rank of tensor parallelism."""
    recomputed: Share = 1.0
    """Fraction of a forward pass that recomputation adds to a step."""
    exposed: Share
    """Fraction of the shorter of compute and communication that does not overlap."""
    links: Share
    """Fraction of a link's bandwidth that collectives reach."""
    network: Share
    """Fraction of the network's bandwidth that collectives reach."""
    latency: PositiveFloat
    """Seconds that a collective takes at least."""
    optimizer: PositiveFloat
    """Bytes moved for each parameter in an optimizer step."""
    step: float = 0.0
    """Seconds of a step that are no work of a device."""
    products: dict[str, Share]
    """Fraction of the dense peak that large matrix products reach, by GPU."""
    attention: dict[str, PositiveFloat] = Field(default_factory=dict)
    """FLOP of fused attention for each byte that the memory could move meanwhile, by GPU.

    Between GPUs the rate follows the bandwidth more closely than the peak: kernels written before a GPU do
    not use its new matrix units, and what they compute beside the products does not grow with them.
    """
    scan: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Elements per second of a selective scan's forward pass, by GPU."""
    unfused: float = 0.0
    """Bytes moved for each element of an attention matrix, forward; 0 where attention is fused."""
    families: tuple[str, ...]
    """Families of the models in the rows it was fitted on."""
    cuts: bool = False
    """Whether rows with tensor and pipeline parallelism were among those it was fitted on."""
    spread: PositiveFloat
    """Half of a 90 % interval, as a logarithm, for a size that was not fitted."""
    source: str


class Distance(Frozen):
    """What half of a 90 % interval gains, as a logarithm, by what was not fitted."""

    scale_out: PositiveFloat
    """For each doubling of nodes beyond those that were fitted."""
    gpu: PositiveFloat
    """For a GPU that the software was not fitted on."""
    vendor: PositiveFloat
    """For a GPU of a vendor of whose GPUs none was fitted."""
    software: PositiveFloat
    """For a GPU that another software was fitted on."""
    family: PositiveFloat
    """For a model of a family that the software was not fitted on."""
    layout: PositiveFloat
    """For tensor or pipeline parallelism with a software that was fitted without."""
    source: str


class Calibration(Frozen):
    """predict/calibration.toml."""

    version: int
    vendors: tuple[str, ...]
    """GPUs that any software was fitted on."""
    memory: Share
    """Fraction of the data sheet's memory bandwidth that a large copy reaches."""
    products: Products
    software: tuple[Software, ...]
    distance: Distance

    def rate(self, what: Literal["products", "attention"], software: Software, gpu: str) -> float:
        """Return what a software reaches on a GPU, in the terms of its row.

        Where it never ran there: the middle of what others reach on the GPU, else of its own elsewhere.
        """
        own: dict[str, float] = getattr(software, what)
        if gpu in own:
            return own[gpu]
        others = [table[gpu] for one in self.software if gpu in (table := getattr(one, what))]
        return _middle(others or [*own.values()])

    def of(self, software: str) -> Software:
        """Return a generation of software by its id.

        Raises:
            InputError: there is none.
        """
        for one in self.software:
            if one.id == software:
                return one
        known = [one.id for one in self.software]
        raise InputError(
            "no such software",
            place="--software",
            found=software,
            allowed=known,
            hint=closest(software, known),
        )


def _middle(values: list[float]) -> float:
    """Return the geometric mean: shares are off by factors."""
    return math.exp(sum(math.log(one) for one in values) / len(values))


@cache
def calibration() -> Calibration:
    """Return the calibration that this version of twinrun predicts by."""
    return load_toml(Path(__file__).with_name("calibration.toml"), Calibration)
