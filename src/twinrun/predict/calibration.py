"""What was measured or fitted beforehand, as data with its source."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.errors import require_known
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.manifests.vendor import Gpu
from twinrun.predict.parallel_layout import ParallelLayout

Share = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]


class FittedGpu(Frozen):
    """What one GPU has in common with others."""

    vendor: str
    intensity: PositiveFloat
    """Dense FLOP for each byte of memory bandwidth."""


class Products(Frozen):
    """How the rate of a matrix product falls where it is small."""

    features: PositiveFloat
    """Features at which a product reaches half of its rate, on either side."""
    work: float
    """FLOP that a product takes the time of besides its own."""
    fitted: dict[str, FittedGpu]
    """GPUs that tables of software name."""
    carried: float
    """Exponent by which the share of the peak falls from one GPU to another of more intensity."""
    source: str


class Range(Frozen):
    """Between which values a figure lay in the rows that a software was fitted on."""

    low: PositiveFloat
    high: PositiveFloat

    def doublings(self, value: float) -> float:
        """Return how often a bound has to be doubled, or halved, to reach a value; 0 inside."""
        return max(0.0, math.log2(self.low / value), math.log2(value / self.high))


class KernelShape(Frozen):
    """How a block was off that its features, ranks and tokens alone do not explain."""

    width: PositiveFloat
    tensor: PositiveFloat
    tokens: PositiveFloat
    factor: PositiveFloat
    """Measured over predicted seconds."""
    spread: PositiveFloat
    """Half of a 90 % interval, as a logarithm, at this shape."""

    def nearness(self, width: float, tensor: float, tokens: float) -> float:
        """Return 1 at the shape itself, and less by the doublings to another: 0.4 after a half."""
        pairs = ((width, self.width), (tensor, self.tensor), (tokens, self.tokens))
        return math.exp(-4 * sum(math.log2(one / other) ** 2 for one, other in pairs))


class Software(Frozen):
    """A generation of a training framework."""

    id: str
    title: str
    year: float
    """Year of its release: newer software falls back on older, never to less."""
    elements: PositiveFloat
    """Passes over memory beside the products, over those that are counted for eager kernels."""
    logits: PositiveFloat
    """Bytes moved for each logit, forward and backward."""
    host: PositiveFloat
    """Seconds that the host needs to start a block's forward pass."""
    tensor_host: float = 0.0
    """Seconds that it needs besides for each further rank of tensor parallelism."""
    softmax_host: float = 0.0
    """Seconds that it needs besides where the fused softmax does not take the shape."""
    recomputed: Share = 1.0
    """Fraction of a forward pass that recomputation adds to a step."""
    selective_products: float = 0.0
    """Fraction of a block's products that selective recomputation computes again."""
    exposed: Share
    """Fraction of the shorter of compute and communication that does not overlap."""
    tensor_exposed: Share = 1.0
    """Fraction of the collectives of tensor parallelism that nothing hides."""
    gradients: Share
    """Fraction of the sum of gradients that the backward pass does not hide."""
    summed_bytes: int | None = None
    """Bytes of a gradient while it is summed, where that is not its type."""
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
    """Fraction of the dense peak that large matrix products reach, by GPU or architecture."""
    fp8: dict[str, Share] = Field(default_factory=dict)
    """The same of products in fp8, of twice that peak."""
    attention: dict[str, PositiveFloat] = Field(default_factory=dict)
    """FLOP of fused attention for each byte that the memory could move meanwhile, by GPU or architecture.

    Between GPUs the rate follows the bandwidth more closely than the peak: kernels written before a GPU do
    not use its new matrix units, and what they compute beside the products does not grow with them.
    """
    scan: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Elements per second of a selective scan's forward pass, by GPU."""
    scan_backward: PositiveFloat = 3.4
    """Forward passes that its backward pass takes: 1.321 over 0.393 ms on an H100."""
    unfused: float = 0.0
    """Bytes moved for each element of an attention matrix, forward; 0 where attention is fused."""
    masters: bool = False
    """Whether it trains fp32 copies of 16-bit parameters."""
    shapes: tuple[KernelShape, ...] = ()
    families: tuple[str, ...]
    """Families of the models in the rows it was fitted on."""
    fitted: dict[str, Range]
    """Where those rows lay, by figure."""
    recomputations: tuple[Literal["none", "selective", "selective-alternate", "whole"], ...]
    """What those rows computed again."""
    cuts: bool = False
    """Whether rows with tensor and pipeline parallelism were among those it was fitted on."""
    spread: PositiveFloat
    """Half of a 90 % interval, as a logarithm, for a row like those that were fitted."""
    spreads: dict[str, PositiveFloat] = Field(default_factory=dict)
    """The same on a GPU, or an architecture, of which there are few rows."""
    stage_spread: float = 0.0
    """What it gains for each doubling of the stages of a pipeline."""
    source: str

    def off_by(self, width: float, tensor: float, tokens: float) -> tuple[float, float]:
        """Return the factor of the nearest timed kernel shape, as far as it is near, and the spread."""
        if not self.shapes:
            return 1.0, self.spread
        near, factor, spread = max(
            (at.nearness(width, tensor, tokens), at.factor, at.spread) for at in self.shapes
        )
        return float(factor**near), near * spread + (1 - near) * self.spread

    def applied(self, layout: ParallelLayout) -> ParallelLayout:
        """Return a layout with what the software decides: types of states, and attention matrices."""
        mixed = {"parameter_bytes": 2, "masters": True} if self.masters else {}
        return replace(layout, scores_kept=bool(self.unfused), **mixed)  # type: ignore[arg-type]


class Distance(Frozen):
    """What half of a 90 % interval gains, as a logarithm, by what was not fitted."""

    doubling: dict[str, PositiveFloat]
    """For each doubling beyond the fitted rows, by figure."""
    most: dict[str, PositiveFloat]
    """Doublings beyond which nothing is said, by figure."""
    half: PositiveFloat
    """Half of an interval beyond which nothing is said."""
    architecture: PositiveFloat
    """For a GPU of which only another of its architecture was fitted with the software."""
    software: PositiveFloat
    """For an architecture that only other software was fitted on."""
    gpu: PositiveFloat
    """For one that no software was fitted on."""
    family: PositiveFloat
    """For a model of a family that the software was not fitted on."""
    layout: PositiveFloat
    """For tensor, pipeline or context parallelism with a software that was fitted without."""
    precision: PositiveFloat
    """For fp8 with a software that was fitted without."""
    recomputation: PositiveFloat
    """For recomputation that the software was fitted without."""
    experts: PositiveFloat
    """For experts, whose imbalance is stated and not fitted."""
    source: str


class Calibration(Frozen):
    """predict/calibration.toml."""

    version: int
    memory: Share
    """Fraction of the data sheet's memory bandwidth that a large copy reaches."""
    products: Products
    software: tuple[Software, ...]
    distance: Distance

    def rate(self, what: Literal["products", "fp8", "attention"], software: Software, gpu: Gpu) -> float:
        """Return what a software reaches on a GPU, in the terms of its row.

        Where it never ran there: the most that older software reached on the GPU or its architecture, else
        the middle of what newer did, else of its own on GPUs of the vendor, else of any software's, else of
        its own elsewhere.
        """
        tables: dict[str, dict[str, float]] = {one.id: getattr(one, what) for one in self.software}
        own = tables[software.id] if software.id in tables else getattr(software, what)
        if found := own.get(gpu.id, own.get(gpu.arch)):
            return found
        there = [
            (one.year, tables[one.id].get(gpu.id, tables[one.id].get(gpu.arch))) for one in self.software
        ]
        if older := [rate for year, rate in there if rate and year <= software.year]:
            return max(older)
        if newer := [rate for year, rate in there if rate and year > software.year]:
            return _middle(newer)
        intensity = gpu.device_peak_flops / gpu.device_bandwidth_bytes_s
        carried = 0.0 if what == "attention" else self.products.carried
        fitted = self.products.fitted
        for keys in ([key for key in fitted if fitted[key].vendor == gpu.vendor], [*fitted]):
            for table in (own, *tables.values()):
                if shared := [key for key in keys if key in table]:
                    return _middle(
                        [table[key] * (fitted[key].intensity / intensity) ** carried for key in shared]
                    )
        raise LookupError(what)

    def known(self, gpu: Gpu) -> tuple[Software, ...]:
        """Return the software that was fitted on a GPU of the architecture."""
        return tuple(one for one in self.software if gpu.arch in one.products)

    def of(self, software: str) -> Software:
        """Return a generation of software by its id.

        Raises:
            InputError: there is none.
        """
        known = {one.id: one for one in self.software}
        require_known(software, known, "no such software", place="--software")
        return known[software]


def _middle(values: list[float]) -> float:
    """Return the geometric mean: shares are off by factors."""
    return math.exp(sum(math.log(one) for one in values) / len(values))


@cache
def calibration() -> Calibration:
    """Return the calibration that this version of twinrun predicts by."""
    return load_toml(Path(__file__).with_name("calibration.toml"), Calibration)
