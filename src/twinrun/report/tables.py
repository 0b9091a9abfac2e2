"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from twinrun.record import Outcome, PointRecord, Record, Spread, Verdict
from twinrun.report.words import gib, number, outcome, percent, quantity, within
from twinrun.selection import Choice

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


def _rate(rate: Spread) -> str:
    return f"{number(rate.median)}\n{within(rate)}"
