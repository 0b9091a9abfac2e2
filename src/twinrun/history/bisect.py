"""`invoke bisect`: question, search and confirmation over the real states of a path, until little is left."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from twinrun.foundation.cache import cache_root, locked
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import canonical_json, sha256_of_bytes, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.history import search
from twinrun.history.inference import DifferenceInterval, Failures, Quantities, RunScale
from twinrun.history.path import ChangePath, ChangeStep, RunState
from twinrun.history.state_runs import RunQuestion, StateRun, StateRunner

Finer = Callable[[ChangeStep, RunState], tuple[ChangeStep, ...]]
# Purposes of runs without which there is no answer.
ENDS = ("warm-up", "question", "A", "B", "A again")
Outcome = Literal["found", "unconfirmed", "no change"]
# Share of the change, and number of culprits, at which the search for further ones ends.
EXPLAINED, MOST = 0.9, 3
EXIT: dict[str, int] = {"found": 0, "unconfirmed": 1, "no change": 3}


class EndRuns(Frozen):
    """The question: runs of both ends, and what they say."""

    good: tuple[float, ...]
    bad: tuple[float, ...]
    apart: bool
    effect: DifferenceInterval
    smallest: float
    """The smallest effect that so many runs would have shown, relative; of failures a difference of rates."""


class SearchStage(Frozen):
    """A search over the steps of one path."""

    steps: tuple[str, ...]
    trace: tuple[tuple[str, tuple[float, ...]], ...]
    """After which step was measured, and the posterior over the steps after that run."""
    posterior: tuple[float, ...]


class CulpritSteps(Frozen):
    """What the search ended at."""

    steps: tuple[str, ...]
    """Several where states between them cannot be measured, or where the answer is not confirmed."""
    probability: float
    before: tuple[float, ...] = ()
    """Confirming runs of the neighbour before it."""
    after: tuple[float, ...] = ()
    chance: float | None = None
    """Probability that chance alone orders the confirming runs so."""
    effect: DifferenceInterval | None = None
    confirmed: bool = False


class BisectRecord(Frozen):
    """bisect.json."""

    schema_version: Literal[1] = 1
    recipe: str
    question: RunQuestion
    unit: str
    good: str
    bad: str
    outcome: Outcome
    sentence: str
    ends: EndRuns
    path: tuple[str, ...]
    fixed: tuple[str, ...]
    """Differences of the ends that were not bisected."""
    searches: tuple[SearchStage, ...] = ()
    culprits: tuple[CulpritSteps, ...] = ()
    """The largest part of the change first that was looked for; the last one may be unconfirmed."""
    explained: float | None = None
    """Share of the change that confirmed culprits make; null where none is."""
    refused: dict[str, str] = Field(default_factory=dict)
    """States that could not be measured, and why."""
    runs: tuple[StateRun, ...]
    seconds: float
    """Time of all runs."""


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
    say: Callable[[str], None]
    _replayed: int = 0
    _inside: bool = False
    """The path inside one step was searched: a later culprit is named as a step of the path."""
    _done: list[StateRun] = field(default_factory=list)
    _refused: dict[str, str] = field(default_factory=dict)

    @property
    def scale(self) -> RunScale:
        """What kind of numbers the runs give."""
        return Quantities() if self.runner.question.kind == "metric" else Failures()

    def finish(self) -> BisectRecord:
        """Run what is left and return the answer, which is written beside the runs.

        Raises:
            InputError: another bisection runs on this machine.
            RunError: an end cannot be measured.
            RunInterruptedError: stopped; the next call goes on.
        """
        with alone(self.runner.folder):
            self.load()
            record = self._bisected()
            write_atomically(self.runner.folder / "bisect.json", record.model_dump_json(indent=1) + "\n")
            return record

    @property
    def runs(self) -> tuple[StateRun, ...]:
        """All runs so far, in their order."""
        return tuple(self._done)

    def load(self) -> None:
        """Take the runs that the folder has, before any other is made."""
        file = self._file
        self._done = list(load_json(file, BisectRuns).runs) if file.is_file() else []

    @property
    def _file(self) -> Path:
        return self.runner.folder / "runs.json"

    def _bisected(self) -> BisectRecord:
        path, scale, count = self.path, self.scale, len(self.path.steps)
        observe = self.over(path)
        ends = search.ask_ends(scale, observe, bad=count)
        found = EndRuns(
            good=tuple(ends.good),
            bad=tuple(ends.bad),
            apart=ends.apart,
            effect=scale.effect(ends.good, ends.bad),
            smallest=scale.smallest(ends.good, ends.bad),
        )
        if not ends.apart:
            return self._record("no change", found, (), (), None)
        stages: list[SearchStage] = []
        culprits: list[CulpritSteps] = []
        explained = 0.0
        while True:
            culprit, steps = self._culprit(path, ends, stages)
            culprits.append(culprit)
            if not culprit.confirmed or not culprit.effect:
                break
            bases = (statistics.fmean(culprit.before), statistics.fmean(found.good))
            ratio = bases[0] / bases[1] if culprit.effect.relative and bases[1] else 1.0
            explained += ratio * culprit.effect.value / found.effect.value
            # What is left is looked for with the culprit taken over, until it is little or not seen any more.
            left = [step for number, step in enumerate(path.steps, start=1) if number not in steps]
            if explained >= EXPLAINED or not left or len(culprits) == MOST:
                break
            path = ChangePath(start=path.state(steps), steps=tuple(left))
            ends = search.ask_ends(scale, self.over(path), bad=len(left))
            if not ends.apart:
                break
        outcome: Outcome = "found" if culprits[0].confirmed else "unconfirmed"
        return self._record(outcome, found, stages, culprits, explained if outcome == "found" else None)

    def _culprit(
        self, path: ChangePath, ends: search.Ends, stages: list[SearchStage]
    ) -> tuple[CulpritSteps, range]:
        """Return what moves the number most on a path, and the steps of the path that have it."""
        scale = self.scale
        location = search.locate(scale, self.over(path), ends, steps=len(path.steps))
        stages.append(_stage(path, location))
        cell = location.posterior.best()
        if not location.sure:
            return _set_of(path, location), cell
        finest, fine = path, location
        inside = not self._inside and len(cell) == 1
        if inside and (inner := _inside(self.runner.folder, path, cell[0], self.finer)):
            finest = inner
            self._inside = True
            fine = search.locate(
                scale, self.over(inner), ends, steps=len(inner.steps), purpose="search inside"
            )
            stages.append(_stage(inner, fine))
            if not fine.sure:
                return _set_of(inner, fine), cell
        narrow = fine.posterior.best()
        tried = search.confirm(scale, self.over(finest), ends, fine)
        if not tried.confirmed:
            return _set_of(finest, fine, tried), cell
        made = _set_of(finest, fine, tried)
        names = tuple(finest.steps[step - 1].label for step in narrow)
        return made.model_copy(update={"steps": names, "confirmed": True}), cell

    def over(self, path: ChangePath) -> search.Observe:
        """Return what runs the states of a path by their number."""

        def observe(state: int, purpose: str) -> float | None:
            label = f"after {path.steps[state - 1].label}" if state else "before every step"
            return self._value(path.prefix(state), label, purpose)

        return observe

    def _value(self, state: RunState, position: str, purpose: str) -> float | None:
        """Return the number of a run of `state`: of one made before the search was stopped, or a new one."""
        digest, end = state.digest(), purpose in ENDS
        if not end and digest in self._refused:
            return None
        run = self._recorded(digest, purpose) or self._new(state, position, purpose)
        self.runner.remember(run)
        fails = self.runner.question.kind == "fails"
        if run.outcome == "failed" and fails:
            return 1.0
        if run.outcome == "measured":
            return run.value
        if end:
            raise RunError("an end cannot be measured", place=position, found=run.detail or run.outcome)
        self._refused[digest] = f"{position}: {run.detail}"
        self.say(f"skipped: {position} cannot be measured")
        return None

    def _recorded(self, digest: str, purpose: str) -> StateRun | None:
        if self._replayed == len(self._done):
            return None
        run = self._done[self._replayed]
        if (run.state, run.purpose) != (digest, purpose):
            raise InputError(
                "the runs in this folder are of another search",
                place=str(self._file),
                found=f"{run.purpose} of {run.position}",
                hint="name another folder with --out",
            )
        self._replayed += 1
        return run

    def _new(self, state: RunState, position: str, purpose: str) -> StateRun:
        self.say(f"run {len(self._done) + 1}: {purpose}, {position}")
        run = self.runner.run(state, position=position, purpose=purpose)
        self._done.append(run)
        self._replayed += 1
        write_atomically(self._file, BisectRuns(runs=tuple(self._done)).model_dump_json(indent=1) + "\n")
        return run

    def _record(
        self,
        outcome: Outcome,
        ends: EndRuns,
        stages: Sequence[SearchStage],
        culprits: Sequence[CulpritSteps],
        explained: float | None,
    ) -> BisectRecord:
        runs = tuple(self._done)
        return BisectRecord(
            recipe=self.runner.request.recipe,
            question=self.runner.question,
            unit=self.unit,
            good=self.names[0],
            bad=self.names[1],
            outcome=outcome,
            sentence=bisect_sentence(self.noun, ends, culprits, explained, runs=len(runs)),
            ends=ends,
            path=tuple(step.label for step in self.path.steps),
            fixed=self.path.fixed,
            searches=tuple(stages),
            culprits=tuple(culprits),
            explained=explained,
            refused=self._refused,
            runs=runs,
            seconds=round(sum(run.seconds for run in runs), 1),
        )


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of this machine: two bisections would each measure the other."""
    folder.mkdir(parents=True, exist_ok=True)
    cache_root().mkdir(parents=True, exist_ok=True)
    lock = cache_root() / "bisect.lock"
    busy = InputError(
        "another bisection runs on this machine",
        place=str(lock),
        found="its lock is held",
        hint="wait until it ends: two would disturb each other's times",
    )
    with locked(lock, busy=busy):
        yield


def _inside(folder: Path, path: ChangePath, step: int, finer: Finer) -> ChangePath | None:
    """Return the path inside a step, as it was when the search first asked for it."""
    file = folder / "inside.json"
    if not file.is_file():
        start = path.prefix(step - 1)
        inner = ChangePath(start=start, steps=finer(path.steps[step - 1], start))
        write_atomically(file, inner.model_dump_json() + "\n")
    found = load_json(file, ChangePath)
    return found if len(found.steps) > 1 else None


def _stage(path: ChangePath, location: search.Location) -> SearchStage:
    return SearchStage(
        steps=tuple(step.label for step in path.steps),
        trace=tuple(
            (path.steps[state - 1].label if state != search.GOOD else "", after)
            for state, after in location.trace
        ),
        posterior=tuple(location.posterior.weights),
    )


def _set_of(
    path: ChangePath, location: search.Location, tried: search.Confirmation | None = None
) -> CulpritSteps:
    """Return the steps that hold 95 % of the probability, for an answer that is not confirmed."""
    steps = location.posterior.credible()
    return CulpritSteps(
        steps=tuple(path.steps[step - 1].label for step in steps),
        probability=location.posterior.weight(steps),
        before=tried.before if tried else (),
        after=tried.after if tried else (),
        chance=tried.chance if tried else None,
        effect=tried.effect if tried else None,
    )


def bisect_sentence(
    noun: str, ends: EndRuns, culprits: Sequence[CulpritSteps], explained: float | None, *, runs: int
) -> str:
    """Return the answer in one sentence."""
    if not culprits:
        return (
            f"No change of {noun} seen: good and bad are {effect_in_words(ends.effect)} apart in {runs} runs;"
            f" an effect of {ends.smallest:.2%} would have been seen 8 times of 10."
        )
    first = culprits[0]
    if explained is None:
        chance = "" if first.chance is None else f", p = {first.chance:.2g}"
        return (
            f"Unconfirmed: {noun} is {effect_in_words(ends.effect)} at the bad end; most probable is"
            f" {' or '.join(first.steps)}{chance}, {runs} runs."
        )
    made = [
        f"{' or '.join(one.steps)} made {noun} {effect_in_words(one.effect)}, p = {one.chance:.2g}"
        for one in culprits
        if one.confirmed and one.effect and one.chance is not None
    ]
    left = "" if explained >= EXPLAINED else f"; {1 - explained:.0%} of the change is unexplained"
    return f"{'; '.join(made)}; confirmed in {runs} runs{left}."


def effect_in_words(effect: DifferenceInterval) -> str:
    """Return a difference with its direction and interval."""
    word = "higher" if effect.value > 0 else "lower"
    low, high = sorted(abs(one) * 100 for one in (effect.low, effect.high))
    if effect.low * effect.high < 0:
        ends = f"{effect.low:+.1%} to {effect.high:+.1%}"
    else:
        ends = f"{low:.1f} to {high:.1f} %"
    points = "%" if effect.relative else "percentage points"
    return f"{abs(effect.value) * 100:.1f} {points} {word} (95 %: {ends})"


def folder_of(base: Path, key: object) -> Path:
    """Return the folder of a bisection, which the same command finds again."""
    return base / f"bisect-{sha256_of_bytes(canonical_json(key).encode())[:12]}"
