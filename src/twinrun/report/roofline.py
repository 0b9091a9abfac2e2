"""Rooflines: what kernels reach, beside what their device was measured to do at most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes

from twinrun.benchmark import COPY, Ceiling
from twinrun.manifest import Frozen
from twinrun.record import BenchRecord, CaseRecord, MeasurementRecord
from twinrun.report.svg import COLOURS, SIGNS, Key, Picture, canvas, label_logarithmic, svg_text
from twinrun.report.words import hardware, number, rate

TERA = 1e12
# A call whose least time is shorter measures the launch, not the kernel.
LEAST_MILLISECONDS = 0.005
# By field of a spot: its colour, and what it is called; the first is drawn first.
WHO = {
    "floor": ("reference", "the most this kernel could reach, whichever ceiling sets its floor"),
    "baseline": ("series-2", "the baseline, in the same process"),
    "ours": ("series-1", "this recipe's kernels"),
}


class Spot(Frozen):
    """One kernel: operations for a byte, and trillions of operations a second."""

    operation: str
    intensity: float
    ours: float
    baseline: float | None
    floor: float | None


def roofline(record: BenchRecord, *, name: str) -> Picture | None:
    """Draw the kernels of a record under the ceilings of its device; None where either is unknown."""
    case = next((one for one in record.points if _arithmetic(one)), None)
    if case is None:
        return None
    copy, arithmetic = _ceiling(case, COPY), _arithmetic(case)
    assert copy is not None
    assert arithmetic is not None
    spots = [spot for one in record.points for spot in _spots(one, arithmetic.id)]
    if not spots:
        return None
    title = f"Roofline of {hardware(record)}"
    with canvas(height=4.2) as (figure, axes):
        _draw_ceilings(axes, copy.rate / TERA, arithmetic.rate / TERA, spots)
        _draw_spots(axes, spots)
        axes.set_xlabel(f"{arithmetic.id} instructions for a byte that must move")
        axes.set_ylabel(f"{arithmetic.id} instructions, T/s")
        svg = svg_text(figure, name=name, title=title, description=_described(spots))
    return Picture(svg=svg, title=title, keys=_keys(record, spots), notes=_notes(case))


def _ceiling(case: CaseRecord, name: str) -> Ceiling | None:
    return next((one for one in case.ceilings if one.id == name), None)


def _arithmetic(case: CaseRecord) -> Ceiling | None:
    """Return the ceiling that the vertical axis counts: that of which its kernels do most."""
    if _ceiling(case, COPY) is None:
        return None
    others = [one for one in case.ceilings if one.id != COPY]
    timed = [one for one in case.measurements if one.ours.milliseconds]

    def done(ceiling: Ceiling) -> float:
        return sum(one.amounts.get(ceiling.id, 0.0) for one in timed)

    return max(others, key=done, default=None) if timed else None


def _spots(case: CaseRecord, counted: str) -> list[Spot]:
    chosen = [one for one in case.measurements if one.way == "kernels" and one.ours.milliseconds]
    counted_in = [one for one in chosen if {COPY, counted} <= one.amounts.keys()]
    return [_spot(one, counted) for one in counted_in if _is_long(one)]


def _is_long(one: MeasurementRecord) -> bool:
    return one.floor is None or one.floor.milliseconds >= LEAST_MILLISECONDS


def _spot(one: MeasurementRecord, counted: str) -> Spot:
    done = one.amounts[counted] / TERA
    assert one.ours.milliseconds is not None
    theirs = one.baseline.milliseconds if one.baseline else None
    return Spot(
        operation=one.operation,
        intensity=one.amounts[counted] / one.amounts[COPY],
        ours=done / one.ours.milliseconds.median * 1e3,
        baseline=done / theirs.median * 1e3 if theirs else None,
        floor=done / one.floor.milliseconds * 1e3 if one.floor else None,
    )


def _draw_ceilings(axes: Axes, copy: float, arithmetic: float, spots: Sequence[Spot]) -> None:
    """Draw both roofs, the axes a power of two wider than what is in them."""
    reached = [value for spot in spots for value in (spot.ours, spot.baseline, spot.floor) if value]
    low = 2.0 ** (math.floor(math.log2(min(spot.intensity for spot in spots))) - 1)
    high = 2.0 * max(arithmetic / copy, *(spot.intensity for spot in spots))
    ridge = arithmetic / copy
    axes.plot([low, ridge, high], [low * copy, arithmetic, arithmetic], color=COLOURS["ink"], linewidth=1.5)
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(min([*reached, low * copy]) / 2, arithmetic * 2)
    for axis in (axes.xaxis, axes.yaxis):
        label_logarithmic(axis)


def _draw_spots(axes: Axes, spots: Sequence[Spot]) -> None:
    """Draw each kernel: the mark tells the operation, the colour who reached it."""
    for operation, mark in _marks(spots).items():
        chosen = [spot for spot in spots if spot.operation == operation]
        for field, (colour, _) in WHO.items():
            drawn = [(spot.intensity, value) for spot in chosen if (value := getattr(spot, field))]
            look = "_" if field == "floor" else mark
            size = {"markersize": 13, "markeredgewidth": 2} if field == "floor" else {"alpha": 0.85}
            if drawn:
                axes.plot(*zip(*drawn, strict=True), look, color=COLOURS[colour], **size)


def _marks(spots: Sequence[Spot]) -> dict[str, str]:
    operations = dict.fromkeys(spot.operation for spot in spots)
    return {operation: list(SIGNS)[place % len(SIGNS)] for place, operation in enumerate(operations)}


def _keys(record: BenchRecord, spots: Sequence[Spot]) -> tuple[Key, ...]:
    signs = {"ours": "■", "baseline": "■", "floor": "━"}
    names = {
        f"{one.baseline.implementation} {one.baseline.version}"
        for case in record.points
        for one in case.measurements
        if one.baseline
    }
    who = [
        Key(
            sign=signs[field],
            colour=colour,
            label=label,
            detail=", ".join(sorted(names)) if field == "baseline" else "",
        )
        for field, (colour, label) in WHO.items()
        if any(getattr(spot, field) for spot in spots)
    ]
    marks = (
        Key(sign=SIGNS[mark], colour="ink", label=operation) for operation, mark in _marks(spots).items()
    )
    return (*who, *marks)


def _notes(case: CaseRecord) -> tuple[str, ...]:
    measured = (f"{one.id}: {rate(one)}, {one.what}." for one in case.ceilings)
    shortest = f"{LEAST_MILLISECONDS * 1e3:.0f} µs"
    drawn = f"Not drawn: calls with a floor under {shortest}, which measure the launch."
    return ("Both axes are logarithmic; the roofs were measured on this device.", drawn, *measured)


def _described(spots: Sequence[Spot]) -> str:
    told = (
        f"{spot.operation} at {number(spot.intensity)}: ours {number(spot.ours)}"
        + (f", baseline {number(spot.baseline)}" if spot.baseline else "")
        + (f", at most {number(spot.floor)}" if spot.floor else "")
        for spot in spots
    )
    return f"Trillions of operations a second over operations for a byte. {'; '.join(told)}."
