"""Pages of a bisection and of a history: the answer, its pictures, and every number behind them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from twinrun.foundation.text import duration, number, plural
from twinrun.history.bisect import BisectRecord, SearchStage
from twinrun.history.series import StackSeries
from twinrun.report.charts import draw_lines
from twinrun.report.page import render_page
from twinrun.workloads.tables_and_charts import (
    Cell,
    Column,
    Curve,
    LineChart,
    Spot,
    Table,
    text,
    word_columns,
)


def write_bisect_page(path: Path, record: BisectRecord) -> Path:
    """Write the page of a bisection: sentence, posterior and both populations; raises MachineError."""
    charts = [_populations(record), *(_posterior(stage, at) for at, stage in enumerate(record.searches))]
    tables = [_path_table(stage) for stage in record.searches] + [_runs_table(record)]
    notes = [f"Not bisected: {one}." for one in record.fixed]
    notes += [f"Skipped: {one}" for one in record.refused.values()]
    subtitle = f"{record.recipe}: {record.good} against {record.bad}"
    return _write(path, ("Bisection", subtitle, record.sentence), charts, tables, notes)


def write_history_page(path: Path, recipe: str, found: Sequence[StackSeries]) -> Path:
    """Write the page of a recipe's series; raises MachineError."""
    charts = [_series_chart(one, at) for at, one in enumerate(found) if len(one.points) > 1]
    headline = f"{plural(sum(len(one.changes) for one in found), 'change')} in {len(found)} series"
    return _write(path, ("History", recipe, headline), charts, [history_table(found)], ())


def history_table(found: Sequence[StackSeries]) -> Table:
    """Return a row for each stack of each series of several stacks; the others are counted."""
    columns = (*word_columns("series", "stack", "first run"), Column(title="value"), Column(title="runs"))
    rows = []
    several = [one for one in found if len(one.points) > 1]
    for one in several:
        for place, point in enumerate(one.points):
            change = next((found for found in one.changes if found.place == place), None)
            rows.append(
                (
                    text("" if place else one.name, "" if place else one.noise_in_words),
                    text(point.stack, point.digest[:12]),
                    text(point.first[:10]),
                    Cell(
                        text=f"{number(point.mean)} {one.unit}",
                        detail=change.effect_in_words if change else "",
                    ),
                    Cell(text=str(len(point.values))),
                )
            )
    alone = f"{len(found) - len(several)} further series have one stack alone"
    return Table(title="A row for each stack", columns=columns, rows=tuple(rows), notes=(alone,))


def _write(
    path: Path,
    heads: tuple[str, str, str],
    charts: Sequence[LineChart],
    tables: Sequence[Table],
    notes: Sequence[str],
) -> Path:
    return render_page(
        path,
        "history.html.j2",
        title=heads[0],
        headline=heads[2],
        subtitle=heads[1],
        pictures=[draw_lines(chart) for chart in charts],
        tables=tables,
        notes=notes,
    )


def _populations(record: BisectRecord) -> LineChart:
    """Return the runs of both ends, and of the confirming neighbours, one beside another."""
    groups = [("good end", record.ends.good), ("bad end", record.ends.bad)]
    if record.culprits and record.culprits[0].before:
        groups += [("before the change", record.culprits[0].before), ("after it", record.culprits[0].after)]
    return LineChart(
        name="populations",
        title="Runs of both sides",
        x_label="run",
        x_scale="linear",
        y_label=record.unit,
        y_scale="linear",
        curves=tuple(
            _curve(label, place, enumerate(values, start=1)) for place, (label, values) in enumerate(groups)
        ),
    )


def _posterior(stage: SearchStage, place: int) -> LineChart:
    """Return how probable each step was at the beginning, halfway and at the end."""
    begin = tuple(1 / len(stage.steps) for _ in stage.steps)
    middle = stage.trace[len(stage.trace) // 2][1] if len(stage.trace) > 2 else None
    shown = [("before any run", begin), *([("halfway", middle)] if middle else [])]
    shown.append((f"after {len(stage.trace)} runs", stage.posterior))
    return LineChart(
        name=f"posterior-{place}",
        title="Where the change is" if place == 0 else "Where it is inside that step",
        x_label="step",
        x_scale="linear",
        y_label="probability",
        y_scale="share",
        curves=tuple(
            _curve(label, at, enumerate(values, start=1)) for at, (label, values) in enumerate(shown)
        ),
    )


def _series_chart(one: StackSeries, place: int) -> LineChart:
    spots = tuple(
        Spot(x=float(at), value=point.mean, low=min(point.values), high=max(point.values))
        for at, point in enumerate(one.points, start=1)
    )
    marked = tuple(spots[change.place] for change in one.changes)
    curves = [Curve(label="mean of each stack", kind="measured", place=0, spots=spots)]
    if marked:
        curves.append(Curve(label="more than the noise", kind="reference", place=0, spots=marked))
    return LineChart(
        name=f"series-{place}",
        title=one.name,
        x_label="stack, in the order of their first runs",
        x_scale="linear",
        y_label=f"{one.metric}, {one.unit}",
        y_scale="linear",
        curves=tuple(curves),
        notes=(one.noise_in_words, *(change.effect_in_words for change in one.changes)),
    )


def _curve(label: str, place: int, values: Iterable[tuple[int, float]]) -> Curve:
    spots = tuple(Spot(x=float(at), value=value, low=value, high=value) for at, value in values)
    return Curve(label=label, kind="measured", place=place, spots=spots)


def _path_table(stage: SearchStage) -> Table:
    measured = [label for label, _ in stage.trace]
    rows = (
        (text(label), Cell(text=f"{share:.1%}"), Cell(text=str(measured.count(label))))
        for label, share in zip(stage.steps, stage.posterior, strict=True)
    )
    columns = (*word_columns("step"), Column(title="probability"), Column(title="runs after it"))
    return Table(title="The path", columns=columns, rows=tuple(rows))


def _runs_table(record: BisectRecord) -> Table:
    rows = tuple(
        (
            text(str(place)),
            text(run.purpose),
            text(run.position, run.run or ""),
            Cell(text=number(run.value) if run.value is not None else run.outcome),
            Cell(text=duration(run.seconds)),
        )
        for place, run in enumerate(record.runs, start=1)
    )
    columns = (*word_columns("run", "purpose", "state"), Column(title=record.unit), Column(title="took"))
    return Table(title="Every run", columns=columns, rows=rows)
