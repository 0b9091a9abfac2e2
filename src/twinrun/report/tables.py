"""Tables of the terminal, laid out by rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from twinrun.report import words
from twinrun.results.finished_run import FinishedRun
from twinrun.results.verdicts import FAILURES, Outcome, Verdict
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns

STYLES: dict[Outcome, str] = {"reproduced": "green", "holds-here": "green"}
STYLES |= dict.fromkeys(FAILURES, "bold red")
# Columns between two columns of a table.
GAP = 2
VERDICT = Column(title="verdict", numeric=False, whole=True)


class View:
    """A table as wide as what it is printed on: no word is broken, and nothing is cut off."""

    def __init__(
        self, table: Table, *, below: Sequence[str] = (), styles: Mapping[str, str] | None = None
    ) -> None:
        """Take a table, a text below each row, and the styles of cells by their text."""
        self._table, self._below, self._styles = table, below, styles or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, the columns that fit beside each other, then the rest, and the notes."""
        room, table = options.max_width, self._table
        measured = [_measured(console, options, table, place) for place in range(len(table.columns))]
        shared = parts([one.minimum for one in measured], room)
        if table.title:
            yield Text(table.title, style="bold")
        for part in shared:
            widths = widened([measured[place] for place in part], room)
            yield from self._part(part, widths, self._below if part == shared[-1] else ())
        yield from (_indented(note) for note in table.notes)
        yield Text("")

    def _part(self, part: Sequence[int], widths: Sequence[int], below: Sequence[str]) -> RenderResult:
        columns = [self._table.columns[place] for place in part]
        yield _line(columns, widths, [Text(words.heading(one.title), style="bold") for one in columns])
        yield Text("─" * _total(widths))
        for row, under in zip_longest(self._table.rows, below):
            yield _line(columns, widths, [self._shown(row[place]) for place in part])
            if under:
                yield _indented(under)

    def _shown(self, cell: Cell) -> Text:
        # Names that come from a machine must not be read as markup.
        lines = [Text(cell.text, style=self._styles.get(cell.text, "")), Text(cell.detail)]
        return Text("\n").join(line for line in lines if line.plain)


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[Text]) -> Grid:
    """Return one row of cells, each wrapped in its column."""
    grid, row = Grid.grid(), list[Text]()
    for column, width, cell in zip(columns, widths, cells, strict=True):
        if row:
            grid.add_column(width=GAP)
            row.append(Text(""))
        grid.add_column(justify="right" if column.numeric else "left", width=width, overflow="fold")
        row.append(cell)
    grid.add_row(*row)
    return grid


def _indented(text: str) -> Padding:
    return Padding(Text(text, style="dim"), (0, 0, 0, 2))


def _measured(console: Console, options: ConsoleOptions, table: Table, place: int) -> Measurement:
    """Return the least and the natural width of a column; a text that stays whole has its own."""
    column = table.columns[place]
    texts = [Text(text) for row in table.rows for text in (row[place].text, row[place].detail)]
    sizes = [Measurement.get(console, options, text) for text in texts]
    head = Measurement.get(console, options, Text(words.heading(column.title)))
    natural = max([head.maximum, *(one.maximum for one in sizes)])
    whole = column.numeric or column.whole
    least = max([head.minimum, *(one.maximum if whole else one.minimum for one in sizes)])
    return Measurement(least, natural)


def parts(least: Sequence[int], room: int) -> list[list[int]]:
    """Return which columns stand side by side; the first, which names the row, leads every part."""
    found: list[list[int]] = [[0]]
    for place in range(1, len(least)):
        if len(found[-1]) > 1 and _total([least[one] for one in (*found[-1], place)]) > room:
            found.append([0])
        found[-1].append(place)
    return found


def widened(columns: Sequence[Measurement], room: int) -> list[int]:
    """Return widths that use the room, the column that lacks most served first."""
    widths = [min(one.minimum, room) for one in columns]
    while _total(widths) < room:
        lacks = [one.maximum - width for one, width in zip(columns, widths, strict=True)]
        if max(lacks) <= 0:
            break
        widths[lacks.index(max(lacks))] += 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def run_tables(run: FinishedRun) -> Group:
    """Return the measured numbers of a run and, where no claim was judged, what was published beside them."""
    beside = None if run.record.verdicts else run.overview.beside
    shown = (*run.workload.show(run.view), *([beside] if beside else []))
    return Group(*(View(table) for table in shown))


def condition_table(verdict: Verdict) -> View:
    """Return each condition of a verdict with what was seen."""
    rows = tuple(tuple(text(cell) for cell in row) for row in words.shown_conditions(verdict))
    columns = word_columns("met", "condition", "seen")
    return View(Table(title=f"Conditions of {verdict.claim}", columns=columns, rows=rows))


def verdict_table(verdicts: Sequence[Verdict]) -> View:
    """Return each verdict with its claim, the published value and the one found here, the reason below."""
    ordered = sorted(verdicts, key=lambda one: list(words.SIGNS).index(one.final))
    rows = tuple(
        (
            text(words.outcome(one)),
            text(one.claim),
            text(words.published_value(one), words.published_neutral(one)),
            text(words.measured_value(one)),
        )
        for one in ordered
    )
    styles = {words.outcome(one): STYLES[one.final] for one in verdicts if one.final in STYLES}
    columns = (VERDICT, *word_columns("claim", "published", "here"))
    table = Table(title="Claims", columns=columns, rows=rows)
    return View(table, below=[f"Why: {one.why}" for one in ordered], styles=styles)
