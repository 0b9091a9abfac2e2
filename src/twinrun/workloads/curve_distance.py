"""Curves held against each other: how far apart they are, whether control runs show that of rounding, and
pictures of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.workloads.tables_and_charts import Curve, CurveKind, LineChart, curve, exact
from twinrun.workloads.workload import ControlledCurve, MeasuredPoint

# A curve is held over all of its steps, and over the first ones, where rounding has not grown yet.
FIRST = 100
# Control runs that differ from the run, fewer of which make no envelope.
LEAST_CONTROLS = 8
# An origin that may differ in its last bits from one kind of hardware to another, the digest that two points
# share when they worked through the same samples in the same order, and of what.
WEIGHTS, ORDER, DATA = "initial weights", "order hash", "data"
# Origins that a seed or the hardware draws.
DRAWN = {WEIGHTS, ORDER}
LOSS, AXIS = "loss", "loss, nats/token"
# A loss is a sum in fp32: closer than this to each other, two are the same.
RESOLUTION = 6e-8
# Two units in the last place of fp32, where a loss is at its coarsest: distances below are 0, 1 or 2 units,
# and that control runs had one of them says nothing of the next.
FINEST = 2**-22

CurveOutcome = Literal["inside", "outside", "start", "other-run", "no-envelope", "no-evidence"]


class Window(Frozen):
    """Two curves over some first steps."""

    name: str
    steps: int
    distance: float
    """Largest relative difference."""
    step: int
    """Step of the largest difference."""
    controls: tuple[float, ...]
    """Largest relative difference of each control run to the run that it repeats."""
    envelope: float
    """Distance that one further control run stays below, 999 times of 1000, but never more than the bound."""

    @property
    def errors(self) -> float:
        """How far the distance lies above the middle of the control runs, in their standard errors.

        Both are logarithms of distances. The standard error is that of one further control run, as the
        envelope has it: where the bound or the last place of fp32 makes the envelope, it follows from those.
        """
        middle = statistics.mean(math.log(max(one, RESOLUTION)) for one in self.controls)
        end = math.log(self.envelope)
        middle, quantile = min(middle, end - 1e-9), _quantile(len(self.controls))
        return quantile * (math.log(max(self.distance, RESOLUTION)) - middle) / (end - middle)

    @property
    def share(self) -> float:
        """Distance over envelope: up to 1 the curves are no farther apart than a control run would be."""
        return self.distance / self.envelope


class Parity(Frozen):
    """Two curves held against each other."""

    a: str
    b: str
    outcome: CurveOutcome
    reason: str
    start: float
    """Relative difference at the first step."""
    start_allowed: float
    differs: dict[str, str]
    """What the two started from that is not the same: by name, both sides."""
    windows: tuple[Window, ...]
    """The whole curve first."""

    @property
    def distance(self) -> float:
        """Largest relative difference of the steps that were compared."""
        return max((window.distance for window in self.windows), default=self.start)

    @property
    def worst(self) -> Window | None:
        """The window that is nearest to its envelope, or farthest beyond it."""
        return max(self.windows, key=lambda one: one.share, default=None)


def largest_difference(curves: Sequence[Sequence[float]]) -> tuple[float, int]:
    """Return the largest relative distance between curves and its step, counted from 1.

    The value is nan, at the first such step, where a value is not finite or a curve ends early.
    """
    worst, worst_step = 0.0, 1
    for step in range(1, max(map(len, curves)) + 1):
        values = [one[step - 1] if step <= len(one) else math.nan for one in curves]
        if not all(math.isfinite(value) for value in values):
            return math.nan, step
        distance = (max(values) - min(values)) / max(abs(min(values)), 1e-12)
        if distance > worst:
            worst, worst_step = distance, step
    return worst, worst_step


def values_of(point: MeasuredPoint, metric: str) -> tuple[float, ...]:
    """Return the series of `metric` of a point, empty where it has none."""
    found = point.one_series(metric)
    return found.values if found else ()


def envelope_of(distances: Sequence[float], *, finest: float = FINEST) -> float:
    """Return what a further control run stays below, 999 times of 1000.

    Distances grow by factors, so their logarithms are taken for normal; no envelope is below `finest`, and
    distances below a quarter of it are not told apart. Distances whose logarithms have longer tails than
    normal stay below it 98 times of 100, in both windows together.
    """
    least, count = RESOLUTION * finest / FINEST, len(distances)
    logarithms = [math.log(max(one, least)) for one in distances]
    reach = _quantile(count) * math.sqrt(1 + 1 / count) * statistics.stdev(logarithms)
    return max(math.exp(statistics.mean(logarithms) + reach), finest)


def _quantile(count: int) -> float:
    """Return Student's t at 99.9 %, one-sided, for so many control runs."""
    from scipy.special import stdtrit  # noqa: PLC0415 - most commands hold no curves

    return float(stdtrit(count - 1, 0.999))


def parity(
    a: ControlledCurve,
    b: ControlledCurve,
    *,
    further: Sequence[ControlledCurve] = (),
    bound: float = math.inf,
    finest: float = FINEST,
) -> Parity:
    """Hold two curves against each other over the steps that both have.

    Args:
        further: curves that are neither, for their control runs.
        bound: an envelope is never wider, whatever control runs show.
        finest: an envelope is never narrower: two units of the coarsest last place of the losses.
    """
    steps = min(len(a.values), len(b.values))
    # Runs that are the same bit for bit, such as a record and itself, show rounding once.
    runs = dict.fromkeys((one.values, one.controls) for one in (a, b, *further))
    made = [(values, control) for values, controls in runs for control in controls]
    # One that diverged, or ended early, shows nothing of rounding.
    repeats = [
        (values, control)
        for values, control in dict.fromkeys(made)
        if values != control and math.isfinite(_largest(values, control, steps)[0])
    ]
    windows, allowed = [], max(a.rounding, b.rounding)
    if len(repeats) >= LEAST_CONTROLS:
        first = [_largest(run, control, 1)[0] for run, control in repeats]
        allowed = max(allowed, min(envelope_of(first, finest=finest), bound))
        for name, size in {"whole curve": steps, f"first {FIRST} steps": min(FIRST, steps)}.items():
            distance, step = _largest(a.values, b.values, size)
            controls = tuple(_largest(run, control, size)[0] for run, control in repeats)
            envelope = min(envelope_of(controls, finest=finest), bound)
            apart = {"distance": distance, "envelope": envelope}
            windows.append(Window(name=name, steps=size, step=step, controls=controls, **apart))
    found = Parity(
        a=a.name,
        b=b.name,
        outcome="inside",
        reason="",
        start=_largest(a.values, b.values, 1)[0],
        start_allowed=allowed,
        differs=origins_apart(a, b),
        windows=tuple(windows),
    )
    outcome, reason = _judged(found, controls=len(repeats), same=len(made) - len(repeats), bound=bound)
    return found.model_copy(update={"outcome": outcome, "reason": reason})


def origins_apart(a: ControlledCurve, b: ControlledCurve) -> dict[str, str]:
    """Return what two curves started from that is not the same, both sides by their digests."""
    found = {}
    names = sorted(a.configuration.keys() | b.configuration.keys())
    sides = [(name, *(one.configuration.get(name, "nothing") for one in (a, b))) for name in names]
    if changed := [f"{name} {ours} and {theirs}" for name, ours, theirs in sides if ours != theirs]:
        found["configuration"] = ", ".join(changed)
    # The order is that of a whole curve: a shorter one has another.
    longer = {ORDER} if len(a.values) != len(b.values) else set()
    for name in sorted((a.origins.keys() & b.origins.keys()) - longer):
        if a.origins[name] != b.origins[name]:
            found[name] = f"{a.origins[name][:12]} and {b.origins[name][:12]}"
    return found


def _largest(a: Sequence[float], b: Sequence[float], steps: int) -> tuple[float, int]:
    """Return the largest difference of the first steps and its step; infinite where a value is not finite."""
    value, step = largest_difference([a[:steps], b[:steps]])
    return (math.inf if math.isnan(value) else value), step


def _judged(found: Parity, *, controls: int, same: int, bound: float) -> tuple[CurveOutcome, str]:
    differs = "; ".join(f"{name} {sides}" for name, sides in found.differs.items())
    begin = f"{found.start:.2g} apart at step 1"
    if found.start > found.start_allowed:
        equal = "configuration, weights and data have the same digests: the first step computes another thing"
        return "start", f"{begin}, where rounding is {found.start_allowed:.2g}: {differs or equal}"
    if found.differs.keys() - {WEIGHTS}:
        return "other-run", f"two experiments: {differs}"
    runs = plural(controls, "control run")
    if not found.windows:
        others = f", and {plural(same, 'other')} that {'is' if same == 1 else 'are'} a run bit for bit"
        needed = f"an envelope needs {plural(LEAST_CONTROLS, 'control run')} that differ from the run"
        more = f"--controls {LEAST_CONTROLS + same}"
        return "no-envelope", f"{needed}, there are {controls}{others if same else ''}: {more}"
    over = ", ".join(
        f"over the {one.name} at most {one.distance:.2g}, at step {one.step} of {one.steps},"
        f" envelope {one.envelope:.2g}"
        for one in found.windows
    )
    if (widest := max(max(window.controls) for window in found.windows)) > bound:
        beyond = f"a control run is {widest:.2g} apart, over the bound of {bound:.2g}"
        return "no-envelope", f"{beyond}: rounding hides what the claim is about; {over}"
    begin += f", which is rounding; {over}"
    if all(window.share <= 1 for window in found.windows):
        return "inside", f"{begin}: no farther than {runs} are"
    return "outside", f"{begin}: it grows beyond what rounding does to {runs}"


def loss_chart(points: Sequence[MeasuredPoint], *, title: str) -> LineChart:
    """Return the losses of all points over each other, and in words how far they are apart."""
    curves, orders = [values_of(one, LOSS) for one in points], {one.digests.get(ORDER) for one in points}
    value, step = largest_difference(curves)
    note = f"Same batches in the same order; largest relative difference {value:.2g}, at step {step}."
    if len(orders) > 1 or None in orders:
        note = "The points did not train on the same batches in the same order: the curves need not coincide."
    elif math.isnan(value):
        note = f"A curve ends, or is not a finite number, at step {step}."
    notes = (note,) if len(points) > 1 else ()
    drawn = tuple(
        _curve(point.id, "measured", place, values, f"last {LOSS} {values[-1]:.4f}")
        for place, (point, values) in enumerate(zip(points, curves, strict=True))
    )
    return LineChart(name=LOSS, title=title, x_label="step", y_label=AXIS, curves=drawn, notes=notes)


def parity_charts(found: Parity, a: ControlledCurve, b: ControlledCurve) -> Iterator[LineChart]:
    """Yield for each window, the whole curve and its first steps, both curves and their difference."""
    # Windows of the same steps are one.
    sizes = {window.steps: window for window in reversed(found.windows)}
    for steps in sorted(sizes, reverse=True) or [min(len(a.values), len(b.values))]:
        window = sizes.get(steps)
        both = [_curve(one.name, "measured", place, one.values[:steps]) for place, one in enumerate((a, b))]
        pairs = zip(a.values[:steps], b.values[:steps], strict=True)
        apart = [abs(one - other) / max(abs(one), 1e-12) for one, other in pairs]
        named, over = f"{LOSS}-parity-{steps}", window.name if window else "whole curve"
        title = f"{b.name} over {a.name}, {over}"
        yield LineChart(name=named, title=title, x_label="step", y_label=AXIS, curves=tuple(both))
        line = "The line is the envelope: a further control run, which sums in another order, stays below it."
        yield LineChart(
            name=f"{named}-apart",
            title=f"How far they are apart, {over}",
            x_label="step",
            y_label="relative difference",
            y_scale="log10",
            curves=(_curve(f"{b.name} against {a.name}", "measured", 0, apart),),
            limit=window.envelope if window else None,
            notes=(*((line,) if window else ()), "Steps with equal values are left out."),
        )


def _curve(label: str, kind: CurveKind, place: int, values: Sequence[float], detail: str = "") -> Curve:
    """Return a curve with a spot for each step whose value is a number above 0."""
    shown = ((step, value) for step, value in enumerate(values, 1) if math.isfinite(value) and value > 0)
    return curve(label, kind, place, (exact(step, value) for step, value in shown), detail)
