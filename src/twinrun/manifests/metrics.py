"""Metrics: what a number is, which units and direction it has, and per what it may be counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.protocol.measurements import Per

FILE = Path("recipes/metrics.toml")
RATIO = "ratio"


class Reach(Frozen):
    """What the points of a run must span before a statement about several of something can hold of them."""

    devices: Annotated[int, Field(gt=0)] = 1
    """Points of fewer devices show nothing of it, for example where state is split over devices."""
    world_sizes: Annotated[int, Field(gt=0)] = 1
    """Different numbers of devices."""
    hardware_kinds: Annotated[int, Field(gt=0)] = 1
    """Different devices, by the names that the ranks report."""

    def with_that_of(self, other: Reach) -> Reach:
        """Return what both demand."""
        return Reach(**{name: max(getattr(self, name), getattr(other, name)) for name in Reach.model_fields})


Most = Literal["peak", "bandwidth", "memory", "power", "link", "resource"]
"""Of a device: its dense peak, memory bandwidth, memory, share of its card's power, links to the others of
its node, and the rate of the resource that a measured peak is of."""


class Evidence(Reach):
    """What a number of a metric must have before it can carry a verdict."""

    most: Most | Annotated[float, Field(gt=0)] | None = None
    """What nothing exceeds: a number, or by name what the device does or has."""
    unless: str | None = None
    """Label with which, where it is set and not `none`, bytes are counted that no link carries: what then
    bounds them is the memory bandwidth."""
    least: Annotated[float, Field(ge=0)] | None = None
    """What nothing is below; where `most` is named, a share of that."""
    error: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """How far above `most` a measurement may be by its own error, relative."""
    spread: Annotated[float, Field(gt=0)] | None = None
    """How far apart two numbers of one name may be at the points of a record, relative."""
    steps: Annotated[int, Field(gt=0)] = 1
    """Timed samples on a GPU; a number of fewer is shown with the words `few steps`."""
    trained_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of a series after the warm-up of the learning rate; fewer show no curve."""
    kept_fall: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of its fall that a claim about the series requires at the end; null where it need not fall."""
    most_rise: Annotated[float, Field(ge=0)] = 0.0
    """Relative rise of a series over its start with which the training has diverged."""
    least_fall: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of its start by which a series must fall before two that coincide are held to be one."""
    most_equal: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the steps of a series that may have one value, unrounded; none may then be 0 or below."""
    bounds: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Largest envelope of two curves where no claim says one, by the arithmetic's type."""
    above_chance: Annotated[float, Field(ge=0)] | None = None
    """Distance by which a loss may lie above that of guessing, the logarithm of the vocabulary."""
    overshoot: Annotated[float, Field(ge=1)] = 1.0
    """Multiple of that logarithm that a loss may reach while the learning rate rises, and `trained_steps`
    more."""


class Metric(Frozen):
    """One quantity."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    title: str
    """What a column is called."""
    unit: str
    """Canonical: what records hold."""
    units: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other units, each with its value in the canonical one."""
    better: Literal["higher", "lower"]
    per: Annotated[tuple[Per, ...], Field(min_length=1)]
    """What one number may count."""
    counts: str
    """Which things are counted, and how."""
    formulas: tuple[str, ...] = ()
    """Formulas that belong to it; where there are any, a number of it names one."""
    additive: bool = False
    """The value of a card is the sum over its devices."""
    repeated: bool = False
    """One sample decides nothing."""
    series: str | None = None
    """What a series of it goes over, for example `step`."""
    evidence: Evidence = Evidence()
    """What a number of it must have before it can carry a verdict."""
    depends_on: tuple[str, ...] = ()
    """Fields of a fingerprint that it is not normalised for: a restatement in it cannot free them, and runs
    that differ in them have no ratio in it. `data` stands for all fields whose names begin with `data.`."""
    between_points: bool = False
    """It is computed between points, from the metric of the claim, instead of measured at one."""
    between_curves: bool = False
    """It is computed between the curves that a parity is about."""
    fact: str | None = None
    """The fact of a point that it compares, where it is no number."""
    neutral: dict[str, str] = Field(default_factory=dict)
    """Settings, or groups of them, that cannot change it, each with the reason; all others count."""
    neutral_to: tuple[str, ...] = ()
    """Tables `neutral_to` of the file whose settings cannot change it either."""

    @property
    def computed(self) -> bool:
        """Whether it is computed between points, or between their curves, and measured at none."""
        return self.between_points or self.between_curves

    def decides(self, field: str) -> bool:
        """Say whether a field of a fingerprint changes what is measured."""
        return named_by(self.depends_on, field)

    @model_validator(mode="after")
    def _canonical_once(self) -> Metric:
        if self.unit in self.units:
            raise ValueError(f"`{self.unit}` is the canonical unit and needs no factor")
        return self

    def canonical(self, value: float, unit: str) -> float:
        """Return `value` of `unit` in the canonical unit."""
        return value if unit == self.unit else value * self.units[unit]

    def in_unit(self, value: float, unit: str) -> float:
        """Return a canonical `value` in `unit`."""
        return value if unit == self.unit else value / self.units[unit]


class MetricTable(Frozen):
    """recipes/metrics.toml."""

    neutral: dict[str, str] = Field(default_factory=dict)
    """Settings that can change no metric, each with the reason."""
    neutral_to: dict[str, dict[str, str]] = Field(default_factory=dict)
    """Settings that several metrics name together, with the reasons."""
    metric: tuple[Metric, ...]


def load_metrics(root: Path, *folders: Path) -> dict[str, Metric]:
    """Read the metrics of the project, and those that its recipes bring, by identifier.

    Args:
        folders: further recipes, which lie elsewhere.

    Raises:
        InputError: a row that is none, or a name given twice.
    """
    brought = [*sorted((root / FILE.parent).glob(f"*/{FILE.name}")), *(one / FILE.name for one in folders)]
    metrics: dict[str, Metric] = {}
    neutral: dict[str, str] = {}
    for path in (root / FILE, *(one for one in brought if one.is_file())):
        table = load_toml(path, MetricTable)
        neutral = neutral or table.neutral
        for number, metric in enumerate(table.metric):
            if metric.id in metrics:
                raise InputError("given twice", place=f"{path}:metric.{number}.id", found=metric.id)
            general = {**neutral, **table.neutral}
            # A metric can be about a setting that changes no other, as a validation loss is about its data.
            settings = {name: why for name, why in general.items() if not metric.decides(name)}
            where = f"{path}:metric.{number}.neutral_to"
            for name in metric.neutral_to:
                require_known(name, table.neutral_to, "no such table", place=where)
                settings |= table.neutral_to[name]
            settings |= metric.neutral
            metrics[metric.id] = metric.model_copy(update={"neutral": settings})
    return metrics


def named_by(names: Iterable[str], field: str) -> bool:
    """Say whether `names` have a field of a fingerprint, or the group that it belongs to."""
    return field in names or field.partition(".")[0] in names


def reason_for(neutral: Mapping[str, str], field: str) -> str | None:
    """Return why a field, or the group that it belongs to, is neutral; None where it counts."""
    return neutral.get(field, neutral.get(field.partition(".")[0]))
