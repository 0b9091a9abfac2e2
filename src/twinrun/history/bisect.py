"""`twinrun bisect`: question, search and confirmation over real states, until little of a change is left."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from twinrun.foundation.cache import cache_root, locked
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.history import search
from twinrun.history.path import ChangePath, ChangeStep, Packages, digest_of
from twinrun.history.search import GOOD, DifferenceInterval, Ends, Observe, Posterior
from twinrun.history.state_runs import RunQuestion, StateRun, StateRunner

Finer = Callable[[ChangeStep, Packages], tuple[ChangeStep, ...]]
# Share of the change, and number of culprits, at which the search for further ones ends.
EXPLAINED, MOST = 0.9, 3
EXIT: dict[str, int] = {"found": 0, "unconfirmed": 1, "no change": 3}
# Turns of `compare --rerun`.
ROUNDS = 5


class EndRuns(Frozen):
    """The question: runs of both ends, and what they say."""

    good: tuple[float, ...]
    bad: tuple[float, ...]
    apart: bool
    effect: DifferenceInterval
    smallest: float
    """The smallest effect that so many runs would have shown, relative; of failures a difference of rates."""


class CulpritSteps(Frozen):
    """What the search ended at."""

    steps: tuple[str, ...]
    """Several where states between them cannot be measured."""
    probability: float
    runs: EndRuns
    """Of its two neighbours, of failures all before it and after it; apart where the answer is confirmed."""


class BisectRecord(Frozen):
    """bisect.json."""

    schema_version: Literal[2] = 2
    subject: str
    """Recipe or command."""
    question: RunQuestion
    unit: str
    good: str
    bad: str
    outcome: Literal["found", "unconfirmed", "no change"]
    sentence: str
    ends: EndRuns
    path: tuple[str, ...]
    fixed: tuple[str, ...]
    """Differences of the ends that were not bisected."""
    culprits: tuple[CulpritSteps, ...] = ()
    """In the order of the search; the last one may be unconfirmed."""
    explained: float
    """Share of the change that confirmed culprits make."""
    refused: dict[str, str] = Field(default_factory=dict)
    """States that could not be measured, and why."""
    runs: tuple[StateRun, ...]


class BisectRuns(Frozen):
    """Runs so far, in their order; the search is replayed over them."""

    runs: tuple[StateRun, ...] = ()


@dataclass(kw_only=True)
class Bisection:
    """A bisection in its folder; every run is kept there before the next begins."""

    runner: StateRunner
    path: ChangePath
    finer: Finer
    names: tuple[str, str]
    """Good and bad end as the user named them."""
    noun: str
    """What is measured, in words."""
    unit: str
    _replayed: int = 0
    _done: list[StateRun] = field(default_factory=list)
    _refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Say what kind of numbers the runs give, and where they are kept."""
        quantities = self.runner.question.kind == "metric"
        self.scale = search.Quantities() if quantities else search.Failures()
        self._file = self.runner.folder / "runs.json"

    def finish(self) -> BisectRecord:
        """Run what is left and return the answer, which is written beside the runs.

        Raises:
            InputError: another bisection runs on this machine.
            RunError: an end cannot be measured.
            RunInterruptedError: stopped; the next call goes on.
        """
        with self._alone():
            record = self._bisected()
        write_atomically(self.runner.folder / "bisect.json", record.model_dump_json(indent=1) + "\n")
        return record

    def rerun(self) -> tuple[EndRuns, EndRuns]:
        """Run A, B and A again in turns, and return B and A again beside A; raises as `finish` does."""
        with self._alone():
            observe, last = self._over(self.path), len(self.path.steps)
            places = {"A": GOOD, "B": last, "A again": GOOD}
            for side in ("A", "B"):
                observe(places[side], "warm-up")
            runs: dict[str, list[float]] = {side: [] for side in places}
            for turn in range(ROUNDS):
                for side in runs if turn % 2 == 0 else reversed(runs):
                    value = observe(places[side], side)
                    assert value is not None, "a side that fails ends the comparison"
                    runs[side].append(value)
        b, again = (Ends(good=runs["A"], bad=runs[side]) for side in ("B", "A again"))
        b.apart = self.scale.apart(b)
        return self._told(b), self._told(again)

    def _told(self, ends: Ends) -> EndRuns:
        return EndRuns(
            good=tuple(ends.good),
            bad=tuple(ends.bad),
            apart=ends.apart,
            effect=self.scale.effect(ends),
            smallest=self.scale.smallest(ends),
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of this machine, as two bisections would each measure the other; take kept runs."""
        self.runner.folder.mkdir(parents=True, exist_ok=True)
        cache_root().mkdir(parents=True, exist_ok=True)
        lock = cache_root() / "bisect.lock"
        busy = InputError(
            "another bisection runs on this machine",
            place=str(lock),
            found="its lock is held",
            hint="wait until it ends: two would disturb each other's times",
        )
        with locked(lock, busy=busy):
            self._done = list(load_json(self._file, BisectRuns).runs) if self._file.is_file() else []
            yield

    def _bisected(self) -> BisectRecord:
        path, scale = self.path, self.scale
        ends = first = self._asked(path)
        culprits: list[CulpritSteps] = []
        explained = 0.0
        # What is left is looked for with the culprits taken over, until it is little or not seen any more.
        while ends.apart and path.steps:
            culprit, cell = self._culprit(path, ends)
            culprits += [culprit] if culprit else []
            if culprit is None or not culprit.runs.apart:
                break
            explained += culprit.runs.effect.amount / scale.effect(first).amount
            left = [step for number, step in enumerate(path.steps, start=1) if number not in cell]
            if explained >= EXPLAINED or len(culprits) == MOST or not left:
                break
            path = ChangePath(start=path.state(cell), steps=tuple(left))
            ends = self._asked(path)
        found, confirmed = self._told(first), [one for one in culprits if one.runs.apart]
        return BisectRecord(
            subject=self.runner.subject,
            question=self.runner.question,
            unit=self.unit,
            good=self.names[0],
            bad=self.names[1],
            outcome="found" if confirmed else "unconfirmed" if culprits else "no change",
            sentence=bisect_sentence(self.noun, found, culprits, explained, runs=len(self._done)),
            ends=found,
            path=tuple(step.label for step in self.path.steps),
            fixed=self.path.fixed,
            culprits=tuple(culprits),
            explained=explained,
            refused=self._refused,
            runs=tuple(self._done),
        )

    def _asked(self, path: ChangePath) -> Ends:
        """Run both ends in turns; where caches matter, the first run of each is thrown away."""
        observe, last = self._over(path), len(path.steps)
        if self.scale.paired:
            for state in (GOOD, last):
                observe(state, "warm-up")
        return search.ask(self.scale, observe, GOOD, last, purpose="question")

    def _culprit(self, path: ChangePath, ends: Ends) -> tuple[CulpritSteps | None, range]:
        """Return what moves the number most on a path, and the steps of the path that have it.

        The neighbours of the most probable cell run in turns. Where they are not apart, their runs count
        against it, and the search goes on. None where the runs speak for no step.
        """
        if len(path.steps) == 1 and (within := self._within(path, 1, ends)):
            return within, range(1, 2)
        scale, observe = self.scale, self._over(path)
        found, pair = Posterior(scale, ends, len(path.steps)), ends
        for _ in range(MOST):
            search.locate(found, observe)
            cell, pair = found.best(), found.sides(found.best())
            if not found.sure:
                break
            if scale.paired and len(cell) < found.steps:
                pair = search.ask(scale, observe, cell[0] - 1, cell[-1], purpose="confirmation")
            if pair.apart or len(pair.good) < scale.least:
                break
            for value in search.shares(pair):
                found.take(cell[0] - 1, cell[-1], value)
        if found.nothing:
            return None, cell
        if pair.apart and 1 == len(cell) < found.steps and (within := self._within(path, cell[0], pair)):
            return within, cell
        names = tuple(path.steps[step - 1].label for step in cell)
        runs = self._told(pair if len(pair.good) >= scale.least else ends)
        return CulpritSteps(steps=names, probability=found.weight(cell), runs=runs), cell

    def _within(self, path: ChangePath, step: int, ends: Ends) -> CulpritSteps | None:
        """Return what inside a step is confirmed, over its inner path as it was when first asked for."""
        start = path.state(range(1, step))
        file = self.runner.folder / f"inside-{digest_of(path.steps[step - 1].applied(start))}.json"
        if not file.is_file():
            inner = ChangePath(start=start, steps=self.finer(path.steps[step - 1], start))
            write_atomically(file, inner.model_dump_json() + "\n")
        inner = load_json(file, ChangePath)
        found, _ = self._culprit(inner, ends) if len(inner.steps) > 1 else (None, None)
        return found if found and found.runs.apart else None

    def _over(self, path: ChangePath) -> Observe:
        """Return what runs the states of a path by their number."""

        def observe(state: int, purpose: str) -> float | None:
            label = f"after {path.steps[state - 1].label}" if state else "before every step"
            return self._value(path.state(range(1, state + 1)), label, purpose)

        return observe

    def _value(self, state: Packages, position: str, purpose: str) -> float | None:
        """Return the number of a run of `state`: of one made before the search was stopped, or a new one."""
        digest, end = digest_of(state), purpose not in {"search", "confirmation"}
        if not end and digest in self._refused:
            return None
        run = self._run(state, position, purpose)
        if run.outcome == "failed" and self.runner.question.kind == "fails":
            return 1.0
        if run.outcome == "measured":
            return run.value
        if end:
            raise RunError("an end cannot be measured", place=position, found=run.detail or run.outcome)
        self._refused[digest] = f"{position}: {run.detail}"
        self.runner.say(f"skipped: {position} cannot be measured")
        return None

    def _run(self, state: Packages, position: str, purpose: str) -> StateRun:
        """Return the next run of the search: one that was kept, or a new one."""
        if self._replayed == len(self._done):
            self.runner.say(f"run {len(self._done) + 1}: {purpose}, {position}")
            self._done.append(self.runner.run(state, position=position, purpose=purpose))
            write_atomically(self._file, BisectRuns(runs=tuple(self._done)).model_dump_json(indent=1) + "\n")
        run = self._done[self._replayed]
        if (run.state, run.purpose) != (digest_of(state), purpose):
            raise InputError(
                "the runs in this folder are of another search",
                place=str(self._file),
                found=f"{run.purpose} of {run.position}",
                hint="name another folder with --out",
            )
        self._replayed += 1
        return run


def bisect_sentence(
    noun: str, ends: EndRuns, culprits: Sequence[CulpritSteps], explained: float, *, runs: int
) -> str:
    """Return the answer in one sentence."""
    apart = effect_in_words(ends.effect)
    if not culprits:
        return (
            f"No change of {noun} seen: the bad end is {apart} in {runs} runs; an effect of"
            f" {ends.smallest:.2%} would have been seen 8 times of 10."
        )
    if not culprits[0].runs.apart:
        return (
            f"Unconfirmed: {noun} is {apart} at the bad end; the search ended at"
            f" {' or '.join(culprits[0].steps)}, which alone was not seen to make it, after {runs} runs;"
            " 100% of the change is unexplained."
        )
    made = []
    for one in (one for one in culprits if one.runs.apart):
        rates = (f"{sum(runs):.0f} of {len(runs)}" for runs in (one.runs.good, one.runs.bad))
        counted = "" if one.runs.effect.relative else f", from {' to '.join(rates)}"
        made.append(f"{' or '.join(one.steps)} made {noun} {effect_in_words(one.runs.effect)}{counted}")
    left = "" if explained >= EXPLAINED else f"; {1 - explained:.0%} of the change is unexplained"
    return f"{'; '.join(made)}; confirmed in {runs} runs{left}."


def effect_in_words(effect: DifferenceInterval) -> str:
    """Return a difference with its direction and interval."""
    points = "%" if effect.relative else "percentage points"
    value, low, high = (100 * one for one in (effect.value, effect.low, effect.high))
    word = "higher" if value > 0 else "lower"
    return f"{abs(value):.1f} {points} {word} (95 %: {low:+.1f} to {high:+.1f})"
