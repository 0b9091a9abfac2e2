"""`invoke compare --rerun`: both sides run in turns on this machine, the first of them twice."""

from __future__ import annotations

from collections.abc import Sequence

from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.history.bisect import Bisection, alone
from twinrun.history.inference import LEVEL, DifferenceInterval, RunScale
from twinrun.history.search import GOOD
from twinrun.history.state_runs import StateRun

ROUNDS = 5


class SideDifference(Frozen):
    """One side held against A."""

    effect: DifferenceInterval
    chance: float
    """Probability that chance alone orders the runs so, in either direction."""


class SideComparison(Frozen):
    """compare.json: both sides run in turns on this machine."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    again: tuple[float, ...]
    """Runs of A a second time, which say what this machine does by itself."""
    unit: str
    difference: SideDifference
    noise: SideDifference
    runs: tuple[StateRun, ...]

    @property
    def differs(self) -> bool:
        """Whether B is further from A than chance and A itself explain."""
        apart = abs(self.difference.effect.value) > abs(self.noise.effect.value)
        return self.difference.chance <= LEVEL and apart


def rerun(work: Bisection) -> SideComparison:
    """Run A, B and A again in turns and hold both against A; raises as `Bisection.finish` does."""
    with alone(work.runner.folder):
        work.load()
        observe = work.over(work.path)
        runs: dict[str, list[float]] = {"A": [], "B": [], "A again": []}
        state = {"A": GOOD, "B": len(work.path.steps), "A again": GOOD}
        for side in ("A", "B"):
            observe(state[side], "warm-up")
        for turn in range(ROUNDS):
            for side in runs if turn % 2 == 0 else reversed(runs):
                value = observe(state[side], side)
                assert value is not None, "a side that fails ends the comparison"
                runs[side].append(value)
    found = SideComparison(
        a=tuple(runs["A"]),
        b=tuple(runs["B"]),
        again=tuple(runs["A again"]),
        unit=work.unit,
        difference=_held(work.scale, runs["A"], runs["B"]),
        noise=_held(work.scale, runs["A"], runs["A again"]),
        runs=work.runs,
    )
    write_atomically(work.runner.folder / "compare.json", found.model_dump_json(indent=1) + "\n")
    return found


def _held(scale: RunScale, a: Sequence[float], b: Sequence[float]) -> SideDifference:
    chances = (scale.chance(a, b, rises=rises) for rises in (True, False))
    return SideDifference(effect=scale.effect(a, b), chance=min(1.0, 2 * min(chances)))
