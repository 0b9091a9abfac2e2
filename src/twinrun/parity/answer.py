"""Whether two logs show one curve: held against control runs, or against clean pairs; in one sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.parity import population as clean
from twinrun.parity.logs import LoggedCurve
from twinrun.parity.population import LEAST_PAIRS, WINDOWS, CleanPair, Distances, distances_of
from twinrun.workloads.curve_distance import FINEST, LEAST_CONTROLS, Parity

CurveAnswerOutcome = Literal["one curve", "differ", "cannot say"]
Precision = Literal["fp32", "bf16", "fp16"]
CODES: dict[CurveAnswerOutcome, int] = dict(zip(get_args(CurveAnswerOutcome), (0, 1, 3), strict=True))
# Steps that both logs must have: fewer show no curve.
LEAST_STEPS = 5
# Standard deviation of the logarithms of control runs' distances, where too few were given to show their own.
_SPREAD = 0.5
# What rounding in 16 bits may do to a loss, where a log does not say its precision.
_COARSE = 1e-3
# Where no shape is known.
UNKNOWN = "the shape of the difference does not tell its cause: `--trace` names the first layer that differs"
# Of clean pairs that were as far apart, this share makes it usual.
_USUAL = 0.02


class CurveAnswer(Frozen):
    """What became of holding two curves against each other."""

    outcome: CurveAnswerOutcome
    sentence: str
    """The answer with its reason."""
    step: int | None = None
    """First step at which the curves are apart by more than rounding."""
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

    @property
    def apart(self) -> dict[int, float]:
        """The relative difference at each step."""
        return dict(zip(self.steps, map(abs, clean.signed_distances(self.a, self.b)), strict=True))


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
    answer = _doubt(met, a, b, copied=copied) or _not_finite(met) or _asked(met, bound, precision)
    cause = cause_of(met.steps, met.a, met.b, onset=answer.step) if answer.step is not None else None
    return answer.model_copy(update={"cause": cause, "compared": tuple(_compared(a, b, met))})


def _asked(met: AlignedCurves, bound: float | None, precision: Precision | None) -> CurveAnswer:
    if bound is not None:
        far, limit = max(met.apart.values()), max(bound, met.unseen)
        return _answer(met, [Held(WINDOWS[-1], "apart", far, limit, True, f"{limit:.2g} was stated")])
    if met.a == met.b:
        return one_curve(f"equal in all logged digits, over {plural(len(met.steps), 'step')}")
    mine = distances_of(met.steps, met.a, met.b)
    pairs = () if met.controls else clean.population()
    held = by_pairs(mine, pairs, precision=precision, unseen=met.unseen) if pairs else _by_controls(met, mine)
    return _unlearned(met, held) or _answer(met, held)


def _doubt(met: AlignedCurves, a: LoggedCurve, b: LoggedCurve, *, copied: bool) -> CurveAnswer | None:
    """Return that the two say nothing of two runs, whatever rounding does; None where they may."""
    if not met.steps:
        spans = (f"{name} has {one.steps[0]} to {one.steps[-1]}" for name, one in (("A", a), ("B", b)))
        return cannot_say(f"no step stands in all logs: {', '.join(spans)}")
    if copied:
        return cannot_say("A and B are one log, or copies of it: they are one curve, whatever it is")
    if len(met.steps) < LEAST_STEPS:
        return cannot_say(f"{plural(len(met.steps), 'step')} show no curve, {LEAST_STEPS} do")
    return None


def cannot_say(reason: str) -> CurveAnswer:
    """Return the answer that there is none, with its reason."""
    return CurveAnswer(outcome="cannot say", sentence=f"Cannot say: {reason}.")


def one_curve(reason: str) -> CurveAnswer:
    """Return the answer that the two are one curve, with its reason."""
    return CurveAnswer(outcome="one curve", sentence=f"One curve: {reason}.")


def differ(step: int, reason: str) -> CurveAnswer:
    """Return the answer that the two differ from a step on, with its reason."""
    return CurveAnswer(outcome="differ", sentence=f"They differ from step {step} on: {reason}.", step=step)


def _answer(met: AlignedCurves, held: Sequence[Held]) -> CurveAnswer:
    """Return what follows from all figures: one beyond rounding decides, an unusual one leaves it open."""
    if not held:
        few = f"fewer than {LEAST_PAIRS} clean pairs begin as these do"
        return cannot_say(f"{few}; control runs of A (--controls), --precision, or a stated --bound decide")
    beyond = [one for one in held if one.value > one.limit]
    if not beyond:
        least = min(held, key=lambda one: (one.usual, one.limit / max(one.value, 1e-300)))
        apart = max(one.value for one in held if one.figure == "apart")
        over = f"at most {apart:.2g} apart over {plural(len(met.steps), 'step')}; {least.said}"
        return (
            one_curve(over) if least.usual else cannot_say(f"{over}, which is neither usual nor beyond them")
        )
    far = max(beyond, key=lambda one: one.value / one.limit)
    within = _within(met, far)
    place = f"at step {max(within, key=within.__getitem__)}"
    if far.figure == "drift":
        place = f"in the mean of steps {min(within)} to {max(within)}"
    what = f"{far.value:.2g} apart {place}; {far.said}"
    # The first step farther apart than rounding reaches; of a drift alone, where its half begins.
    first = min(beyond, key=lambda one: (one.figure != "apart", one.window))
    least_far = first.limit if first.figure == "apart" else -1.0
    step = next(step for step, one in _within(met, first).items() if one > least_far)
    return differ(step, what)


def _within(met: AlignedCurves, held: Held) -> dict[int, float]:
    """Return the differences that a figure is of, by step; windows count the steps of a log from 1."""
    first = held.window // 2 if held.figure == "drift" else 0
    count = 1 - min(met.steps[0], 1)
    return {step: one for step, one in met.apart.items() if first < step + count <= held.window}


def _by_controls(met: AlignedCurves, mine: Distances) -> list[Held]:
    """Hold the curves against control runs: what a further one would stay below 999 times of 1000.

    Distances grow by factors, so their logarithms are taken for normal. A control run that is equal in its
    digits is closer than the log shows: what is not shown bounds it.
    """
    found = []
    others = [distances_of(met.steps, met.a, one) for one in met.controls]
    windows = [n for n, end in enumerate(WINDOWS) if end >= 100 or end >= met.steps[-1]]
    finest = max(met.unseen, FINEST)
    for figure, floor in (("apart", finest), ("drift", finest / 4)):
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
            said = f"one more of {plural(count, 'control run')} would be up to {limit:.2g}"
            found.append(Held(WINDOWS[place], figure, value, limit, True, said))
    return found


def by_pairs(
    mine: Distances, pairs: Sequence[CleanPair], *, precision: Precision | None, unseen: float
) -> list[Held]:
    """Hold the distances of two curves against clean pairs of other trainings, window by window."""
    near = clean.comparable(mine, pairs, precision=precision, unseen=unseen)
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
            limit = max(
                limit, limits.get(place, 0.0 if precision else _COARSE) / (1 if figure == "apart" else 10)
            )
            limits.setdefault(place, limit)
            said = f"rounding did as much in {as_far} of {plural(len(values), 'clean pair')}"
            said = "the logs round as much" if value <= hidden else said
            usual = as_far >= _USUAL * len(values)
            found.append(Held(WINDOWS[place], figure, value, limit, usual, said))
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
    way = f"{'rises' if low < 0 else 'falls'} by {abs(low):.0%}"
    return differ(step, f"the loss of {learns} falls by {high:.0%}, and that of {not_} {way}")


def _not_finite(met: AlignedCurves) -> CurveAnswer | None:
    """Return the answer where a loss is not finite, None where all are."""
    first, second, *others = [
        next((step for step, one in zip(met.steps, run, strict=True) if not math.isfinite(one)), None)
        for run in (met.a, met.b, *met.controls)
    ]
    if {*others} - {None}:
        return cannot_say("a control run is not finite, so rounding alone makes this training diverge")
    ends = [(name, step) for name, step in (("A", first), ("B", second)) if step is not None]
    if len(ends) == 2:
        return cannot_say("neither loss is finite to the end")
    said = "is not finite there, and finite in all other runs"
    return next((differ(step, f"the loss of {name} {said}") for name, step in ends), None)


def _aligned(a: LoggedCurve, b: LoggedCurve, controls: Sequence[LoggedCurve]) -> AlignedCurves:
    tables = [dict(zip(one.steps, one.values, strict=True)) for one in (a, b, *controls)]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    first, second, *others = (tuple(table[step] for step in steps) for table in tables)
    # Two losses, each rounded to half of its last digit.
    unseen = max(one.resolution for one in (a, b, *controls))
    return AlignedCurves(tuple(steps), first, second, tuple(others), unseen)


def _compared(a: LoggedCurve, b: LoggedCurve, met: AlignedCurves) -> Iterator[str]:
    """Say what is held against what."""
    common = plural(len(met.steps), "step")
    yield f"{common} that all logs have, of {len(a.steps)} in A and {len(b.steps)} in B"
    gaps = [statistics.mode(map(int.__sub__, one.steps[1:], one.steps)) for one in (a, b) if one.steps[1:]]
    if len(set(gaps)) > 1:
        yield f"the steps of A are {gaps[0]} apart and those of B {gaps[1]}, taken to count the same steps"
    if met.unseen:
        yield f"the logs round, so that differences below {met.unseen:.2g} are not seen"
    yield "initial weights, data and its order: not in the logs, taken to be the same"


def cause_of(steps: Sequence[int], a: Sequence[float], b: Sequence[float], *, onset: int) -> str:
    """Return the likely cause of a difference that begins at step `onset`, in words."""
    if not all(map(math.isfinite, (*a, *b))):
        return "a loss that is not finite: look at the gradient norm and the loss scale in the steps before"
    return _of_the_log(a, b) or _of_the_run(steps, a, b, onset)


def _of_the_run(steps: Sequence[int], a: Sequence[float], b: Sequence[float], onset: int) -> str:
    """Return a cause that lies in the training."""
    apart = [abs(one) for one in clean.signed_distances(a, b)]
    place = steps.index(onset)
    if place:
        # A fault shows before it is beyond all rounding: where it leaves what the first loss shows.
        floor = 30 * max(apart[0], clean.ROUNDING)
        place = min(place, next((n for n, one in enumerate(apart) if one > floor), place))
    jump = place > 0 and apart[place] > 20 * max(*apart[:place], clean.ROUNDING)
    ends = statistics.mean(apart[-max(len(apart[place:]) // 4, 1) :])
    found = UNKNOWN
    if place == 0:
        found = "other weights, data or model from the start: compare digests of weights and of a batch"
    elif _other_batches(a, b, place):
        found = (
            f"other batches from step {steps[place]} on, as losses rise and fall at other steps: order, seed,"
            " a skipped batch, or the place in the data after a resume"
        )
    elif jump and len(apart) - place >= 8 and ends < max(apart[place : place + 4]) / 4:
        found = (
            f"one step did something else, and training goes on from there: the batch of step {steps[place]},"
            " a skipped update, its gradient norm"
        )
    elif steps[place] - steps[0] <= max(3, steps[1] - steps[0]):
        found = (
            "each update differs from the first on: learning rate or warm-up, constants of the optimizer,"
            " weight decay, clipping, the mean over microbatches; the gradient norm of step 1 tells which"
        )
    elif jump:
        found = (
            f"something switches at step {steps[place]}: the end of warm-up or a schedule's edge, a resume"
            " without the optimizer's state, an epoch"
        )
    return found


def _of_the_log(a: Sequence[float], b: Sequence[float]) -> str | None:
    """Return a cause that lies in what was logged: another unit or mean, or another count of steps."""
    if min((*a, *b)) > 0:
        ratios = [two / one for one, two in zip(a, b, strict=True)]
        middle = statistics.median(ratios)
        if max(ratios) - min(ratios) < 0.02 * middle and abs(middle - 1) > 0.02:
            bits = any(abs(middle / one - 1) < 0.01 for one in (math.log2(math.e), math.log(2)))
            what = (
                "one is in bits, the other in nats"
                if bits
                else "a sum beside a mean, over microbatches, devices, or tokens that are not padding"
            )
            return f"a constant ratio of {middle:.4g}: {what}"
    plain = statistics.mean(abs(one - two) for one, two in zip(a, b, strict=True))
    for lag, which in ((1, "B is one step behind A"), (-1, "B is one step ahead of A")):
        pairs = list(zip(a[:-1], b[1:], strict=True) if lag == 1 else zip(a[1:], b[:-1], strict=True))
        if len(pairs) >= 5 and statistics.mean(abs(one - two) for one, two in pairs) < plain / 20:
            return f"a shift: {which}; one counts steps from 0, or logs after the update"
    return None


def _other_batches(a: Sequence[float], b: Sequence[float], place: int) -> bool:
    """Say whether the losses of two runs rise and fall at other steps from a place on."""
    if len(a) - place < 12:
        return False
    moves = [[two - one for one, two in zip(run[place:], run[place + 1 :], strict=False)] for run in (a, b)]
    if min(map(statistics.pstdev, moves)) == 0:
        return False
    return statistics.correlation(*moves) < 0.5
