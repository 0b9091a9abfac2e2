"""The statistics of a bisection: is there a difference, where does it begin, is it confirmed.

A run gives one number. `Quantities` are quantities such as tokens a second: two ends are told apart by
standard errors, and a further run by Student's predictive laws of the ends. `Failures` are zeros and ones:
ends are told apart by Fisher's exact test, a further run by the rates of the ends. The rest is the same for
both: a posterior over the positions of the change, and an exact test between its two neighbours.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from scipy import stats

REACH = 4.0
"""Standard errors by which the two ends must be apart."""
POWER = 0.84
"""Standard errors beyond what a test asks at which it is passed 8 times of 10."""
STRAGGLER = 0.02
"""Probability that a run belongs to neither end."""
SURE, SET = 0.99, 0.95
"""Posterior at which the search ends, and that the positions of an unconfirmed answer hold."""
LEVEL = 0.01
"""The largest probability of chance at which an answer is confirmed."""
# A spread of nothing would make every further number impossible: the resolution of a 32-bit float.
_FINEST = 1e-7
# A straggler lies up to this many times the distance of the ends, and their spreads, away.
_WIDE = 50.0
# The ends are looked at after each pair of runs: stricter than once.
_LOOKED = 1e-3


Likelihood = Callable[[float], tuple[float, float]]
"""Returns the density of a further run of the good end and of the bad one."""


@dataclass(frozen=True, kw_only=True)
class DifferenceInterval:
    """A difference of the bad side from the good one, with what holds it in 95 of 100 repetitions."""

    value: float
    low: float
    high: float
    relative: bool
    """Whether the numbers are shares of the good side, else differences."""


class Quantities:
    """Runs that give quantities."""

    least, most = 3, 12
    relative = True

    def apart(self, good: Sequence[float], bad: Sequence[float]) -> bool:
        """Say whether the means differ by more than `REACH` standard errors, and Student's law allows it.

        Of few runs the standard error is itself uncertain: of six runs without a difference, 16 in 1,000
        are 4 standard errors apart.
        """
        far = abs(statistics.fmean(bad) - statistics.fmean(good))
        return far > _reach(good, bad) * _standard_error(good, bad)

    def smallest(self, good: Sequence[float], bad: Sequence[float]) -> float:
        """Return the effect that so many runs show 8 times of 10, as a share of the good side."""
        standard_errors = _reach(good, bad) + POWER
        return standard_errors * _standard_error(good, bad) / abs(statistics.fmean(good) or 1.0)

    def likelihood(self, good: Sequence[float], bad: Sequence[float]) -> Likelihood:
        """Return Student's law of a further run of each end, around its own mean with its own spread.

        Each has the density of a straggler in it.
        """
        means = [statistics.fmean(runs) for runs in (good, bad)]
        floor = _FINEST * max(map(abs, means))
        spreads = [max(statistics.stdev(runs), floor) for runs in (good, bad)]
        laws = [
            stats.t(len(runs) - 1, loc=mean, scale=spread * math.sqrt(1 + 1 / len(runs)))
            for runs, mean, spread in zip((good, bad), means, spreads, strict=True)
        ]
        neither = STRAGGLER / (_WIDE * (abs(means[1] - means[0]) + sum(spreads)))

        def densities(value: float) -> tuple[float, float]:
            of_good, of_bad = ((1 - STRAGGLER) * float(law.pdf(value)) for law in laws)
            # Of several changes one may be in: what lies between the ends is of the nearer one.
            share = min(max((value - means[0]) / ((means[1] - means[0]) or 1.0), 0.0), 1.0)
            between = 0.0 < share < 1.0
            weights = (4 * (1 - share) ** 2, 4 * share**2) if between else (1.0, 1.0)
            return of_good + neither * weights[0], of_bad + neither * weights[1]

        return densities

    def confirming(self, _good: Sequence[float], _bad: Sequence[float]) -> int:
        """Return the runs of each neighbour that can confirm: 1 of 252 orders is 0.4 %."""
        return 5

    def chance(self, before: Sequence[float], after: Sequence[float], *, rises: bool) -> float:
        """Return how often chance alone orders the runs so, of all permutations of their ranks."""
        side = "less" if rises else "greater"
        return float(stats.mannwhitneyu(before, after, alternative=side, method="exact").pvalue)

    def effect(self, before: Sequence[float], after: Sequence[float]) -> DifferenceInterval:
        """Return the relative difference of the means, with Welch's interval."""
        base = statistics.fmean(before)
        difference = statistics.fmean(after) - base
        if max(map(len, (before, after))) < 2 or len({*before}) == len({*after}) == 1:
            low = high = difference
        else:
            found = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
            low, high = float(found.low), float(found.high)
        scale = abs(base) or 1.0
        return DifferenceInterval(value=difference / scale, low=low / scale, high=high / scale, relative=True)


class Failures:
    """Runs that give 1 where they fail, else 0."""

    least, most = 3, 48
    relative = False

    def apart(self, good: Sequence[float], bad: Sequence[float]) -> bool:
        """Say whether Fisher's exact test tells the rates of the ends apart."""
        return float(stats.fisher_exact(_table(good, bad)).pvalue) < _LOOKED

    def smallest(self, good: Sequence[float], bad: Sequence[float]) -> float:
        """Return the difference of rates that so many runs show 8 times of 10."""
        rate = _rate([*good, *bad])
        return min(
            1.0,
            (float(stats.norm.isf(_LOOKED / 2)) + POWER)
            * math.sqrt(rate * (1 - rate) * (1 / len(good) + 1 / len(bad))),
        )

    def likelihood(self, good: Sequence[float], bad: Sequence[float]) -> Likelihood:
        """Return the probabilities of a failure at each end, or of none."""
        rates = _rate(good), _rate(bad)
        return lambda value: rates if value else (1 - rates[0], 1 - rates[1])

    def confirming(self, _good: Sequence[float], _bad: Sequence[float]) -> int:
        """Return the runs of each neighbour after which rates as those of the ends are told apart."""
        one, other = _rate(_good), _rate(_bad)
        for count in range(5, self.most):
            table = [[failing, count - failing] for failing in (round(one * count), round(other * count))]
            if float(stats.fisher_exact(table).pvalue) < LEVEL:
                return count
        return self.most

    def chance(self, before: Sequence[float], after: Sequence[float], *, rises: bool) -> float:
        """Return how often chance alone gives so many more failures, of all permutations."""
        side = "greater" if rises else "less"
        return float(stats.fisher_exact(_table(after, before), alternative=side).pvalue)

    def effect(self, before: Sequence[float], after: Sequence[float]) -> DifferenceInterval:
        """Return the difference of the rates, with the ends of Wilson's intervals (Newcombe)."""
        rates, lows, highs = [], [], []
        for runs in (before, after):
            found = stats.binomtest(int(sum(runs)), len(runs)).proportion_ci(0.95, method="wilson")
            rates.append(statistics.fmean(runs))
            lows.append(rates[-1] - float(found.low))
            highs.append(float(found.high) - rates[-1])
        difference = rates[1] - rates[0]
        low, high = math.hypot(lows[1], highs[0]), math.hypot(highs[1], lows[0])
        return DifferenceInterval(
            value=difference, low=difference - low, high=difference + high, relative=False
        )


RunScale = Quantities | Failures


def _reach(good: Sequence[float], bad: Sequence[float]) -> float:
    """Return the standard errors by which the means of both ends must be apart."""
    return max(REACH, float(stats.t.isf(_LOOKED / 2, len(good) + len(bad) - 2)))


def _standard_error(good: Sequence[float], bad: Sequence[float]) -> float:
    return math.sqrt(sum(statistics.variance(runs) / len(runs) for runs in (good, bad)))


def _rate(runs: Sequence[float]) -> float:
    """Return the probability that a further run fails, under Jeffreys' prior."""
    return (sum(runs) + 0.5) / (len(runs) + 1)


def _table(first: Sequence[float], second: Sequence[float]) -> list[list[int]]:
    return [[int(sum(runs)), len(runs) - int(sum(runs))] for runs in (first, second)]


class Posterior:
    """How probable it is that the change is the step `i` of 1 to n, which leads from state i - 1 to i.

    States that cannot be measured leave steps that cannot be told apart: a cell lies between two states
    that can, and its steps are one answer.
    """

    def __init__(self, steps: int) -> None:
        self.weights = [1 / steps] * steps
        self.refused: set[int] = set()

    def cells(self) -> list[range]:
        """Return the steps of each cell, in their order."""
        edges = [state for state in range(len(self.weights) + 1) if state not in self.refused]
        return [range(low + 1, high + 1) for low, high in itertools.pairwise(edges)]

    def weight(self, steps: Collection[int]) -> float:
        """Return the probability that the change is one of `steps`."""
        return sum(self.weights[step - 1] for step in steps)

    def best(self) -> range:
        """Return the most probable cell."""
        return max(self.cells(), key=self.weight)

    def next(self) -> int | None:
        """Return the state that halves the posterior best; None where one cell is left."""
        inner = [cell[-1] for cell in self.cells()[:-1]]
        return min(inner, key=lambda state: abs(self.weight(range(1, state + 1)) - 0.5), default=None)

    def update(self, state: int, likelihood: tuple[float, float]) -> None:
        """Take a run of `state`: it is of the bad side where the change is at or before it."""
        good, bad = likelihood
        found = [
            weight * (bad if step <= state else good) for step, weight in enumerate(self.weights, start=1)
        ]
        total = sum(found)
        self.weights = [one / total for one in found]

    def credible(self) -> tuple[int, ...]:
        """Return the fewest steps that hold `SET` of the probability."""
        order = sorted(range(1, len(self.weights) + 1), key=lambda step: -self.weights[step - 1])
        counts = itertools.accumulate(self.weights[step - 1] for step in order)
        last = next((place for place, held in enumerate(counts) if held >= SET), len(order) - 1)
        return tuple(sorted(order[: last + 1]))
