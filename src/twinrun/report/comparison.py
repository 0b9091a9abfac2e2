"""Two records side by side: their settings and numbers, their scores, their curves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from twinrun.foundation.text import number, percent, plural
from twinrun.manifests.metrics import RATIO
from twinrun.report.charts import draw
from twinrun.report.page import render_page
from twinrun.report.tables import View
from twinrun.results.compare import Comparison, MeasurementPair, SeriesDistance
from twinrun.results.equivalence import Equivalence, ScoreComparison, ScoreDifference
from twinrun.results.factors import SettingChange
from twinrun.results.judged import Judged
from twinrun.results.parity import METRIC, CurveParity
from twinrun.workloads.curve_charts import parity_charts
from twinrun.workloads.curve_distance import CurveOutcome
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns

# The first characters tell hashes apart; the JSON has all of them.
HASH = re.compile(r"[0-9a-f]{40,}")


def comparison_view(comparison: Comparison) -> Group:
    """Return the summary, the measurements side by side, the series and the ranked differences."""
    found = comparison.differences
    return Group(
        Text(comparison.summary, style="bold"),
        Text(f"A: {comparison.run_a}, record {comparison.sha256_a[:12]}"),
        Text(f"B: {comparison.run_b}, record {comparison.sha256_b[:12]}"),
        Text(f"points compared: {comparison.pairing}\n"),
        *(View(table) for table in pairs_tables(comparison)),
        *([View(series_table(comparison.series))] if comparison.series else []),
        View(differences_table(found), below=[f"{one.name}: {one.because}" for one in found])
        if found
        else Text("No recorded circumstance differs."),
    )


def pairs_tables(comparison: Comparison) -> list[Table]:
    """Return a table for each pair of points, with a row for each measurement that both have."""
    points = dict.fromkeys(_points(pair) for pair in comparison.pairs)
    return [_pairs_table(name, [one for one in comparison.pairs if _points(one) == name]) for name in points]


def _pairs_table(name: str, pairs: Sequence[MeasurementPair]) -> Table:
    titles = ("A", "B", "B times as good")
    return Table(
        title=f"{name}: medians",
        columns=(*word_columns("measurement"), *(Column(title=title) for title in titles)),
        rows=tuple(_row(pair) for pair in pairs),
        notes=tuple(dict.fromkeys(pair.formula for pair in pairs if pair.formula)),
    )


def _row(pair: MeasurementPair) -> tuple[Cell, ...]:
    counted = "" if pair.unit == RATIO else f"{pair.unit}{'' if pair.per == 'run' else f' per {pair.per}'}"
    return (text(pair.measurement, counted), text(number(pair.a)), text(number(pair.b)), _moved(pair))


def _moved(pair: MeasurementPair) -> Cell:
    """Return how many times as good B is; of a loss how much it is more; of two experiments why neither."""
    if pair.obstacles:
        return text("not compared", ", ".join(one.partition(" ")[0] for one in pair.obstacles))
    if pair.gain is None:
        return text("-" if pair.difference is None else f"{pair.difference:+.3g} (B - A)")
    return text(f"{pair.gain.times:.3f}", "within spread" if pair.within_spread else "")


def series_table(series: Sequence[SeriesDistance]) -> Table:
    """Return how far the series of each pair of points are apart."""
    rows = tuple((text(_points(one)), text(one.metric), text(_apart(one)), text(one.note)) for one in series)
    return Table(
        title="Series", columns=word_columns("point", "series", "largest distance", "note"), rows=rows
    )


def differences_table(differences: Sequence[SettingChange]) -> Table:
    """Return what differs, largest likely effect on speed first."""
    rows = tuple(
        tuple(
            text(one) for one in (found.name, _short(found.a), _short(found.b), found.speed, found.numerics)
        )
        for found in differences
    )
    columns = word_columns("differs", "A", "B", "speed", "numerics")
    return Table(
        title="Differences, by their likely effect on speed and numerics", columns=columns, rows=rows
    )


def _points(pair: MeasurementPair | SeriesDistance) -> str:
    return pair.point_a if pair.point_a == pair.point_b else f"{pair.point_a} and {pair.point_b}"


def _apart(one: SeriesDistance) -> str:
    if one.value is None:
        return "-"
    return (
        f"{one.value:.2g} at step {one.step} of {one.steps}" if one.value else f"equal in {one.steps} steps"
    )


def _short(value: str) -> str:
    return HASH.sub(lambda found: f"{found[0][:12]}...", value)


SCORE_COLUMNS = ("documents", "A", "B", "B - A", "interval", "A alone", "B alone")
MEANINGS: dict[Equivalence, str] = {
    "equivalent": "Equivalent: the interval of the difference lies inside the margin",
    "different": "Different: the interval of a difference lies outside the margin",
    "undecided": "Undecided: the interval of the difference reaches over the margin",
}


def scores_view(found: ScoreComparison, *, rules: dict[str, str]) -> Group:
    """Return what is shown of two models, with the mean first."""
    return Group(
        Text(scores_in_words(found), style="bold"),
        Text(
            f"Mean: B - A is {found.mean.difference:+.4f}, interval {_interval(found.mean)},"
            f" margin {found.margin:g}; inside it from a margin of {found.mean.least_margin:.4f} on.\n"
        ),
        View(scores_table(found, rules=rules)),
    )


def scores_in_words(found: ScoreComparison) -> str:
    """Return the outcome in one sentence; a difference names its tasks."""
    apart = [one.task for one in (*found.tasks, found.mean) if one.outcome == "different"]
    named = f": {', '.join(apart)}" if apart else ""
    return f"{MEANINGS[found.outcome]}{named}."


def scores_table(found: ScoreComparison, *, rules: dict[str, str]) -> Table:
    """Return a row for each task and one for their mean."""
    rows = [_score_row(one, rules.get(one.task, "")) for one in (*found.tasks, found.mean)]
    together, alone = (percent(1 - 2 * found.error_rate / count) for count in (1, len(found.tasks)))
    return Table(
        title=f"Scores on the same {plural(found.mean.documents, 'document')}",
        columns=(
            *word_columns("task"),
            *(Column(title=title) for title in SCORE_COLUMNS),
            *word_columns("outcome"),
        ),
        rows=tuple(rows),
        notes=(
            f"The interval of the mean holds at {together}, those of tasks at {alone}, together {together}.",
            "`A alone` counts the documents on which A scores higher.",
        ),
    )


def _score_row(one: ScoreDifference, rule: str) -> tuple[Cell, ...]:
    return (
        text(one.task, rule),
        text(f"{one.documents:,}"),
        text(f"{one.a:.4f}"),
        text(f"{one.b:.4f}"),
        text(f"{one.difference:+.4f}"),
        text(_interval(one)),
        text(f"{one.a_better:,}"),
        text(f"{one.b_better:,}"),
        text(one.outcome),
    )


def _interval(one: ScoreDifference) -> str:
    return f"{one.low:+.4f} to {one.high:+.4f}"


HEADLINES: dict[CurveOutcome, str] = {
    "inside": "One curve: no farther apart than control runs",
    "outside": "Two curves: farther apart than control runs, though they start as one",
    "start": "Two curves from the first step on",
    "other-run": "Two experiments, whose curves need not coincide",
    "no-envelope": "Not decided: no envelope tells rounding from more",
    "no-evidence": "Not decided: the curves show no training that could differ",
}
TONES: dict[CurveOutcome, str] = {"inside": "good", "outside": "bad", "start": "bad"}
PARITY_COLUMNS = ("over", "largest difference", "at step", "envelope", "control runs")


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
    return Table(title="Relative differences", columns=word_columns(*PARITY_COLUMNS), rows=rows)


def write_parity_page(path: Path, found: Sequence[CurveParity], *, a: Judged, b: Judged) -> None:
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
    render_page(path, "parity.html.j2", sections=sections, records=[a, b])
