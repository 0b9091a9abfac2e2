"""Intervals of medians, and what an interval says of a limit: it holds, it fails, or it is undecided.

A record keeps the median, the lowest and the highest of the samples and their number. The error of a median
is 1 / (2 f sqrt(n)), f the density there (David and Nagaraja, Order Statistics, 10.3). Of all symmetric
distributions with one mode over a range the even one has the lowest f, so its interval is taken, by the range
of the samples. From eight samples on it never goes beyond the extremes, which alone are an interval for any
distribution: the median lies outside of them once in 2 ** (n - 1) times (7.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from twinrun.protocol.measurements import Measurement
from twinrun.results.verdicts import NotAskedError

# Of 1,000 honest runs at the very limit, five fail and five hold too high: half of it lies on each side.
LEVEL = 0.99
# The 99 % quantile of |median - centre| / range of n even samples, from 400,000 draws of each n.
REACH = {
    2: 49.15,
    3: 4.47,
    4: 1.88,
    5: 1.16,
    6: 0.833,
    7: 0.685,
    8: 0.576,
    9: 0.520,
    10: 0.461,
    12: 0.398,
    15: 0.352,
    20: 0.292,
}
LEAST_EXTREMES = 8
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


def interval_of(found: Measurement) -> Interval:
    """Return the interval of a measurement's median; of a single number, that number."""
    if found.count < min(REACH):
        return Interval(found.median, found.median, found.median, found.count)
    listed = max(number for number in REACH if number <= found.count)
    half = (found.high - found.low) * REACH[listed] * math.sqrt(listed / found.count)
    low, high = found.median - half, found.median + half
    if found.count >= LEAST_EXTREMES:
        low, high = max(low, found.low), min(high, found.high)
    return Interval(low, found.median, high, found.count)


def quotient(over: Interval, under: Interval, *, power: float = 1.0) -> Interval:
    """Return the interval of a ratio to a power, the relative errors of both sides added as squares.

    The law of propagation of uncertainty (JCGM 100:2008, 5.1.2), for two sides that were measured apart.

    Raises:
        NotAskedError: the lower side is 0.
    """
    if not under.value:
        raise NotAskedError("a ratio to 0 is no number")
    value = (over.value / under.value) ** power
    below = power * math.hypot(_share(over.value, over.low), _share(under.value, under.high))
    above = power * math.hypot(_share(over.value, over.high), _share(under.value, under.low))
    return Interval(value * (1 - below), value, value * (1 + above), min(over.samples, under.samples))


def mean(found: Sequence[Interval]) -> Interval:
    """Return the interval of a mean of values that were measured apart."""
    value = math.fsum(one.value for one in found) / len(found)
    below = math.hypot(*(one.value - one.low for one in found)) / len(found)
    above = math.hypot(*(one.high - one.value for one in found)) / len(found)
    return Interval(value - below, value, value + above, min(one.samples for one in found))


def _share(value: float, end: float) -> float:
    return abs(end - value) / abs(value) if value else 0.0


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
        ends = [end for end in self if math.isfinite(end)]
        near = min(ends, key=lambda end: abs(end - found.value))
        half = found.high - found.value if near > found.value else found.value - found.low
        distance = abs(near - found.value)
        return math.ceil(found.samples * (half / distance) ** 2) if distance > 0 else None

    def _allow(self, value: float) -> bool:
        # A value that is worse by exactly the tolerance is allowed, whatever the last digit.
        slack = 1e-9 * abs(value)
        return self.low - slack <= value <= self.high + slack
