"""Two curves held against each other: on the terminal, and as a page with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from twinrun.foundation.files import write_atomically
from twinrun.report.drawing import draw
from twinrun.report.page import page_environment
from twinrun.report.tables import View, word_columns
from twinrun.results.parity import METRIC, CurveParity
from twinrun.results.record import Record
from twinrun.workloads.curve_charts import parity_charts
from twinrun.workloads.parity import CurveOutcome
from twinrun.workloads.tables_and_charts import Table, text

HEADLINES: dict[CurveOutcome, str] = {
    "inside": "One curve: no farther apart than control runs",
    "outside": "Two curves: farther apart than control runs, though they start as one",
    "start": "Two curves from the first step on",
    "other-run": "Two experiments, whose curves need not coincide",
    "no-envelope": "Not decided: no envelope tells rounding from more",
    "no-evidence": "Not decided: the curves show no training that could differ",
}
TONES: dict[CurveOutcome, str] = {"inside": "good", "outside": "bad", "start": "bad"}
COLUMNS = ("over", "largest difference", "at step", "envelope", "control runs")


def parity_view(found: Sequence[CurveParity]) -> Group:
    """Return the verdict on each pair of curves, and its windows."""
    parts: list[RenderableType] = []
    for one in found:
        parts += [
            Text(HEADLINES[one.parity.outcome], style="bold"),
            Text(f"{one.b.name} against {one.a.name}: {one.parity.reason}\n"),
            *([View(windows_table(one))] if one.parity.windows else []),
        ]
    return Group(*parts)


def windows_table(held: CurveParity) -> Table:
    """Return a row for the whole curve and one for its first steps."""
    rows = tuple(
        (
            text(f"{window.name}, {window.steps}"),
            text(f"{window.distance:.2g}"),
            text(str(window.step)),
            text(f"{window.envelope:.2g}"),
            text(f"{min(window.controls):.2g} to {max(window.controls):.2g}"),
        )
        for window in held.parity.windows
    )
    return Table(title="Relative differences", columns=word_columns(*COLUMNS), rows=rows)


def write_parity_page(path: Path, found: Sequence[CurveParity], *, a: Record, b: Record) -> None:
    """Write a page with each pair of curves, their difference and the envelope; raises MachineError."""
    sections = [
        {
            "held": one,
            "headline": HEADLINES[one.parity.outcome],
            "tone": TONES.get(one.parity.outcome, ""),
            "table": windows_table(one) if one.parity.windows else None,
            "pictures": [
                draw(chart)
                for chart in parity_charts(
                    one.parity, one.a, one.b, metric=METRIC, label=f"{METRIC}, nats/token"
                )
            ],
        }
        for one in found
    ]
    template = page_environment().get_template("parity.html.j2")
    write_atomically(path, template.render(sections=sections, records=[a, b]))
