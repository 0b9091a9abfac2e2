"""Scores of two models side by side on the terminal."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from twinrun.foundation.text import percent, plural
from twinrun.report.tables import View, word_columns
from twinrun.results.equivalence import Equivalence, ScoreComparison, ScoreDifference
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text

COLUMNS = ("documents", "A", "B", "B - A", "interval", "A alone", "B alone")
MEANINGS: dict[Equivalence, str] = {
    "equivalent": "Equivalent: the interval of the difference lies inside the margin",
    "different": "Different: the interval of a difference lies outside the margin",
    "undecided": "Undecided: the interval of the difference reaches over the margin",
}


def scores_view(found: ScoreComparison, *, rules: dict[str, str]) -> Group:
    """Return what is shown of two models, with the mean first."""
    return Group(
        Text(headline(found), style="bold"),
        Text(
            f"Mean: B - A is {found.mean.difference:+.4f}, interval {_interval(found.mean)},"
            f" margin {found.margin:g}; inside it from a margin of {found.mean.least_margin:.4f} on.\n"
        ),
        View(scores_table(found, rules=rules)),
    )


def headline(found: ScoreComparison) -> str:
    """Return the outcome in one sentence; a difference names its tasks."""
    apart = [one.task for one in (*found.tasks, found.mean) if one.outcome == "different"]
    named = f": {', '.join(apart)}" if apart else ""
    return f"{MEANINGS[found.outcome]}{named}."


def scores_table(found: ScoreComparison, *, rules: dict[str, str]) -> Table:
    """Return a row for each task and one for their mean."""
    rows = [_row(one, rules.get(one.task, "")) for one in (*found.tasks, found.mean)]
    together, alone = (percent(1 - 2 * found.error_rate / count) for count in (1, len(found.tasks)))
    return Table(
        title=f"Scores on the same {plural(found.mean.documents, 'document')}",
        columns=(
            *word_columns("task"),
            *(Column(title=title) for title in COLUMNS),
            *word_columns("outcome"),
        ),
        rows=tuple(rows),
        notes=(
            f"The interval of the mean holds at {together}, those of tasks at {alone}, together {together}.",
            "`A alone` counts the documents on which A scores higher.",
        ),
    )


def _row(one: ScoreDifference, rule: str) -> tuple[Cell, ...]:
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
