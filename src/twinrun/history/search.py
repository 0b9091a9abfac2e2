"""The search for the step of a path that moved a number: runs in turns, and what they say of each step.

A run gives one number. `Quantities` are quantities such as tokens a second: each run stands beside one of
the good end, made just before or after it, so that a machine that drifts or changes its clock moves both.
`Failures` are zeros and ones, which need no partner. What measures a state is given.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import special, stats

Observe = Callable[[int, str], float | None]
"""Runs a state for a purpose and returns its number; None where the state cannot be measured."""
GOOD = 0
LEVEL = 1e-3
"""The largest probability of chance at which two states are apart; they are looked at after each pair."""
SURE, SET = 0.99, 0.9
"""Posterior of a step, and of that there is none, at which the search ends."""
# Standard errors beyond what a test asks at which it is passed 8 times of 10.
_POWER = 0.84
# A pair in six is left out at each side: one run that another program slowed does not decide.
_CUT = 6
# Probability that a pair belongs to neither end, and the share of the change that the bad side begins at.
_STRAGGLER, _PART = 0.05, 0.45
# A spread of nothing would make every further number impossible: the resolution of a 32-bit float.
_FINEST = 1e-7
# Probability of a certain failure; good runs that are taken as made before; odds at which a search begins.
_CERTAIN, _SOUND, _ODDS = 0.8, 9, 9.0


@dataclass(frozen=True, kw_only=True)
class DifferenceInterval:
    """A difference of the bad side from the good one, with what holds it in 95 of 100 repetitions."""

    value: float
    low: float
    high: float
    relative: bool
    """Whether the numbers are shares of the good side, else differences."""

    @property
    def amount(self) -> float:
        """A number that adds up over changes: shares multiply."""
        return math.log1p(max(self.value, -0.999)) if self.relative else self.value


@dataclass(kw_only=True)
class Ends:
    """Runs of two states, and whether they differ; those of quantities are pairs."""

    good: list[float] = field(default_factory=list)
    bad: list[float] = field(default_factory=list)
    apart: bool = False


Seen = Sequence[tuple[int, int, float]]
"""Two states and what was measured between them, quantities as shares of the first."""


class Quantities:
    """Runs that give quantities; trimmed means of pairs, and Student's law of them (Yuen)."""

    least, most, paired = 4, 18, True

    def apart(self, ends: Ends) -> bool:
        """Say whether chance takes the mean of the pairs so far from nothing, either way, below `LEVEL`."""
        mean, error, degrees = _trimmed(shares(ends))
        return 2 * float(special.stdtr(degrees, -abs(mean) / error)) < LEVEL

    def smallest(self, ends: Ends) -> float:
        """Return the effect that so many pairs show 8 times of 10, as a share of the good side."""
        _, error, degrees = _trimmed(shares(ends))
        return float(special.stdtrit(degrees, 1 - LEVEL / 2) + _POWER) * error

    def effect(self, ends: Ends) -> DifferenceInterval:
        """Return the mean of the pairs with its interval."""
        mean, error, degrees = _trimmed(shares(ends))
        reach = float(special.stdtrit(degrees, 0.975)) * error
        return DifferenceInterval(value=mean, low=mean - reach, high=mean + reach, relative=True)

    def weights(self, ends: Ends, seen: Seen, steps: int) -> list[float]:
        """Return how probable each step is, under Student's law of a further pair of the ends.

        Of several changes one may be in: a state has all of the change, or any part of it, and belongs to
        the good side below `_PART`.
        """
        mean, error, degrees = _trimmed(shares(ends))
        spread, change = error * math.sqrt(degrees + 2), max(abs(mean), _FINEST)
        values = math.copysign(1.0, mean) * np.array([value for _, _, value in seen])

        def law(center: float, low: float, high: float) -> Any:
            """Return the logarithm of the density around one end, or anywhere between two shares."""
            inside = special.stdtr(degrees, (values - low) / spread)
            inside = (inside - special.stdtr(degrees, (values - high) / spread)) / (high - low)
            near = stats.t.pdf(values, degrees, loc=center, scale=spread)
            return np.log(_STRAGGLER / (3 * change) + (1 - _STRAGGLER) / 2 * (near + inside))

        good, bad = law(0.0, -change, _PART * change), law(change, _PART * change, 2 * change)
        moved = [[low < step <= high for low, high, _ in seen] for step in range(1, steps + 1)]
        return _normal([float(np.where(one, bad, good).sum()) for one in moved])


class Failures:
    """Runs that give 1 where they fail, else 0; a rate of failures may be any, and is often none or all."""

    least, most, paired = 1, 48, False

    def apart(self, ends: Ends) -> bool:
        """Say whether two rates are `_ODDS` times as probable as one."""
        one = _evidence([], [*ends.good, *ends.bad])
        return _evidence(ends.good, ends.bad) - one > math.log(_ODDS)

    def smallest(self, ends: Ends) -> float:
        """Return the difference of rates that so many runs show 8 times of 10."""
        runs, count = ends.good + ends.bad, min(len(ends.good), len(ends.bad))
        rate = (sum(runs) + 1) / (len(runs) + 2)
        reach = math.sqrt(2 * math.log(_ODDS * count))
        return min(1.0, (reach + _POWER) * math.sqrt(2 * rate * (1 - rate) / count))

    def effect(self, ends: Ends) -> DifferenceInterval:
        """Return the difference of the rates with its interval (Agresti and Caffo)."""
        good, bad = ((sum(runs) + 1) / (len(runs) + 2) for runs in (ends.good, ends.bad))
        squares = good * (1 - good) / (len(ends.good) + 2) + bad * (1 - bad) / (len(ends.bad) + 2)
        low, high = (max(-1.0, min(1.0, bad - good + end * math.sqrt(squares))) for end in (-1.96, 1.96))
        value = statistics.fmean(ends.bad) - statistics.fmean(ends.good)
        return DifferenceInterval(value=value, low=min(low, value), high=max(high, value), relative=False)

    def weights(self, ends: Ends, seen: Seen, steps: int) -> list[float]:
        """Return how probable each step is; what they lack to 1 is the probability of one rate for all."""
        runs = [*((GOOD, one) for one in ends.good), *((steps, one) for one in ends.bad)]
        runs += [(state, value) for _, state, value in seen]
        logs = [
            _evidence(
                [one for state, one in runs if state < step], [one for state, one in runs if state >= step]
            )
            for step in range(1, steps + 1)
        ]
        # That there is one rate is as probable at first as that there is a step.
        return _normal([*logs, _evidence([], [one for _, one in runs]) + math.log(steps)])[:-1]


Scale = Quantities | Failures


def shares(ends: Ends) -> list[float]:
    """Return by which share of the good side each pair differs."""
    return [(bad - good) / (abs(good) or 1.0) for good, bad in zip(ends.good, ends.bad, strict=True)]


def _trimmed(values: Sequence[float]) -> tuple[float, float, int]:
    """Return the trimmed mean of values, its standard error and the degrees of freedom of that."""
    ordered, cut = sorted(values), len(values) // _CUT
    kept = ordered[cut : len(ordered) - cut]
    drawn = [min(max(one, kept[0]), kept[-1]) for one in ordered]
    squares = (len(drawn) - 1) * statistics.variance(drawn)
    error = math.sqrt(squares / (len(kept) * (len(kept) - 1)))
    return statistics.fmean(kept), max(error, _FINEST), len(kept) - 1


def _evidence(good: Sequence[float], bad: Sequence[float]) -> float:
    """Return the logarithm of the probability of runs of two sides, whatever the rates of failures are.

    None fail and all, or a rate that is near nothing as likely as in `_SOUND` runs before, and any other one.
    """
    certain = {*good} <= {0.0} and len({*bad}) < 2
    near = special.betaln(sum(good) + 1, len(good) - sum(good) + _SOUND) - special.betaln(1, _SOUND)
    other = special.betaln(sum(bad) + 1, len(bad) - sum(bad) + 1)
    return math.log(_CERTAIN * certain + (1 - _CERTAIN) * math.exp(near + other))


def _normal(logs: Sequence[float]) -> list[float]:
    """Return weights of sum 1."""
    found = [math.exp(one - max(logs)) for one in logs]
    return [one / sum(found) for one in found]


class Posterior:
    """How probable it is that the change is the step `i` of 1 to n, which leads from state i - 1 to i.

    States that cannot be measured leave steps that cannot be told apart: a cell lies between two states
    that can, and its steps are one answer.
    """

    def __init__(self, scale: Scale, ends: Ends, steps: int) -> None:
        self.scale, self.ends, self.steps = scale, ends, steps
        self.seen: list[tuple[int, int, float]] = []
        self.refused: set[int] = set()
        self.weights = scale.weights(ends, [], steps)

    def take(self, low: int, high: int, value: float) -> None:
        """Take what was measured between two states."""
        self.seen.append((low, high, value))
        self.weights = self.scale.weights(self.ends, self.seen, self.steps)

    def cells(self) -> list[range]:
        """Return the steps of each cell, in their order."""
        edges = [state for state in range(self.steps + 1) if state not in self.refused]
        return [range(low + 1, high + 1) for low, high in itertools.pairwise(edges)]

    def weight(self, steps: range) -> float:
        """Return the probability that the change is one of `steps`."""
        return sum(self.weights[step - 1] for step in steps)

    def best(self) -> range:
        """Return the most probable cell."""
        return max(self.cells(), key=self.weight)

    @property
    def sure(self) -> bool:
        """Whether one cell holds enough of the probability."""
        return self.weight(self.best()) >= SURE

    @property
    def nothing(self) -> bool:
        """Whether that no step is the change holds most of the probability."""
        return sum(self.weights) < 1 - SET

    def sides(self, cell: range) -> Ends:
        """Return all runs before a cell and after it, of numbers that need no partner; else the ends."""
        if self.scale.paired:
            return Ends(good=self.ends.good, bad=self.ends.bad, apart=self.sure and len(cell) == self.steps)
        good = [value for _, state, value in self.seen if state < cell[0]]
        bad = [value for _, state, value in self.seen if state >= cell[0]]
        return Ends(good=self.ends.good + good, bad=self.ends.bad + bad, apart=self.sure)

    def next(self) -> int | None:
        """Return the state that halves the posterior best; None where a pair of it says nothing new."""
        cells, best = self.cells(), self.best()
        if not self.scale.paired and self.weight(best) > 0.5:
            # What is left is that its own runs were chance.
            runs = [state for _, state, _ in self.seen]
            return min((best[-1], best[0] - 1), key=runs.count)
        return min(
            (cell[-1] for cell in cells[:-1]),
            key=lambda one: abs(self.weight(range(1, one + 1)) - 0.5),
            default=None,
        )


def ask(scale: Scale, observe: Observe, low: int, high: int, *, purpose: str) -> Ends:
    """Run two states in turns until they are apart, or as often as the scale allows.

    Turns change sides, so that a machine that gets slower with time is no difference between the two.
    """
    ends = Ends()
    for turn in range(scale.most):
        found = {state: observe(state, purpose) for state in _in_turn(turn, low, high)}
        first, second = found[low], found[high]
        if first is not None and second is not None:
            ends.good.append(first)
            ends.bad.append(second)
            ends.apart = len(ends.good) >= scale.least and scale.apart(ends)
        if ends.apart:
            break
    return ends


def locate(found: Posterior, observe: Observe, *, purpose: str = "search") -> None:
    """Measure at the median of the posterior until one cell of steps is sure."""
    scale = found.scale
    for turn in range(2 * scale.most + 8 * math.ceil(math.log2(found.steps + 1)) + found.steps):
        state = found.next()
        if found.sure or found.nothing or state is None:
            break
        order = _in_turn(turn, GOOD, state) if scale.paired else (state,)
        runs = {one: observe(one, purpose) for one in order}
        if (value := runs[state]) is None:
            found.refused.add(state)
            continue
        if scale.paired and (base := runs[GOOD]) is not None:
            value = shares(Ends(good=[base], bad=[value]))[0]
        found.take(GOOD, state, value)


def _in_turn(turn: int, low: int, high: int) -> tuple[int, int]:
    return (low, high) if turn % 2 == 0 else (high, low)


def runs_expected(scale: Scale, *, steps: int) -> tuple[int, int]:
    """Return the fewest and the most runs that a search over so many steps is likely to take."""
    depth = math.ceil(math.log2(steps)) if steps > 1 else 0
    least = 2 * scale.least * (1 + scale.paired) + depth * (1 + scale.paired)
    return least, 2 * (scale.most + 3 * depth) + scale.paired * 2 * scale.most
