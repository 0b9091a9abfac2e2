"""Tables for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from twinrun.record import (
    BenchRecord,
    CallRecord,
    CaseRecord,
    MeasurementRecord,
    Outcome,
    PointRecord,
    Record,
    Spread,
    Verdict,
)
from twinrun.report.words import gib, number, outcome, percent, quantity, rate, within
from twinrun.selection import Choice

NAME_COLUMNS = 15
STYLES: dict[Outcome, str] = {"reproduced": "green", "not-reproduced": "bold red", "failed": "bold red"}


def choices_table(choices: Iterable[Choice]) -> Table:
    """Return what a run uses where the user did not say, with the reasons."""
    table = plain_table("", "chosen", "because")
    for choice in choices:
        add_row(table, choice.name, choice.value, choice.because)
    return table


def points_table(record: Record) -> Table:
    """Return the measured numbers of each point, a row each."""
    table = plain_table(
        "point", title="Measured: median of the timed steps, and how far the farthest is from it"
    )
    for heading in ("devices", "micro-\nbatch", "tokens/s\nper device", "model TFLOP/s\nper device", "MFU"):
        table.add_column(heading, justify="right")
    for heading in ("peak memory\nper device", "last loss\nnats/token"):
        table.add_column(heading, justify="right")
    for point in record.points:
        add_row(table, *_cells(point))
    table.caption = Text("\n".join(footnotes(record)), style="dim")
    return table


def measurement_tables(record: BenchRecord) -> Group:
    """Return a table for each case: ours beside the baseline, and beside what the device can do."""
    return Group(*(_measurements(case) for case in record.points))


def verdict_table(verdicts: Sequence[Verdict]) -> Group:
    """Return each claim with what was published, what was measured and the verdict, then the reasons."""
    table = plain_table("claim", "published", "measured", "verdict", title="Claims")
    reasons = plain_table("claim", "reason")
    for item in verdicts:
        published, measured = (quantity(one, item.unit, item.per) for one in (item.published, item.measured))
        verdict = Text(outcome(item), style=STYLES.get(item.outcome, ""))
        add_row(table, item.claim, published, measured, verdict)
        add_row(reasons, item.claim, item.reason)
    # A column of its own would leave the reasons a few letters a line.
    return Group(table, reasons)


def footnotes(record: Record) -> list[str]:
    """Return what the numbers of the points table rest on: formula, peak and its source."""
    formulas = sorted({point.model_flops.formula for point in record.points})
    peaks = {point.utilisation.peak_tflops: point.utilisation for point in record.points if point.utilisation}
    notes = [f"model FLOP/s: {formula}" for formula in formulas]
    notes.extend(
        f"MFU: {one.formula} over {number(peak)} TFLOP/s dense bf16 per {one.peak_per} ({one.peak_source})"
        for peak, one in peaks.items()
    )
    return notes if peaks else [*notes, "MFU: no dense peak is known for this device in this precision"]


def plain_table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table with a line under its head, which pastes well into text."""
    table = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", caption_justify="left", pad_edge=False
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Add cells as they are: names that come from a machine must not be read as markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def _cells(point: PointRecord) -> tuple[str, ...]:
    return (
        point.id,
        str(point.devices),
        str(point.microbatch),
        _rate(point.tokens_per_second),
        _rate(point.model_flops.rate),
        percent(point.utilisation.value) if point.utilisation else "-",
        gib(point.peak_memory_bytes),
        f"{point.losses[-1]:.4f}" if point.losses else "-",
    )


def _measurements(case: CaseRecord) -> Table:
    table = plain_table("measurement", title=f"{case.id}: medians of one device, in ms")
    for heading in ("ours", "baseline", "ratio", "GB/s,\nof a copy", "floor,\nof floor", "error"):
        table.add_column(heading, justify="right")
    for one in case.measurements:
        # Names have no spaces, and a terminal of 80 columns has not the room for the longest.
        add_row(table, "\n".join(textwrap.wrap(one.id, NAME_COLUMNS)), *_measured_cells(one))
    table.caption = Text("\n".join(bench_footnotes(case)), style="dim")
    return table


def bench_footnotes(case: CaseRecord) -> list[str]:
    """Return what the numbers of a case rest on: implementations, and the ceilings of its device."""
    calls = [call for one in case.measurements for call in (one.ours, one.baseline) if call]
    names = dict.fromkeys(f"{call.implementation} {call.version}" for call in calls)
    absent = dict.fromkeys(
        f"no baseline: {one.baseline_absent}" for one in case.measurements if one.baseline_absent
    )
    return [", ".join(names), *absent, *(f"{one.id}: {rate(one)}, {one.what}" for one in case.ceilings)]


def _measured_cells(one: MeasurementRecord) -> tuple[str, ...]:
    speed, least = one.gigabytes_per_second, one.floor
    return (
        milliseconds(one.ours),
        milliseconds(one.baseline),
        f"{one.ratio:.2f}" if one.ratio else "-",
        _share(number(speed) if speed else None, one.copy_share),
        _share(f"{number(least.milliseconds)} {least.ceiling}" if least else None, one.floor_share),
        "-" if one.ours.error is None else f"{one.ours.error:.1g}",
    )


def _share(value: str | None, share: float | None) -> str:
    """Return a value, and below it its share of what is possible, as far as they are known."""
    return "\n".join(filter(None, (value or "-", percent(share) if share else "")))


def milliseconds(call: CallRecord | None) -> str:
    """Return the median time of a call with its spread, a dash where it was not timed."""
    return _rate(call.milliseconds) if call and call.milliseconds else "-"


def _rate(measured: Spread) -> str:
    return f"{number(measured.median)}\n{within(measured)}"
