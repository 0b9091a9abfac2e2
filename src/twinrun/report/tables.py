"""Tables of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from twinrun.report.layout import HARD_SPACE, Line, lines
from twinrun.report.words import measured_value, outcome, published_neutral, published_value
from twinrun.results.record import Record
from twinrun.results.verdicts import FAILURES, Outcome, Verdict
from twinrun.workloads.tables import Cell, Column, Table, text

STYLES: dict[Outcome, str] = {"reproduced": "green", "holds-here": "green"}
STYLES |= dict.fromkeys(FAILURES, "bold red")


class View:
    """A table as wide as what it is printed on."""

    def __init__(
        self, table: Table, *, below: Sequence[str] = (), styles: dict[str, str] | None = None
    ) -> None:
        """Take a table, a text below each row, and the styles of phrases."""
        self._table, self._below, self._styles = table, below, styles or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the table."""
        for line in lines(self._table, room=options.max_width, below=self._below):
            yield self._styled(line)

    def _styled(self, line: Line) -> Text:
        # Text as it is: names that come from a machine must not be read as markup.
        shown = Text(line.text, style=line.style, no_wrap=True, overflow="ignore")
        for phrase, style in self._styles.items():
            shown.highlight_words([phrase], style)
        return shown


def record_tables(record: Record) -> Group:
    """Return the measured numbers of a record."""
    return Group(*(View(table) for table in record.workload.point_tables(record.shown())))


def verdict_table(verdicts: Sequence[Verdict]) -> View:
    """Return each claim with what was published, what was found here and the verdict, the reason below."""
    rows = tuple(
        (
            text(one.claim),
            text(published_value(one), published_neutral(one)),
            text(measured_value(one)),
            text(_whole(outcome(one))),
        )
        for one in verdicts
    )
    styles = {outcome(one): STYLES[one.final] for one in verdicts if one.final in STYLES}
    table = _words("Claims", ("claim", "published", "here", "verdict"), rows)
    return View(table, below=[f"Why: {one.why}" for one in verdicts], styles=styles)


def word_columns(*titles: str) -> tuple[Column, ...]:
    """Return columns of words."""
    return tuple(Column(title=title, numeric=False) for title in titles)


def _words(title: str, columns: Sequence[str], rows: tuple[tuple[Cell, ...], ...]) -> Table:
    return Table(title=title, columns=word_columns(*columns), rows=rows)


def _whole(phrase: str) -> str:
    return phrase.replace(" ", HARD_SPACE)
