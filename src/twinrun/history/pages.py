"""Pages of a bisection and of a history: the answer, its pictures, and every number behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinrun.foundation.text import duration, number, plural
from twinrun.history.bisect import BisectRecord
from twinrun.history.series import StackSeries
from twinrun.report.charts import draw_lines
from twinrun.report.page import render_page
from twinrun.workloads import tables_and_charts as drawn
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns

_PAGE = "history.html.j2"


def write_bisect_page(path: Path, record: BisectRecord) -> Path:
    """Write the page of a bisection: sentence and runs; raises MachineError."""
    notes = [f"Not bisected: {one}." for one in record.fixed]
    notes += [f"Skipped: {one}" for one in record.refused.values()]
    heads = {"title": "Bisection", "subtitle": f"{record.subject}: {record.good} against {record.bad}"}
    runs = [_runs_table(record)]
    return render_page(path, _PAGE, **heads, headline=record.sentence, pictures=[], tables=runs, notes=notes)


def write_history_page(path: Path, recipe: str, found: Sequence[StackSeries]) -> Path:
    """Write the page of a recipe's series; raises MachineError."""
    pictures = [draw_lines(_series_chart(one, at)) for at, one in enumerate(found) if len(one.points) > 1]
    headline = f"{plural(sum(len(one.changes) for one in found), 'change')} in {len(found)} series"
    heads = {"title": "History", "subtitle": recipe, "headline": headline}
    return render_page(path, _PAGE, **heads, pictures=pictures, tables=[history_table(found)], notes=())


def history_table(found: Sequence[StackSeries]) -> Table:
    """Return a row for each stack of each series of several stacks; the others are counted."""
    several = [one for one in found if len(one.points) > 1]
    rows = []
    for one in several:
        changed = {change.place: change.effect_in_words for change in one.changes}
        for place, point in enumerate(one.points):
            value = Cell(text=f"{number(point.mean)} {one.unit}", detail=changed.get(place, ""))
            stack, first = text(point.stack, point.digest[:12]), text(point.first[:10])
            heading = text("") if place else text(one.name, one.noise_in_words)
            rows.append((heading, stack, first, value, Cell(text=str(len(point.values)))))
    columns = (*word_columns("series", "stack", "first run"), Column(title="value"), Column(title="runs"))
    alone = f"{len(found) - len(several)} further series have one stack alone"
    return Table(title="A row for each stack", columns=columns, rows=tuple(rows), notes=(alone,))


def _series_chart(one: StackSeries, place: int) -> drawn.LineChart:
    spots = tuple(
        drawn.Spot(x=float(at), value=point.mean, low=min(point.values), high=max(point.values))
        for at, point in enumerate(one.points, start=1)
    )
    marked = tuple(spots[change.place] for change in one.changes)
    curves = [drawn.Curve(label="mean of each stack", kind="measured", place=0, spots=spots)]
    if marked:
        curves.append(drawn.Curve(label="more than the noise", kind="reference", place=0, spots=marked))
    return drawn.LineChart(
        name=f"series-{place}",
        title=one.name,
        x_label="stack, in the order of their first runs",
        x_scale="linear",
        y_label=f"{one.metric}, {one.unit}",
        y_scale="linear",
        curves=tuple(curves),
        notes=(one.noise_in_words, *(change.effect_in_words for change in one.changes)),
    )


def _runs_table(record: BisectRecord) -> Table:
    rows = tuple(
        (
            text(str(place)),
            text(run.purpose),
            text(run.position, run.record or ""),
            Cell(text=number(run.value) if run.value is not None else run.outcome),
            Cell(text=duration(run.seconds)),
        )
        for place, run in enumerate(record.runs, start=1)
    )
    columns = (*word_columns("run", "purpose", "state"), Column(title=record.unit), Column(title="took"))
    return Table(title="Every run", columns=columns, rows=rows)
