"""The rule that names a slow rank: seeded series with noise of every size, with and without one."""

from __future__ import annotations

import random

import pytest

from twinrun.protocol.signals import Sniff, alarms

RANKS, SNIFFS, RUNS = 8, 10, 100


def run(generator: random.Random, *, noise: float, spread: float, slow: float = 0.0) -> set[int]:
    """Return the ranks that any prefix of a run names; `spread` is how much ranks differ for good."""
    fixed = [1 + generator.gauss(0, spread) for _ in range(RANKS)]
    fixed[3] *= 1 + slow
    sniffs: list[Sniff] = []
    named: set[int] = set()
    for step in range(SNIFFS):
        row = tuple(one * (1 + abs(generator.gauss(0, noise))) for one in fixed)
        sniffs.append(Sniff(step=step, compute=row, exchange=(1.0,) * RANKS, reduce=1.0, seconds=1.0))
        named.update(one.rank for one in alarms(sniffs))
    return named


@pytest.mark.parametrize(("noise", "spread"), [(0.003, 0.005), (0.01, 0.005), (0.03, 0.01), (0.3, 0.01)])
def test_no_clean_run_raises_an_alarm(noise: float, spread: float) -> None:
    generator = random.Random(1)
    assert [run(generator, noise=noise, spread=spread) for _ in range(RUNS)] == [set()] * RUNS


@pytest.mark.parametrize(("noise", "spread"), [(0.003, 0.005), (0.01, 0.005), (0.02, 0.005)])
def test_a_rank_that_is_a_tenth_slower_is_named_alone(noise: float, spread: float) -> None:
    generator = random.Random(2)
    found = [run(generator, noise=noise, spread=spread, slow=0.10) for _ in range(RUNS)]
    assert sum(one == {3} for one in found) >= 0.9 * RUNS
    assert all(one <= {3} for one in found)


def test_two_ranks_cannot_say_which_of_them_is_slow() -> None:
    pair = [Sniff(step=n, compute=(1.0, 2.0), exchange=(1.0, 1.0), reduce=1.0, seconds=1.0) for n in range(5)]
    assert alarms(pair) == ()
