"""Intervals of medians, and what an interval says of a limit: it holds, it fails, or it is undecided."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from twinrun.protocol.measurements import Measurement

# Of 1,000 honest runs at the very limit, five fail and five hold too high: half of it lies on each side.
LEVEL = 0.99
# Fewer samples have no interval of their median at this level, whatever their distribution is.
LEAST_SAMPLES = 8
Standing = Literal["holds", "fails", "undecided"]


class Interval(NamedTuple):
    """Where a value lies, at the level `LEVEL`."""

    low: float
    value: float
    high: float
    samples: int
    """Number of samples behind it."""

    def times(self, factor: float) -> Interval:
        """Return the interval in another unit."""
        return Interval(self.low * factor, self.value * factor, self.high * factor, self.samples)


def exactly(value: float) -> Interval:
    """Return a number that was counted, and not sampled."""
    return Interval(value, value, value, 1)


def interval_of(found: Measurement) -> Interval:
    """Return the interval of a measurement's median, and of the ratio of two medians."""
    over, under = (_of_median(samples) for samples in (found.samples, found.divisor))
    return quotient(over, under)._replace(samples=found.count)


def _of_median(samples: Sequence[float]) -> Interval:
    """Return the interval of a median by the order of its samples; of few by Student's t, as if normal."""
    # SciPy takes a second to import, and commands that judge nothing do without it.
    from scipy import stats  # noqa: PLC0415

    value, count = statistics.median(samples), len(samples)
    if min(samples) == max(samples):
        return Interval(value, value, value, count)
    if count >= LEAST_SAMPLES:
        low, high = stats.quantile_test(samples, p=0.5).confidence_interval(LEVEL)
    else:
        low, high = stats.t.interval(LEVEL, count - 1, loc=value, scale=stats.sem(samples))
    return Interval(float(low), value, float(high), count)


def quotient(over: Interval, under: Interval, *, power: float = 1.0) -> Interval:
    """Return the interval of a ratio to a power, the errors of both logarithms added as squares.

    The law of propagation of uncertainty (JCGM 100:2008, 5.1.2), for two sides that were measured apart.

    Raises:
        ZeroDivisionError: the lower side is 0.
    """
    value = (over.value / under.value) ** power
    if not value:
        return exactly(value)
    below = power * math.hypot(_factor(over.value, over.low), _factor(under.value, under.high))
    above = power * math.hypot(_factor(over.value, over.high), _factor(under.value, under.low))
    low, high = value * math.exp(-below), value * math.exp(above)
    return Interval(low, value, high, min(over.samples, under.samples))


def mean(found: Sequence[Interval]) -> Interval:
    """Return the interval of a mean of values that were measured apart."""
    value = math.fsum(one.value for one in found) / len(found)
    below = math.hypot(*(one.value - one.low for one in found)) / len(found)
    above = math.hypot(*(one.high - one.value for one in found)) / len(found)
    return Interval(value - below, value, value + above, min(one.samples for one in found))


def _factor(value: float, end: float) -> float:
    """Return how far the end of an interval is from its value, as a logarithm; an end of 0 is beyond any."""
    return abs(math.log(end / value)) if end / value > 0 else math.inf


class Limits(NamedTuple):
    """The values that are allowed, ends included."""

    low: float
    high: float

    @classmethod
    def of(cls, value: float, *, better: Literal["higher", "lower", "equal"], tolerance: float) -> Limits:
        """Return what is no worse than `value` by more than the tolerance, to a value of 0 a distance."""
        low, high = (value * (1 - tolerance), value * (1 + tolerance)) if value else (-tolerance, tolerance)
        return cls(-math.inf if better == "lower" else low, math.inf if better == "higher" else high)

    def standing(self, found: Interval) -> Standing:
        """Say whether a whole interval is allowed, none of it, or only a part."""
        if self._allow(found.low) and self._allow(found.high):
            return "holds"
        return "fails" if found.high < self.low or found.low > self.high else "undecided"

    def samples(self, found: Interval) -> int | None:
        """Return how many samples would decide if their median stayed; None where no number would."""
        near = min((end for end in self if math.isfinite(end)), key=lambda end: abs(end - found.value))
        half = found.high - found.value if near > found.value else found.value - found.low
        distance = abs(near - found.value)
        return math.ceil(found.samples * (half / distance) ** 2) if distance > 0 else None

    def _allow(self, value: float) -> bool:
        # A value that is worse by exactly the tolerance is allowed, whatever the last digit.
        slack = 1e-9 * abs(value)
        return self.low - slack <= value <= self.high + slack
