"""Whether two models score the same: paired differences, their intervals, and a margin that is stated first.

That no difference is significant shows no equivalence: with few documents nothing is. So two one-sided tests
are made (Schuirmann 1987, doi:10.1007/BF01068419): scores are equivalent where the whole interval of their
difference lies inside the margin, and different where it lies outside. Intervals of paired proportions are
those of Agresti and Min (2005, doi:10.1002/sim.1781), which keep a width where no document differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.evaluation import MEAN

Equivalence = Literal["equivalent", "different", "undecided"]
# Of calling scores equivalent that are a margin apart, or different that are a margin apart or less.
ERROR_RATE = 0.05
# Agresti and Min add half a document to each of four outcomes: both right, both wrong, A alone, B alone.
ADDED_DOCUMENTS, ADDED_SQUARES = 2, 1
Pair = tuple[float, float]


class ScoreDifference(Frozen):
    """How far the scores of two models are apart, on one task or in the mean of all."""

    task: str
    documents: Annotated[int, Field(gt=0)]
    a: float
    """Mean score of A."""
    b: float
    a_better: int
    """Documents on which A scores higher."""
    b_better: int
    low: float
    """Lower end of the interval of B - A."""
    high: float
    outcome: Equivalence

    @property
    def difference(self) -> float:
        """Return B - A."""
        return self.b - self.a

    @property
    def least_margin(self) -> float:
        """Return the smallest margin inside which the whole interval lies."""
        return max(abs(self.low), abs(self.high))


class ScoreComparison(Frozen):
    """Two models on the same documents of the same tasks."""

    margin: float
    """Largest difference of scores that counts as none."""
    error_rate: float = ERROR_RATE
    """Error rate of the mean, and of all tasks together."""
    tasks: Annotated[tuple[ScoreDifference, ...], Field(min_length=1)]
    mean: ScoreDifference
    """Over tasks, each with the same weight."""

    @property
    def outcome(self) -> Equivalence:
        """Return that of the mean, but for a task on which the models differ."""
        apart = any(one.outcome == "different" for one in self.tasks)
        return "different" if apart else self.mean.outcome


def compare_scores(pairs: Mapping[str, Sequence[Pair]], *, margin: float) -> ScoreComparison:
    """Return how far A and B are apart, from the scores of both on each document of each task.

    A task alone is called by an interval that holds together with those of the others (Bonferroni).

    Args:
        pairs: scores from 0 to 1 by task, at least one of each.
        margin: largest difference that counts as none, above 0.
    """
    width = NormalDist().inv_cdf(1 - ERROR_RATE / len(pairs))
    spread = {task: _spread(found) for task, found in pairs.items()}
    tasks = tuple(
        _difference(task, found, spread[task], width, margin) for task, found in sorted(pairs.items())
    )
    centre = math.fsum(one for one, _ in spread.values()) / len(pairs)
    error = math.sqrt(math.fsum(one * one for _, one in spread.values())) / len(pairs)
    half = NormalDist().inv_cdf(1 - ERROR_RATE) * error
    mean = ScoreDifference(
        task=MEAN,
        documents=sum(one.documents for one in tasks),
        a=math.fsum(one.a for one in tasks) / len(tasks),
        b=math.fsum(one.b for one in tasks) / len(tasks),
        a_better=sum(one.a_better for one in tasks),
        b_better=sum(one.b_better for one in tasks),
        low=centre - half,
        high=centre + half,
        outcome=outcome_of(centre - half, centre + half, margin),
    )
    return ScoreComparison(margin=margin, tasks=tasks, mean=mean)


def outcome_of(low: float, high: float, margin: float) -> Equivalence:
    """Return what an interval of a difference says of a margin around 0."""
    if -margin < low and high < margin:
        return "equivalent"
    return "different" if low > margin or high < -margin else "undecided"


def _spread(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the centre of the interval of B - A, and its standard error."""
    apart = [b - a for a, b in pairs]
    documents = len(pairs) + ADDED_DOCUMENTS
    centre = math.fsum(apart) / documents
    squares = math.fsum(one * one for one in apart) + ADDED_SQUARES
    return centre, math.sqrt((squares / documents - centre * centre) / documents)


def _difference(
    task: str, pairs: Sequence[Pair], spread: tuple[float, float], width: float, margin: float
) -> ScoreDifference:
    centre, error = spread
    low, high = centre - width * error, centre + width * error
    return ScoreDifference(
        task=task,
        documents=len(pairs),
        a=math.fsum(a for a, _ in pairs) / len(pairs),
        b=math.fsum(b for _, b in pairs) / len(pairs),
        a_better=sum(a > b for a, b in pairs),
        b_better=sum(b > a for a, b in pairs),
        low=low,
        high=high,
        outcome=outcome_of(low, high, margin),
    )
