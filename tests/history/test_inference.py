"""The statistics of a bisection against answers that are known: simulated changes, and none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from twinrun.history.inference import Failures, Posterior, Quantities, RunScale
from twinrun.history.search import ask_ends, confirm, locate

# Candidates, spread of one run, effect; then of 1,000 trials the fewest that must be right.
TABLE = (
    (16, 0.003, 0.02, 990),
    (16, 0.01, 0.03, 930),
    (128, 0.01, 0.05, 970),
    (128, 0.02, 0.05, 860),
    (128, 0.02, 0.10, 970),
)


def found(scale: RunScale, runs: random.Random, law: Sequence[float], *, steps: int, spread: float) -> str:
    """Search a change of means, or of rates, from one number of `law` to the other at a place by chance."""
    place = runs.randint(1, steps)

    def observe(state: int, purpose: str) -> float:
        level = law[state >= place]
        return runs.gauss(level, spread * level) if spread else float(runs.random() < level)

    ends = ask_ends(scale, observe, bad=steps)
    if not ends.apart:
        return "no change"
    location = locate(scale, observe, ends, steps=steps)
    cell = location.posterior.best()
    if not location.sure:
        return "unconfirmed"
    if not confirm(scale, observe, ends, location).confirmed:
        return "unconfirmed"
    return "right" if law[0] != law[1] and list(cell) == [place] else "wrong"


def trials(
    count: int, scale: RunScale, law: Sequence[float], *, steps: int, spread: float, seed: int
) -> Counter[str]:
    runs = random.Random(seed)
    return Counter(found(scale, runs, law, steps=steps, spread=spread) for _ in range(count))


@pytest.mark.parametrize(("steps", "spread", "effect", "right"), TABLE)
def test_a_simulated_change_is_found(steps: int, spread: float, effect: float, right: int) -> None:
    done = trials(60, Quantities(), (100, 100 * (1 - effect)), steps=steps, spread=spread, seed=1)
    assert done["wrong"] == 0
    assert done["right"] >= 60 * (right - 50) / 1000


@pytest.mark.parametrize("spread", [0.003, 0.02])
def test_two_equal_ends_name_no_culprit(spread: float) -> None:
    done = trials(100, Quantities(), (100, 100), steps=128, spread=spread, seed=2)
    assert done["wrong"] == 0
    assert done["no change"] >= 97


@pytest.mark.trials
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("steps", "spread", "effect", "right"), TABLE)
def test_at_most_three_of_a_thousand_are_wrong(
    steps: int, spread: float, effect: float, right: int, seed: int
) -> None:
    done = trials(1000, Quantities(), (100, 100 * (1 - effect)), steps=steps, spread=spread, seed=seed)
    assert done["wrong"] <= 3, done
    assert done["right"] >= right, done


@pytest.mark.trials
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("steps", [16, 128])
def test_no_culprit_in_a_thousand_equal_ends(steps: int, seed: int) -> None:
    done = trials(1000, Quantities(), (100, 100), steps=steps, spread=0.01, seed=seed)
    assert done["wrong"] == 0, done


def test_a_version_that_fails_in_one_of_three_runs_is_found() -> None:
    done = trials(20, Failures(), (0.0, 1 / 3), steps=16, spread=0, seed=3)
    assert done["wrong"] == 0
    assert done["right"] >= 16, done
    assert trials(20, Failures(), (0.3, 0.3), steps=16, spread=0, seed=4)["no change"] >= 19


def test_states_that_cannot_be_measured_leave_a_set() -> None:
    scale, noise = Quantities(), random.Random(6)

    def observe(state: int, purpose: str) -> float | None:
        return None if state in (4, 5) else noise.gauss(90 if state >= 5 else 100, 0.5)

    ends = ask_ends(scale, observe, bad=8)
    location = locate(scale, observe, ends, steps=8)
    assert location.sure
    assert list(location.posterior.best()) == [4, 5, 6]


def test_a_straggler_does_not_decide() -> None:
    laws = Quantities().likelihood([100.0, 101.0, 99.0], [90.0, 91.0, 89.0])
    posterior = Posterior(2)
    posterior.update(1, laws(50.0))
    assert posterior.weight([1]) < 0.9
    posterior.update(1, laws(100.0))
    assert posterior.weight([2]) > posterior.weight([1])


@pytest.mark.parametrize("scale", [Quantities(), Failures()])
def test_the_effect_that_would_have_been_seen_is_seen_8_times_of_10(scale: Quantities | Failures) -> None:
    draw, seen = random.Random(7), 0

    def runs(by: float) -> list[float]:
        if scale.relative:
            return [draw.gauss(100 * (1 + by), 1) for _ in range(12)]
        return [float(draw.random() < 1 / 3 + by) for _ in range(48)]

    for _ in range(200):
        seen += scale.apart(runs(0), runs(scale.smallest(runs(0), runs(0))))
    assert 130 <= seen <= 190
