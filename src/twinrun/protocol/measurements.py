"""What a point of any workload says: measurements with their samples, series, checks and digests."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen

Per = Literal["device", "card", "link", "node", "run"]
# Identifiers of formulas that numbers are named after; those of model FLOP are the families'.
BUS_BANDWIDTH = "bus-bandwidth/all-reduce"
"""2 (n - 1) / n times the bytes of a buffer over n ranks, a second, by PERFORMANCE.md of nccl-tests."""
FORWARD_SHARE = "forward-share/forward-over-wall"
"""Seconds in forward passes over wall seconds, both of the first rank and summed over tasks. As both have the
same requests, it is requests a second over those that the forward passes alone would reach."""
Samples = Annotated[tuple[float, ...], Field(min_length=1)]


class Measurement(Frozen):
    """One measured quantity: its samples, over those of what it is divided by."""

    id: str
    """Unique in its point."""
    metric: str
    """Row of recipes/metrics.toml."""
    unit: str
    per: Per
    samples: Samples
    divisor: Samples = (1.0,)
    """Samples taken apart from the first, all above 0: of a rate the times, of a speedup our times."""
    formula: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    """What tells it from others of its metric, for example `dtype` and `implementation`."""

    @model_validator(mode="after")
    def _over_something(self) -> Measurement:
        if min(self.divisor) <= 0:
            raise ValueError(f"`{self.id}` is divided by {min(self.divisor)}")
        return self

    @property
    def median(self) -> float:
        """The median of the samples, over that of the divisor."""
        return statistics.median(self.samples) / statistics.median(self.divisor)

    @property
    def low(self) -> float:
        """The lowest value that the samples allow."""
        return min(self.samples) / max(self.divisor)

    @property
    def high(self) -> float:
        """The highest value that the samples allow."""
        return max(self.samples) / min(self.divisor)

    @property
    def count(self) -> int:
        """Samples of the side that has fewer; a side of a single number was counted, and not sampled."""
        return min((len(one) for one in (self.samples, self.divisor) if len(one) > 1), default=1)

    @property
    def spread(self) -> float:
        """Half the range over the median; 0 where the median is 0."""
        return (self.high - self.low) / 2 / abs(self.median) if self.median else 0.0

    def overlaps(self, other: Measurement) -> bool:
        """Say whether the samples of both have values in common."""
        return self.low <= other.high and other.low <= self.high

    def times(self, factor: float, **changed: Any) -> Measurement:
        """Return `factor` times this, with other fields, such as another `id`, `metric` and `unit`."""
        samples = tuple(one * factor for one in self.samples)
        return self.model_copy(update={"samples": samples, **changed})


def over_time(amount: float, time: Measurement, **changed: Any) -> Measurement:
    """Return the rate of `amount` in each of the times: its median is that of the median time."""
    return time.model_copy(update={"samples": (amount,), "divisor": time.samples, **changed})


def single(name: str, value: float, unit: str, *, metric: str = "", **fields: Any) -> Measurement:
    """Return a number of one sample; its metric is its name between a `/` and an `@`, where none is given.

    Args:
        fields: others of the measurement; it is of the run where `per` does not say otherwise.
    """
    given = {"per": "run", "metric": metric or name.rpartition("/")[2].partition("@")[0], **fields}
    return Measurement(id=name, unit=unit, samples=(value,), **given)


class Series(Frozen):
    """One quantity over the steps of a run."""

    id: str
    metric: str
    unit: str
    per: Per
    values: tuple[float, ...]
    """From the first step on."""


class Check(Frozen):
    """The outcome of one check."""

    id: str
    outcome: Literal["pass", "fail", "unknown"]
    place: str
    """Device, node or allocation that was checked."""
    reason: str
    remedy: str | None = None
    """What to do about it."""
    nodes: tuple[str, ...] = ()
    """Nodes at fault, as far as a check of several can name them."""
    seconds: Annotated[float, Field(ge=0)] | None = None


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """All that is computed of a point; raises ValueError where two of one kind have one id."""

    measurements: tuple[Measurement, ...] = ()
    series: tuple[Series, ...] = ()
    checks: tuple[Check, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    """What must be equal where two points are of one thing: data, order of samples, initial weights."""

    def __post_init__(self) -> None:
        for found in (self.measurements, self.series):
            if twice := [name for name, times in Counter(one.id for one in found).items() if times > 1]:
                raise ValueError(f"two numbers have one id: {', '.join(twice)}")

    def measurement(self, name: str) -> Measurement | None:
        """Return the measurement called `name`."""
        return next((one for one in self.measurements if one.id == name), None)

    def one_series(self, metric: str) -> Series | None:
        """Return the series of `metric` itself; those of control runs have other names."""
        return next((one for one in self.series if one.id == one.metric == metric), None)
