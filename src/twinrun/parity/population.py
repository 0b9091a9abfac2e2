"""How far apart clean pairs of runs are: the same training twice, but for the order of its sums.

clean_pairs.csv has a row a pair. Its pairs are golden values of Megatron-LM on two kinds of GPU, losses that
torchtitan has committed for two vendors, our own records with their control runs, and small models on a CPU.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

WINDOWS = (1, 3, 10, 20, *(first * 10**power for power in range(1, 9) for first in (5, 10, 20)))
"""A pair is described over its first steps up to each of these; no log is longer than the last."""
# Fewer pairs than this say nothing of a chance of one in a hundred.
LEAST_PAIRS = 60
# Before anything was learned a loss shows the rounding of its precision, to such a factor.
_ALIKE = 5.0
# Windows that may show it: up to ten steps.
_FIRST = 3
# Two losses of fp32 are no closer than this.
ROUNDING = 1.2e-7


class Distances(NamedTuple):
    """Relative distances of two curves, by window; as many as the curves reach."""

    apart: tuple[float, ...]
    """Largest difference; nan where no step is in the window."""
    drift: tuple[float, ...]
    """Mean of the signed differences over the second half of the window; nan below eight steps there."""


class CleanPair(NamedTuple):
    """Two runs of one training that differ by rounding alone."""

    source: str
    training: str
    """Pairs of one training are not independent."""
    precision: str
    distances: Distances


def signed_distances(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return by how much B is above A at each step, relative to the smaller."""
    return [(two - one) / max(min(abs(one), abs(two)), 1e-12) for one, two in zip(a, b, strict=True)]


def distances_of(steps: Sequence[int], a: Sequence[float], b: Sequence[float]) -> Distances:
    """Return the distances of two finite curves over each window that begins before their last step."""
    signed = signed_distances(a, b)
    counted = [step - min(steps[0], 1) + 1 for step in steps]
    reached = [end for start, end in zip((0, *WINDOWS), WINDOWS, strict=False) if start < counted[-1]]
    apart, drift = [], []
    for end in reached:
        whole = [abs(one) for step, one in zip(counted, signed, strict=True) if step <= end]
        half = [one for step, one in zip(counted, signed, strict=True) if end / 2 < step <= end]
        apart.append(max(whole, default=math.nan))
        drift.append(abs(math.fsum(half)) / len(half) if len(half) >= 8 else math.nan)
    return Distances(tuple(apart), tuple(drift))


@cache
def population() -> tuple[CleanPair, ...]:
    """Return the clean pairs that come with twinrun."""
    with Path(__file__).with_name("clean_pairs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return tuple(CleanPair(row["source"], row["training"], row["precision"], _distances(row)) for row in rows)


def _distances(row: dict[str, str]) -> Distances:
    cells = ([row.get(f"{name} {end}", "-") for end in WINDOWS] for name in Distances._fields)
    return Distances(
        *(tuple(float(one or "nan") for one in takewhile(lambda one: one != "-", row)) for row in cells)
    )


def comparable(
    found: Distances, pairs: Sequence[CleanPair], *, precision: str | None, unseen: float
) -> list[CleanPair]:
    """Return the clean pairs that two curves are held against.

    Args:
        precision: of both runs, where it is known.
        unseen: largest difference that the logs do not show.
    """
    pairs = [pair for pair in pairs if precision in (None, pair.precision)]
    floor = max(unseen, ROUNDING)
    first = next((n for n, one in enumerate(found.apart) if math.isfinite(one)), 0)
    # As long as nothing beyond the last digits is there, rounding is all that the first steps show.
    place = max((n for n, one in enumerate(found.apart[:_FIRST]) if one <= 8 * floor), default=first)
    places = {place}
    if place == 0 and len(found.apart) >= _FIRST and found.apart[2] < 4 * found.apart[1]:
        # A first loss may be equal by chance; what does not grow from then on is rounding too.
        places.add(1)

    def alike(pair: CleanPair, place: int) -> bool:
        mine, theirs = max(found.apart[place], floor), pair.distances.apart[place : place + 1]
        return any(1 / _ALIKE <= max(one, floor) / mine <= _ALIKE for one in theirs)

    near = [pair for pair in pairs if any(alike(pair, place) for place in places)]
    return near if len(near) >= LEAST_PAIRS else list(pairs)
