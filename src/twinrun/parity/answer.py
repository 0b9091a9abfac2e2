"""Whether two logs show one curve: the one judge of curves, asked of logs, and its answer in one sentence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.manifests.metrics import Metric
from twinrun.parity.logs import LoggedCurve
from twinrun.results.bounds import untrained
from twinrun.workloads.curve_distance import (
    FINEST,
    LEAST_CONTROLS,
    Parity,
    Window,
    largest_difference,
    parity,
)
from twinrun.workloads.workload import ControlledCurve

CurveAnswerOutcome = Literal["one curve", "differ", "cannot say"]
CODES: dict[CurveAnswerOutcome, int] = dict(zip(get_args(CurveAnswerOutcome), (0, 1, 3), strict=True))
# A log does not say in which arithmetic it was made: the coarsest that has a bound decides.
_UNKNOWN: Literal["bf16"] = "bf16"


class CurveAnswer(Frozen):
    """What became of holding two curves against each other."""

    outcome: CurveAnswerOutcome
    sentence: str
    """The answer with its reason."""
    step: int | None = None
    """First step at which the curves are apart by more than rounding."""
    errors: float | None = None
    """How far they are apart, in standard errors of a further control run; null without control runs."""
    compared: tuple[str, ...] = ()
    """What the two have in common, and what is not known of it."""
    parity: Parity | None = None
    """Null where no control run was given."""

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


def judge_logs(
    a: LoggedCurve,
    b: LoggedCurve,
    *,
    controls: Sequence[LoggedCurve] = (),
    bound: float | None = None,
    metric: Metric,
    copied: bool = False,
) -> CurveAnswer:
    """Answer whether two logged curves are one but for rounding.

    Args:
        controls: logs of runs that repeat A and sum in other orders.
        bound: largest relative difference that counts as rounding, stated by whoever asks.
        metric: of the loss, with the evidence that a training shows and the widest bounds of rounding.
        copied: the two logs have the same bytes.
    """
    met = _aligned(a, b, controls)
    compared = _compared(a, b, met)
    if doubt := _doubt(a, b, met, copied=copied):
        return CurveAnswer(outcome="cannot say", sentence=f"Cannot say: {doubt}.", compared=compared)
    widest = max(metric.evidence.bounds.values())
    limit = widest if bound is None else bound
    resolution = max(one.resolution for one in (a, b, *controls))
    if start := _apart_at_start(met, limit=max(limit, 2 * resolution)):
        return CurveAnswer(outcome="differ", sentence=start, step=met.steps[0], compared=compared)
    if doubt := _untrained(met, metric):
        return CurveAnswer(outcome="cannot say", sentence=f"Cannot say: {doubt}.", compared=compared)
    if (found := _diverged(met)) is not None:
        return found.model_copy(update={"compared": compared})
    if not controls:
        found = _against_bound(met, bound=bound, resolution=2 * resolution)
        return found.model_copy(update={"compared": compared})
    finest = max(FINEST, 2 * resolution)
    # Logs that begin later have no first step, at which nothing but rounding is.
    late = largest_difference([met.a[:1], met.b[:1]])[0] if met.steps[0] > 1 else 0.0
    curve = ControlledCurve(
        name="A",
        values=met.a,
        controls=met.controls,
        configuration={},
        origins={},
        arithmetic=_UNKNOWN,
        rounding=max(limit, finest, late),
    )
    other = curve.model_copy(update={"name": "B", "values": met.b, "controls": ()})
    held = parity(curve, other, bound=max(limit, finest), finest=finest)
    return answer_of(held, met.steps, met.a, met.b, compared=compared, given=len(controls))


def answer_of(
    held: Parity,
    steps: Sequence[int],
    a: Sequence[float],
    b: Sequence[float],
    *,
    compared: tuple[str, ...],
    given: int | None = None,
) -> CurveAnswer:
    """Return the answer that follows from a parity.

    Args:
        steps: numbers of the steps of `a` and `b`.
        given: control runs that were given, of logs.
    """
    over = [window for window in held.windows if window.share > 1]
    # A control run beyond the bound leaves the envelope cut: nothing is said of a curve outside it.
    if held.outcome in {"outside", "start"} or (held.outcome == "other-run" and over):
        return _differ(held, over, steps, (a, b), compared=compared)
    if held.outcome == "inside":
        window = held.worst
        assert window
        sentence = (
            f"One curve: over {plural(window.steps, 'step')} at most {window.distance:.2g} apart, where one"
            f" more of {plural(len(window.controls), 'control run')} would be up to {window.envelope:.2g}."
        )
        return CurveAnswer(
            outcome="one curve", sentence=sentence, errors=window.errors, compared=compared, parity=held
        )
    reason = held.reason
    if held.outcome == "no-envelope" and not held.windows and given is not None:
        reason = (
            f"an envelope needs {LEAST_CONTROLS} control runs that differ from A and from each other in the"
            f" digits that were logged, of {given} given too few do; give more, or log more digits"
        )
    elif held.outcome == "no-envelope" and held.windows and given is not None:
        reason = f"{reason}; state a wider --bound, or hold fewer steps against each other"
    return CurveAnswer(
        outcome="cannot say", sentence=f"Cannot say: {reason}.", compared=compared, parity=held
    )


def _differ(
    held: Parity,
    over: Sequence[Window],
    steps: Sequence[int],
    both: tuple[Sequence[float], Sequence[float]],
    *,
    compared: tuple[str, ...],
) -> CurveAnswer:
    if held.outcome == "start" or not over:
        return CurveAnswer(
            outcome="differ", sentence=f"They differ from the first step on: {held.reason}.", step=steps[0],
            errors=max((one.errors for one in over), default=None), compared=compared, parity=held,
        )  # fmt: skip
    place = min(_first_outside(*both, window) for window in over)
    farthest = max(over, key=lambda one: one.errors)
    because = "".join(f"; {name} {sides}" for name, sides in held.differs.items())
    runs, at = plural(len(farthest.controls), "control run"), steps[farthest.step - 1]
    sentence = (
        f"They differ from step {steps[place]} on: {farthest.distance:.2g} apart at step {at}, which is"
        f" {farthest.errors:.1f} standard errors above the middle of {runs}, of which a further one would be"
        f" up to {farthest.envelope:.2g}{because}."
    )
    found = CurveAnswer(outcome="differ", sentence=sentence, compared=compared, parity=held)
    return found.model_copy(update={"step": steps[place], "errors": farthest.errors})


def _first_outside(a: Sequence[float], b: Sequence[float], window: Window) -> int:
    for place in range(window.steps):
        if not _relative(a[place], b[place]) <= window.envelope:
            return place
    return window.step - 1


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(min(abs(a), abs(b)), 1e-12)


def _aligned(a: LoggedCurve, b: LoggedCurve, controls: Sequence[LoggedCurve]) -> AlignedCurves:
    tables = [dict(zip(one.steps, one.values, strict=True)) for one in (a, b, *controls)]
    steps = sorted(set(tables[0]).intersection(*tables[1:]))
    first, second, *others = (tuple(table[step] for step in steps) for table in tables)
    return AlignedCurves(steps=tuple(steps), a=first, b=second, controls=tuple(others))


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
    if resolution := max(a.resolution, b.resolution):
        lines.append(f"the logs round, so that differences below {resolution:.2g} are not seen")
    lines.append("initial weights, data and its order: not in the logs, taken to be the same")
    return tuple(lines)


def _doubt(a: LoggedCurve, b: LoggedCurve, met: AlignedCurves, *, copied: bool) -> str | None:
    """Return why the two say nothing of two runs, whatever rounding does; None where they may."""
    if not met.steps:
        spans = (f"{name} has {one.steps[0]} to {one.steps[-1]}" for name, one in (("A", a), ("B", b)))
        return f"no step stands in all logs: {', '.join(spans)}"
    if copied:
        return "A and B are one log, or copies of it: they are one curve, whatever it is"
    if not any(all(map(math.isfinite, one)) for one in (met.a, met.b)):
        return "neither loss is finite to the end"
    return None


def _diverged(met: AlignedCurves) -> CurveAnswer | None:
    """Return the answer where one of two losses is not finite, None where both are.

    Control runs say whether rounding alone does that.
    """
    losses = (met.a, met.b, *met.controls)
    ends = [next((place for place, one in enumerate(run) if not math.isfinite(one)), None) for run in losses]
    where = [place for place in ends[:2] if place is not None]
    if not where:
        if all(place is None for place in ends):
            return None
        sentence = "Cannot say: a control run is not finite, so rounding alone makes this training diverge."
        return CurveAnswer(outcome="cannot say", sentence=sentence)
    step, which = met.steps[where[0]], "A" if ends[0] is not None else "B"
    if len(met.controls) < LEAST_CONTROLS or any(place is not None for place in ends[2:]):
        sentence = (
            f"Cannot say: the loss of {which} is not finite at step {step}, and without {LEAST_CONTROLS}"
            " control runs that stay finite nothing tells whether rounding does that."
        )
        return CurveAnswer(outcome="cannot say", sentence=sentence)
    sentence = (
        f"They differ from step {step} on: the loss of {which} is not finite there, and finite in the other"
        f" run and in {plural(len(met.controls), 'control run')}."
    )
    return CurveAnswer(outcome="differ", sentence=sentence, step=step)


def _untrained(met: AlignedCurves, metric: Metric) -> str | None:
    """Return why the curves show no training, or None; where one of two is not finite, see `_diverged`."""
    if not all(map(math.isfinite, (*met.a, *met.b))):
        return None
    for name, values in (("A", met.a), ("B", met.b)):
        if doubt := untrained(values, metric, rising=0, place=name):
            needed = metric.evidence.trained_steps
            return doubt if len(values) >= needed else f"{doubt}: log {plural(needed, 'step')} or more"
    return None


def _apart_at_start(met: AlignedCurves, *, limit: float) -> str | None:
    """Say how far two curves are apart at their first step, where that is more than any rounding."""
    if met.steps[0] > 1 or not (apart := _relative(met.a[0], met.b[0])) > limit:
        return None
    return (
        f"They differ at step {met.steps[0]}: {apart:.2g} apart before anything was learned, where rounding"
        f" is at most {limit:.2g}; the model, its initial weights or the data are others."
    )


def _against_bound(met: AlignedCurves, *, bound: float | None, resolution: float) -> CurveAnswer:
    """Answer without control runs: only a stated bound decides, or that nothing differs at all."""
    apart = [_relative(one, other) for one, other in zip(met.a, met.b, strict=True)]
    farthest = max(range(len(apart)), key=apart.__getitem__)
    over = (
        f"at most {apart[farthest]:.2g} apart, at step {met.steps[farthest]} of {plural(len(apart), 'step')}"
    )
    if bound is not None:
        limit = max(bound, resolution)
        outside = next((place for place, one in enumerate(apart) if one > limit), None)
        if outside is None:
            return CurveAnswer(
                outcome="one curve", sentence=f"One curve: {over}, within {limit:.2g} as stated.", compared=()
            )
        sentence = f"They differ from step {met.steps[outside]} on: {over}, where {limit:.2g} was stated."
        return CurveAnswer(outcome="differ", sentence=sentence, step=met.steps[outside])
    if not apart[farthest]:
        sentence = f"One curve: equal in every digit that was logged, over {plural(len(apart), 'step')}."
        return CurveAnswer(outcome="one curve", sentence=sentence)
    sentence = (
        f"Cannot say: {over}, and without control runs nothing tells how far rounding reaches;"
        f" {LEAST_CONTROLS} control runs of A decide (--controls), or a stated bound (--bound)."
    )
    return CurveAnswer(outcome="cannot say", sentence=sentence)
