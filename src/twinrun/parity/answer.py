"""Whether two logs show one curve: held against control runs, or against clean pairs; in one sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.parity.causes import cause_of
from twinrun.parity.logs import LoggedCurve
from twinrun.parity.population import (
    LEAST_PAIRS,
    WINDOWS,
    CleanPair,
    Distances,
    comparable,
    distances_of,
    population,
    signed_distances,
)
from twinrun.workloads.curve_distance import LEAST_CONTROLS, Parity

CurveAnswerOutcome = Literal["one curve", "differ", "cannot say"]
Precision = Literal["fp32", "bf16", "fp16"]
CODES: dict[CurveAnswerOutcome, int] = dict(zip(get_args(CurveAnswerOutcome), (0, 1, 3), strict=True))
# Steps that both logs must have: fewer show no curve.
LEAST_STEPS = 5
# Two losses of fp32 are no closer than this.
_FINEST = 2**-22
# Standard deviation of the logarithms of control runs' distances, where too few were given to show their own.
_SPREAD = 0.5
# What rounding in 16 bits may do to a loss, where a log does not say its precision.
_COARSE = 1e-3
# Of clean pairs that were as far apart, this share makes it usual.
_USUAL = 0.02


class CurveAnswer(Frozen):
    """What became of holding two curves against each other."""

    outcome: CurveAnswerOutcome
    sentence: str
    """The answer with its reason."""
    step: int | None = None
    """First step at which the curves are apart by more than rounding."""
    errors: float | None = None
    """How far they are apart, in standard errors of a further control run; null without control runs."""
    as_far: tuple[int, int] | None = None
    """Clean pairs that were as far apart, and all that were asked; null where control runs decide."""
    cause: str | None = None
    """What the shape of the difference speaks for, and what to look at; null where they are one curve."""
    compared: tuple[str, ...] = ()
    """What the two have in common, and what is not known of it."""
    parity: Parity | None = None
    """Of records."""

    @property
    def code(self) -> int:
        """Exit code of the command."""
        return CODES[self.outcome]


class AlignedCurves(NamedTuple):
    """Curves at the steps that all of them have."""

    steps: tuple[int, ...]
    a: tuple[float, ...]
    b: tuple[float, ...]
    controls: tuple[tuple[float, ...], ...]
    unseen: float
    """Largest relative difference that the logs do not show."""


class Held(NamedTuple):
    """One figure of the two curves over some first steps, and what rounding makes of it."""

    window: int
    figure: str
    """`apart`, the largest difference, or `drift`, their mean over the second half."""
    value: float
    limit: float
    """What rounding stays below."""
    usual: bool
    """Rounding is known to reach the value."""
    said: str
    errors: float | None = None
    as_far: tuple[int, int] | None = None


def judge_logs(
    a: LoggedCurve,
    b: LoggedCurve,
    *,
    controls: Sequence[LoggedCurve] = (),
    bound: float | None = None,
    precision: Precision | None = None,
    copied: bool = False,
) -> CurveAnswer:
    """Answer whether two logged curves are one but for rounding.

    Args:
        controls: logs of runs that repeat A and sum in other orders; without any, clean pairs decide.
        bound: largest relative difference that counts as rounding, as stated; it decides alone.
        precision: arithmetic of both runs; what the first steps show where it is not known.
        copied: the two logs have the same bytes.
    """
    met = _aligned(a, b, controls)
    answer = _asked(met, a, b, bound=bound, precision=precision, copied=copied)
    cause = cause_of(met.steps, met.a, met.b, onset=answer.step) if answer.step is not None else None
    return answer.model_copy(update={"cause": cause, "compared": _compared(a, b, met)})


def _asked(
    met: AlignedCurves,
    a: LoggedCurve,
    b: LoggedCurve,
    *,
    bound: float | None,
    precision: Precision | None,
    copied: bool,
) -> CurveAnswer:
    if doubt := _doubt(met, a, b, copied=copied):
        return cannot_say(doubt)
    if found := _not_finite(met):
        return found
    if bound is not None:
        return _against_bound(met, max(bound, met.unseen))
    if met.a == met.b:
        return CurveAnswer(
            outcome="one curve",
            sentence=f"One curve: equal in all logged digits, over {plural(len(met.steps), 'step')}.",
        )
    held = (
        _by_controls(met)
        if met.controls
        else by_pairs(
            distances_of(met.steps, met.a, met.b), population(), precision=precision, unseen=met.unseen
        )
    )
    return _unlearned(met, held) or _answer(met, held)


def _doubt(met: AlignedCurves, a: LoggedCurve, b: LoggedCurve, *, copied: bool) -> str | None:
    """Return why the two say nothing of two runs, whatever rounding does; None where they may."""
    if not met.steps:
        spans = (f"{name} has {one.steps[0]} to {one.steps[-1]}" for name, one in (("A", a), ("B", b)))
        return f"no step stands in all logs: {', '.join(spans)}"
    if copied:
        return "A and B are one log, or copies of it: they are one curve, whatever it is"
    if len(met.steps) < LEAST_STEPS:
        return f"{plural(len(met.steps), 'step')} show no curve, {LEAST_STEPS} do"
    return None


def cannot_say(reason: str) -> CurveAnswer:
    """Return the answer that there is none, with its reason."""
    return CurveAnswer(outcome="cannot say", sentence=f"Cannot say: {reason}.")


def _answer(met: AlignedCurves, held: Sequence[Held]) -> CurveAnswer:
    """Return what follows from all figures: one beyond rounding decides, an unusual one leaves it open."""
    if not held:
        return cannot_say(
            f"fewer than {LEAST_PAIRS} clean pairs begin as these do; control runs of A decide (--controls),"
            " or --precision, or a stated --bound"
        )
    beyond = [one for one in held if one.value > one.limit]
    if not beyond:
        least = min(held, key=lambda one: (one.usual, one.limit / max(one.value, 1e-300)))
        apart = max(one.value for one in held if one.figure == "apart")
        over = f"at most {apart:.2g} apart over {plural(len(met.steps), 'step')}"
        if least.usual:
            sentence = f"One curve: {over}; {least.said}."
            return CurveAnswer(
                outcome="one curve", sentence=sentence, errors=least.errors, as_far=least.as_far
            )
        return cannot_say(f"{over}; {least.said}, which is neither usual nor beyond them").model_copy(
            update={"as_far": least.as_far}
        )
    far = max(beyond, key=lambda one: one.value / one.limit)
    step, within = _onset(met, beyond), _within(met, far)
    if far.figure == "apart":
        what = f"{far.value:.2g} apart at step {max(within, key=within.__getitem__)}"
    else:
        what = f"{far.value:.2g} apart in the mean of steps {min(within)} to {max(within)}"
    return CurveAnswer(
        outcome="differ",
        sentence=f"They differ from step {step} on: {what}; {far.said}.",
        step=step,
        errors=far.errors,
        as_far=far.as_far,
    )


def _within(met: AlignedCurves, held: Held) -> dict[int, float]:
    """Return the differences that a figure is of, by step; windows count the steps of a log from 1."""
    first = held.window // 2 if held.figure == "drift" else 0
    apart = map(abs, signed_distances(met.a, met.b))
    count = 1 - min(met.steps[0], 1)
    return {
        step: one for step, one in zip(met.steps, apart, strict=True) if first < step + count <= held.window
    }


def _onset(met: AlignedCurves, beyond: Sequence[Held]) -> int:
    """Return the first step farther apart than rounding reaches; of a drift alone, where its half begins."""
    first = min(beyond, key=lambda one: (one.figure != "apart", one.window))
    least = first.limit if first.figure == "apart" else -1.0
    return next(step for step, one in _within(met, first).items() if one > least)


def _by_controls(met: AlignedCurves) -> list[Held]:
    """Hold the curves against control runs: what a further one would stay below 999 times of 1000.

    Distances grow by factors, so their logarithms are taken for normal. A control run that is equal in its
    digits is closer than the log shows: what is not shown bounds it.
    """
    found, mine = [], distances_of(met.steps, met.a, met.b)
    others = [distances_of(met.steps, met.a, one) for one in met.controls]
    windows = [n for n, end in enumerate(WINDOWS) if end >= 100 or end >= met.steps[-1]]
    for figure, floor in (("apart", max(met.unseen, _FINEST)), ("drift", max(met.unseen, _FINEST) / 4)):
        for place in windows[: len(getattr(mine, figure)) - windows[0]]:
            value = getattr(mine, figure)[place]
            logarithms = [math.log(max(getattr(one, figure)[place], floor)) for one in others]
            if math.isnan(value) or any(map(math.isnan, logarithms)):
                continue
            count, middle = len(logarithms), statistics.mean(logarithms)
            own = statistics.stdev(logarithms) if count > 1 else 0.0
            shown = count >= LEAST_CONTROLS and min(logarithms) > math.log(floor)
            spread = (max(own, 0.05) if shown else max(own, _SPREAD)) * math.sqrt(1 + 1 / count)
            # Student's t at 99.9 %, one-sided, to 2 %, from seven degrees of freedom on.
            reach = 3.09 * (1 + 4 / (count - 1)) if shown else 3.3
            limit = math.exp(middle + reach * spread)
            errors = (math.log(max(value, floor)) - middle) / spread
            runs = plural(count, "control run")
            said = f"one more of {runs} would be up to {limit:.2g}"
            found.append(Held(WINDOWS[place], figure, value, limit, True, said, errors))
    return found


def by_pairs(
    mine: Distances, pairs: Sequence[CleanPair], *, precision: Precision | None, unseen: float
) -> list[Held]:
    """Hold the distances of two curves against clean pairs of other trainings, window by window."""
    near = comparable(mine, pairs, precision=precision, unseen=unseen)
    found: list[Held] = []
    limits: dict[int, float] = {}
    for figure, hidden in (("apart", unseen), ("drift", unseen / 4)):
        seen: list[float] = []
        for place, value in enumerate(getattr(mine, figure)):
            for asked in (near,) if precision else (near, pairs):
                values = [getattr(one.distances, figure)[place : place + 1] for one in asked]
                values = [one[0] for one in values if one and not math.isnan(one[0])]
                if len(values) >= LEAST_PAIRS:
                    break
            else:
                # Few clean pairs are as long: distances may go on to grow with the steps.
                values = [one * WINDOWS[place] / WINDOWS[place - 1] for one in seen]
            seen = values
            if math.isnan(value) or not values:
                continue
            as_far = sum(one + hidden >= value for one in values)
            # The fewer pairs were seen, the farther beyond all of them a further one may be.
            limit = max(values) * (1 + 200 / len(values)) + hidden
            # A pair of 16 bits may begin as one of 32 by chance.
            coarse = 0.0 if precision else _COARSE
            if figure == "apart":
                limits[place] = limit = max(limit, coarse)
            else:
                limit = max(limit, limits.get(place, coarse) / 10)
            said = f"rounding did as much in {as_far} of {plural(len(values), 'clean pair')}"
            said = "the logs round as much" if value <= hidden else said
            usual, counted = as_far >= _USUAL * len(values), (as_far, len(values))
            found.append(Held(WINDOWS[place], figure, value, limit, usual, said, as_far=counted))
    return found


def _unlearned(met: AlignedCurves, held: Sequence[Held]) -> CurveAnswer | None:
    """Return the answer where one of the two learns and the other does not, which no rounding does."""
    quarter = max(len(met.steps) // 4, 1)
    falls = [1 - statistics.mean(one[-quarter:]) / one[0] if one[0] > 0 else 0.0 for one in (met.a, met.b)]
    high, low = max(falls), min(falls)
    if high < 0.05 or low > high / 5 or any(high / 2 < one.value <= one.limit for one in held):
        return None
    learns, not_ = ("A", "B") if falls[0] == high else ("B", "A")
    better, worse = (met.a, met.b) if learns == "A" else (met.b, met.a)
    gap = better[0] * high / 4
    step = next((s for s, x, y in zip(met.steps, better, worse, strict=True) if y - x > gap), met.steps[-1])
    sentence = (
        f"They differ from step {step} on: the loss of {learns} falls by {high:.0%}, and that of {not_}"
        f" {'rises' if low < 0 else 'falls'} by {abs(low):.0%}."
    )
    return CurveAnswer(outcome="differ", sentence=sentence, step=step)


def _not_finite(met: AlignedCurves) -> CurveAnswer | None:
    """Return the answer where a loss is not finite, None where all are."""
    losses = (met.a, met.b, *met.controls)
    ends = [next((place for place, one in enumerate(run) if not math.isfinite(one)), None) for run in losses]
    if all(place is None for place in ends):
        return None
    if any(place is not None for place in ends[2:]):
        return cannot_say("a control run is not finite, so rounding alone makes this training diverge")
    if None not in ends[:2]:
        return cannot_say("neither loss is finite to the end")
    which, place = next((name, one) for name, one in zip("AB", ends, strict=False) if one is not None)
    step = met.steps[place]
    beside = f" and in {plural(len(met.controls), 'control run')}" if met.controls else ""
    sentence = (
        f"They differ from step {step} on: the loss of {which} is not finite there, and finite in the other"
        f" run{beside}."
    )
    return CurveAnswer(outcome="differ", sentence=sentence, step=step)


def _against_bound(met: AlignedCurves, limit: float) -> CurveAnswer:
    apart = [abs(one) for one in signed_distances(met.a, met.b)]
    farthest = max(range(len(apart)), key=apart.__getitem__)
    over = (
        f"at most {apart[farthest]:.2g} apart, at step {met.steps[farthest]} of {plural(len(apart), 'step')}"
    )
    if apart[farthest] <= limit:
        return CurveAnswer(outcome="one curve", sentence=f"One curve: {over}, within {limit:.2g} as stated.")
    step = next(step for step, one in zip(met.steps, apart, strict=True) if one > limit)
    sentence = f"They differ from step {step} on: {over}, where {limit:.2g} was stated."
    return CurveAnswer(outcome="differ", sentence=sentence, step=step)


def _aligned(a: LoggedCurve, b: LoggedCurve, controls: Sequence[LoggedCurve]) -> AlignedCurves:
    tables = [dict(zip(one.steps, one.values, strict=True)) for one in (a, b, *controls)]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    first, second, *others = (tuple(table[step] for step in steps) for table in tables)
    # Two losses, each rounded to half of its last digit.
    unseen = max(one.resolution for one in (a, b, *controls))
    return AlignedCurves(tuple(steps), first, second, tuple(others), unseen)


def _compared(a: LoggedCurve, b: LoggedCurve, met: AlignedCurves) -> tuple[str, ...]:
    """Say what is held against what."""
    lines = [
        f"{plural(len(met.steps), 'step')} that all logs have, of {len(a.steps)} in A and {len(b.steps)} in B"
    ]
    gaps = [statistics.mode(map(int.__sub__, one.steps[1:], one.steps)) for one in (a, b) if one.steps[1:]]
    if len(set(gaps)) > 1:
        lines.append(
            f"the steps of A are {gaps[0]} apart and those of B {gaps[1]}, taken to count the same steps"
        )
    if met.unseen:
        lines.append(f"the logs round, so that differences below {met.unseen:.2g} are not seen")
    lines.append("initial weights, data and its order: not in the logs, taken to be the same")
    return tuple(lines)
