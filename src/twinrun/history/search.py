"""The search itself, over numbered states: question, location, confirmation; what measures is given."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from twinrun.history.inference import LEVEL, SURE, DifferenceInterval, Posterior, RunScale

Observe = Callable[[int, str], float | None]
"""Runs a state for a purpose and returns its number; None where the state cannot be measured."""
GOOD = 0


@dataclass(kw_only=True)
class Ends:
    """The runs of the good and of the bad end, and whether they differ."""

    good: list[float] = field(default_factory=list)
    bad: list[float] = field(default_factory=list)
    apart: bool = False

    @property
    def rises(self) -> bool:
        """Whether the bad end has the larger numbers."""
        return statistics.fmean(self.bad) > statistics.fmean(self.good)


def ask_ends(scale: RunScale, observe: Observe, *, bad: int) -> Ends:
    """Run both ends in turns until they are apart, or as often as the scale allows.

    The first run of each warms caches and is thrown away. Turns change sides, so that a machine that gets
    slower with time is no difference between the ends.
    """
    ends = Ends()
    for state in (GOOD, bad):
        observe(state, "warm-up")
    for turn in range(scale.most):
        for state in (GOOD, bad) if turn % 2 == 0 else (bad, GOOD):
            value = observe(state, "question")
            assert value is not None, "an end that fails ends the bisection"
            (ends.good if state == GOOD else ends.bad).append(value)
        if turn + 1 >= scale.least and scale.apart(ends.good, ends.bad):
            ends.apart = True
            break
    return ends


@dataclass(kw_only=True)
class Location:
    """Where the change is, as far as runs have shown."""

    posterior: Posterior
    trace: list[tuple[int, tuple[float, ...]]] = field(default_factory=list)
    """Each state that was run or refused, with the posterior after it."""

    @property
    def sure(self) -> bool:
        """Whether one cell holds enough of the probability."""
        return self.posterior.weight(self.posterior.best()) >= SURE


def locate(scale: RunScale, observe: Observe, ends: Ends, *, steps: int, purpose: str = "search") -> Location:
    """Measure at the median of the posterior until one cell of steps holds `SURE` of it."""
    laws, found = scale.likelihood(ends.good, ends.bad), Location(posterior=Posterior(steps))
    posterior = found.posterior
    for _ in range(scale.most + 8 * math.ceil(math.log2(steps + 1)) + steps):
        state = posterior.next()
        if found.sure or state is None:
            break
        value = observe(state, purpose)
        if value is None:
            posterior.refused.add(state)
        else:
            posterior.update(state, laws(value))
        found.trace.append((state, tuple(posterior.weights)))
    return found


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """Two neighbouring states run in turns."""

    before: tuple[float, ...]
    after: tuple[float, ...]
    chance: float
    effect: DifferenceInterval | None

    @property
    def confirmed(self) -> bool:
        """Whether chance alone gives such an order of runs in at most 1 of 100 cases."""
        return self.chance <= LEVEL


def confirm(scale: RunScale, observe: Observe, ends: Ends, found: Location) -> Confirmation:
    """Run the neighbours of the best cell in turns and test them, twice as often where that is not enough.

    Each run counts in the posterior too: an answer that is not confirmed is less probable than before.
    """
    cell, laws = found.posterior.best(), scale.likelihood(ends.good, ends.bad)
    low, high = cell[0] - 1, cell[-1]
    runs: dict[int, list[float]] = {low: [], high: []}
    count, result = scale.confirming(ends.good, ends.bad), None
    for _ in range(2):
        for turn in range(count):
            for state in (low, high) if turn % 2 == 0 else (high, low):
                if (value := observe(state, "confirmation")) is not None:
                    runs[state].append(value)
                    found.posterior.update(state, laws(value))
        before, after = runs[low], runs[high]
        whole = min(len(before), len(after)) > 1
        result = Confirmation(
            before=tuple(before),
            after=tuple(after),
            chance=scale.chance(before, after, rises=ends.rises) if whole else 1.0,
            effect=scale.effect(before, after) if whole else None,
        )
        if result.confirmed:
            break
    assert result is not None
    return result


def runs_expected(scale: RunScale, *, steps: int) -> tuple[int, int]:
    """Return the fewest and the most runs that a search over so many steps is likely to take."""
    depth = math.ceil(math.log2(steps)) if steps > 1 else 0
    confirming = 5
    least = 2 + 2 * scale.least + depth + 2 * confirming
    return least, 2 + 2 * scale.most + 3 * depth + 4 * confirming + 8
