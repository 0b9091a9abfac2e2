"""Pictures of a benchmark: a bar for each published and each measured time of an operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from matplotlib.axes import Axes

from twinrun.claims import Claim, Published
from twinrun.hardware import Gpu
from twinrun.manifest import Frozen
from twinrun.record import BenchRecord, CallRecord, CaseRecord, MeasurementRecord
from twinrun.report.svg import COLOURS, Key, Picture, canvas, svg_text
from twinrun.report.words import hardware, number

Kind = Literal["published", "ours", "baseline", "floor"]
# `published` has its own colour in every picture.
PAINT: dict[Kind, str] = {
    "published": "published",
    "ours": "series-1",
    "baseline": "series-2",
    "floor": "reference",
}
NAMES: dict[Kind, str] = {
    "published": "published",
    "ours": "this recipe's kernels",
    "baseline": "the baseline, in the same process",
    "floor": "least time by what the device was measured to do",
}
INCH_PER_BAR, INCH_AROUND = 0.3, 0.7


class Bar(Frozen):
    """One time; `low` and `high` are the extremes of its repetitions."""

    label: str
    kind: Kind
    value: float
    low: float
    high: float
    detail: str


def operation_bars(
    records: Sequence[BenchRecord], published: Published, gpus: dict[str, Gpu]
) -> Iterator[Picture]:
    """Yield a picture for each operation at the published case that any record has timed."""
    points = dict.fromkeys(claim.point for claim in published.claim if claim.metric == "time" and claim.point)
    for point in points:
        cases = [(record, case) for record in records if (case := record.point(point))]
        timed = [one for _, case in cases for one in case.measurements if one.ours.milliseconds]
        for operation in dict.fromkeys(one.operation for one in timed):
            names = {one.id for one in timed if one.operation == operation}
            claims = [
                one for one in published.claim if (one.point, one.measurement in names) == (point, True)
            ]
            bars = [_published_bar(claim, gpus) for claim in claims]
            for record, case in cases:
                bars += _measured_bars(record, case, operation, several=len(cases) > 1)
            yield _picture(
                bars, f"{operation.capitalize()}, {point}", name=_identifier(f"{point} {operation}")
            )


def _published_bar(claim: Claim, gpus: dict[str, Gpu]) -> Bar:
    assert claim.hardware is not None
    gpu = gpus[claim.hardware.gpu]
    short = gpu.name.rpartition(" ")[2]
    part = f"{short} die" if claim.hardware.devices and gpu.devices_per_card > 1 else short
    return Bar(
        label=f"published, {part}",
        kind="published",
        value=claim.value,
        low=claim.value,
        high=claim.value,
        detail=f"{part}: {claim.hardware.software}",
    )


def _measured_bars(record: BenchRecord, case: CaseRecord, operation: str, *, several: bool) -> Iterator[Bar]:
    where = hardware(record)
    prefix = f"{record.gpu.name.split()[1] if record.gpu else 'here'} " if several else ""
    for one in case.measurements:
        if one.operation != operation or one.way == "call":
            continue
        what = one.element if one.way == "kernels" else f"{one.element}, {one.way}"
        calls: tuple[tuple[Kind, CallRecord | None], ...] = (("ours", one.ours), ("baseline", one.baseline))
        for kind, call in calls:
            if call and call.milliseconds:
                yield _bar(
                    f"{prefix}{'ours' if kind == 'ours' else call.implementation} {what}", kind, call, where
                )
        if one.floor and one.way == "kernels":
            yield _floor_bar(one, f"{prefix}floor {what}")


def _bar(label: str, kind: Kind, call: CallRecord, where: str) -> Bar:
    times = call.milliseconds
    assert times is not None
    return Bar(
        label=label,
        kind=kind,
        value=times.median,
        low=times.low,
        high=times.high,
        detail=f"{call.implementation} {call.version}, {where}; median, lowest to highest of {times.count}",
    )


def _floor_bar(one: MeasurementRecord, label: str) -> Bar:
    assert one.floor is not None
    least = one.floor
    return Bar(
        label=label,
        kind="floor",
        value=least.milliseconds,
        low=least.milliseconds,
        high=least.milliseconds,
        detail=f"{least.formula}, set by {least.ceiling}",
    )


def _picture(bars: Sequence[Bar], title: str, *, name: str) -> Picture:
    with canvas(height=INCH_AROUND + INCH_PER_BAR * len(bars)) as (figure, axes):
        _draw(axes, bars)
        told = "; ".join(f"{bar.kind} {bar.label}: {number(bar.value)} ms" for bar in bars)
        svg = svg_text(figure, name=name, title=title, description=f"Milliseconds, less is better. {told}.")
    keys = tuple(
        Key(
            sign="■",
            colour=PAINT[kind],
            label=NAMES[kind],
            detail="; ".join(dict.fromkeys(bar.detail for bar in bars if bar.kind == kind)),
        )
        for kind in PAINT
        if any(bar.kind == kind for bar in bars)
    )
    return Picture(svg=svg, title=title, keys=keys, notes=("Less is better; the axis is linear from zero.",))


def _draw(axes: Axes, bars: Sequence[Bar]) -> None:
    places = range(len(bars))
    end = max(bar.high for bar in bars)
    axes.barh(
        places, [bar.value for bar in bars], height=0.72, color=[COLOURS[PAINT[bar.kind]] for bar in bars]
    )
    for place, bar in zip(places, bars, strict=True):
        if bar.high > bar.low:
            axes.plot([bar.low, bar.high], [place, place], color=COLOURS["ink"], linewidth=1)
        axes.text(bar.high + 0.015 * end, place, number(bar.value), va="center", fontsize=9)
    axes.set_yticks(list(places), [bar.label for bar in bars], fontsize=9)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, end * 1.16)
    axes.set_xlabel("milliseconds")


def _identifier(text: str) -> str:
    return "bars-" + "".join(letter if letter.isalnum() else "-" for letter in text)
