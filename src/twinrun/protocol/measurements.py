"""What a point of any workload reports: measurements, series, checks and facts."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen

Per = Literal["device", "card", "link", "node", "run"]
Fact = str | int | float | bool | None


class Measurement(Frozen):
    """One measured quantity: the median of its samples, with the lowest and the highest."""

    id: str
    """Unique in its point."""
    metric: str
    """Row of recipes/metrics.toml."""
    unit: str
    per: Per
    median: float
    low: float
    high: float
    count: Annotated[int, Field(gt=0)]
    """Samples."""
    formula: str | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    """What tells it from others of its metric, for example `dtype` and `implementation`."""

    @model_validator(mode="after")
    def _ordered(self) -> Measurement:
        if not self.low <= self.median <= self.high:
            raise ValueError(f"`{self.id}`: the median {self.median} is not from {self.low} to {self.high}")
        if self.count == 1 and self.low != self.high:
            raise ValueError(f"`{self.id}`: one sample has no spread, found {self.low} to {self.high}")
        return self

    @property
    def spread(self) -> float:
        """Half the range over the median; 0 where the median is 0."""
        return (self.high - self.low) / 2 / abs(self.median) if self.median else 0.0

    def overlaps(self, other: Measurement) -> bool:
        """Say whether the samples of both have values in common."""
        return self.low <= other.high and other.low <= self.high


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
    seconds: float | None = None


class Numbers(Frozen):
    """All that a point reports."""

    measurements: tuple[Measurement, ...] = ()
    series: tuple[Series, ...] = ()
    checks: tuple[Check, ...] = ()
    facts: dict[str, Fact] = Field(default_factory=dict)
    """What else was found, by name; nothing is computed from a fact that is not listed by its workload."""

    @model_validator(mode="after")
    def _distinct(self) -> Numbers:
        for kind, names in (
            ("measurements", [one.id for one in self.measurements]),
            ("series", [one.id for one in self.series]),
        ):
            if twice := {name for name, times in Counter(names).items() if times > 1}:
                raise ValueError(f"two {kind} have one id: {', '.join(sorted(twice))}")
        return self

    def measurement(self, name: str) -> Measurement | None:
        """Return the measurement called `name`."""
        return self._by_id.get(name)

    @cached_property
    def _by_id(self) -> dict[str, Measurement]:
        """The measurements by id, gathered once."""
        return {one.id: one for one in self.measurements}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values; one of other measurements gathers them anew."""
        copied = super().model_copy(update=update, deep=deep)
        if update and "measurements" in update:
            copied.__dict__.pop("_by_id", None)
        return copied

    def one_series(self, metric: str) -> Series | None:
        """Return the series of `metric` itself; those of control runs have other names."""
        return next((one for one in self.series if one.id == one.metric == metric), None)


def sampled(
    name: str,
    samples: Sequence[float],
    *,
    metric: str,
    unit: str,
    per: Per,
    formula: str | None = None,
    labels: dict[str, str] | None = None,
) -> Measurement:
    """Summarise `samples`, at least one."""
    return Measurement(
        id=name,
        metric=metric,
        unit=unit,
        per=per,
        median=statistics.median(samples),
        low=min(samples),
        high=max(samples),
        count=len(samples),
        formula=formula,
        labels=labels or {},
    )


def scaled(
    base: Measurement,
    factor: float,
    *,
    name: str,
    metric: str,
    unit: str,
    per: Per,
    formula: str | None = None,
    labels: dict[str, str] | None = None,
) -> Measurement:
    """Return `factor` times the samples of `base`."""
    return Measurement(
        id=name,
        metric=metric,
        unit=unit,
        per=per,
        median=base.median * factor,
        low=base.low * factor,
        high=base.high * factor,
        count=base.count,
        formula=formula,
        labels=base.labels if labels is None else labels,
    )


def rate(
    base: Measurement,
    amount: float,
    *,
    name: str,
    metric: str,
    unit: str,
    per: Per,
    formula: str | None = None,
    labels: dict[str, str] | None = None,
) -> Measurement:
    """Return `amount` over the samples of `base`: the median is that of the median time."""
    return Measurement(
        id=name,
        metric=metric,
        unit=unit,
        per=per,
        median=amount / base.median,
        low=amount / base.high,
        high=amount / base.low,
        count=base.count,
        formula=formula,
        labels=base.labels if labels is None else labels,
    )
