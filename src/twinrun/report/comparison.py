"""Two records side by side: their settings and numbers, their scores, their curves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from twinrun.foundation.text import number, percent, plural
from twinrun.manifests.metrics import RATIO
from twinrun.protocol.scores import Equivalence, ScoreComparison, ScoreDifference
from twinrun.report.charts import draw
from twinrun.report.page import render_page
from twinrun.report.tables import View
from twinrun.results.compare import Comparison, MeasurementPair, SettingChange
from twinrun.results.judged import Judged
from twinrun.results.parity import CurveParity
from twinrun.workloads.curve_distance import CurveOutcome, parity_charts
from twinrun.workloads.tables_and_charts import Cell, Table, number_columns, text, word_columns, word_table

# The first characters tell hashes apart; the JSON has all of them.
HASH = re.compile(r"([0-9a-f]{12})[0-9a-f]{28,}")


def comparison_view(comparison: Comparison) -> Group:
    """Return the summary, the measurements side by side and the ranked differences."""
    found = comparison.differences
    reasons = [f"{one.name}: {one.because}" for one in found]
    return Group(
        Text(comparison.summary, style="bold"),
        Text(f"A: {comparison.run_a}, record {comparison.sha256_a[:12]}"),
        Text(f"B: {comparison.run_b}, record {comparison.sha256_b[:12]}"),
        Text(f"points compared: {comparison.pairing}\n"),
        *(View(table) for table in pairs_tables(comparison)),
        View(differences_table(found), below=reasons) if found else Text("No recorded circumstance differs."),
    )


def pairs_tables(comparison: Comparison) -> Iterator[Table]:
    """Yield a table for each pair of points, with a row for each measurement that both have."""
    columns = (*word_columns("measurement"), *number_columns("A", "B", "B times as good"))
    for (a, b), found in groupby(comparison.pairs, lambda one: (one.point_a, one.point_b)):
        pairs = list(found)
        notes = tuple(dict.fromkeys(pair.formula for pair in pairs if pair.formula))
        title = f"{a if a == b else f'{a} and {b}'}: medians"
        yield Table(title=title, columns=columns, rows=tuple(map(_row, pairs)), notes=notes)


def _row(pair: MeasurementPair) -> tuple[Cell, ...]:
    """Return a measurement of both, and how many times as good B is; of a loss how much it is more."""
    counted = "" if pair.unit == RATIO else f"{pair.unit}{'' if pair.per == 'run' else f' per {pair.per}'}"
    if pair.obstacles:
        moved = text("not compared", ", ".join(one.partition(" ")[0] for one in pair.obstacles))
    elif pair.gain is None:
        moved = text("-" if pair.difference is None else f"{pair.difference:+.3g} (B - A)")
    else:
        moved = text(f"{pair.gain.times:.3f}", "within spread" if pair.within_spread else "")
    return (text(pair.measurement, counted), text(number(pair.a)), text(number(pair.b)), moved)


def differences_table(differences: Sequence[SettingChange]) -> Table:
    """Return what differs, largest likely effect on speed first."""
    rows = ((one.name, _short(one.a), _short(one.b), one.speed, one.numerics) for one in differences)
    heads = ("differs", "A", "B", "speed", "numerics")
    return word_table("Differences, by their likely effect on speed and numerics", heads, rows)


def _short(value: str) -> str:
    return HASH.sub(r"\1...", value)


SCORE_COLUMNS = ("documents", "A", "B", "B - A", "interval", "A alone", "B alone")
MEANINGS: dict[Equivalence, str] = {
    "equivalent": "Equivalent: the interval of the difference lies inside the margin",
    "different": "Different: the interval of a difference lies outside the margin",
    "undecided": "Undecided: the interval of the difference reaches over the margin",
}


def scores_view(found: ScoreComparison, *, rules: dict[str, str]) -> Group:
    """Return what is shown of two models, with the mean first."""
    mean = found.mean
    return Group(
        Text(scores_in_words(found), style="bold"),
        Text(
            f"Mean: B - A is {mean.difference:+.4f}, interval {_interval(mean)},"
            f" margin {found.margin:g}; inside it from a margin of {mean.least_margin:.4f} on.\n"
        ),
        View(scores_table(found, rules=rules)),
    )


def scores_in_words(found: ScoreComparison) -> str:
    """Return the outcome in one sentence; a difference names its tasks."""
    apart = [one.task for one in (*found.tasks, found.mean) if one.outcome == "different"]
    return f"{MEANINGS[found.outcome]}{': ' if apart else ''}{', '.join(apart)}."


def scores_table(found: ScoreComparison, *, rules: dict[str, str]) -> Table:
    """Return a row for each task and one for their mean."""
    together, alone = (percent(1 - 2 * found.error_rate / count) for count in (1, len(found.tasks)))
    return Table(
        title=f"Scores on the same {plural(found.mean.documents, 'document')}",
        columns=(*word_columns("task"), *number_columns(*SCORE_COLUMNS), *word_columns("outcome")),
        rows=tuple(_score_row(one, rules.get(one.task, "")) for one in (*found.tasks, found.mean)),
        notes=(
            f"The interval of the mean holds at {together}, those of tasks at {alone}, together {together}.",
            "`A alone` counts the documents on which A scores higher.",
        ),
    )


def _score_row(one: ScoreDifference, rule: str) -> tuple[Cell, ...]:
    numbers = (f"{one.documents:,}", f"{one.a:.4f}", f"{one.b:.4f}", f"{one.difference:+.4f}", _interval(one))
    counts = (f"{one.a_better:,}", f"{one.b_better:,}", one.outcome)
    return (text(one.task, rule), *map(text, (*numbers, *counts)))


def _interval(one: ScoreDifference) -> str:
    return f"{one.low:+.4f} to {one.high:+.4f}"


# What each outcome of two curves means, and the colour of its sentence.
HEADLINES: dict[CurveOutcome, tuple[str, str]] = {
    "inside": ("One curve: no farther apart than control runs", "good"),
    "outside": ("Two curves: farther apart than control runs, though they start as one", "bad"),
    "start": ("Two curves from the first step on", "bad"),
    "other-run": ("Two experiments, whose curves need not coincide", ""),
    "no-envelope": ("Not decided: no envelope tells rounding from more", ""),
    "no-evidence": ("Not decided: the curves show no training that could differ", ""),
}


def parity_view(found: Sequence[CurveParity]) -> Group:
    """Return the verdict on each pair of curves, and its windows."""
    parts: list[RenderableType] = []
    for one in found:
        parts.append(Text(HEADLINES[one.parity.outcome][0], style="bold"))
        parts.append(Text(f"{one.b.name} against {one.a.name}: {one.parity.reason}\n"))
        parts += [View(windows_table(one))] if one.parity.windows else []
    return Group(*parts)


def windows_table(held: CurveParity) -> Table:
    """Return a row for the whole curve and one for its first steps."""
    rows = (
        (
            *(f"{one.name}, {one.steps}", f"{one.distance:.2g}", str(one.step), f"{one.envelope:.2g}"),
            f"{min(one.controls):.2g} to {max(one.controls):.2g}",
        )
        for one in held.parity.windows
    )
    heads = ("over", "largest difference", "at step", "envelope", "control runs")
    return word_table("Relative differences", heads, rows)


def write_parity_page(path: Path, found: Sequence[CurveParity], *, a: Judged, b: Judged) -> None:
    """Write a page with each pair of curves, their difference and the envelope; raises MachineError."""
    sections = [
        {
            "held": one,
            "headline": HEADLINES[one.parity.outcome],
            "table": windows_table(one) if one.parity.windows else None,
            "pictures": [draw(chart) for chart in parity_charts(one.parity, one.a, one.b)],
        }
        for one in found
    ]
    render_page(path, "parity.html.j2", sections=sections, records=[a, b])
