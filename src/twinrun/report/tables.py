"""Tables of the terminal, as lines of text that break no word and cut nothing off."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from twinrun.report.words import heading, measured_value, outcome, published_neutral, published_value, reason
from twinrun.results.finished_run import FinishedRun
from twinrun.results.verdicts import FAILURES, Outcome, Verdict
from twinrun.workloads.tables_and_charts import Cell, Table, text, word_columns

STYLES: dict[Outcome, str] = {"reproduced": "green", "holds-here": "green"}
STYLES |= dict.fromkeys(FAILURES, "bold red")
GAP = "  "
# Holds words together that belong on one line; printed as a space.
HARD_SPACE = "\u00a0"


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
        # Names that come from a machine must not be read as markup.
        shown = Text(line.text, style=line.style, no_wrap=True, overflow="ignore")
        for phrase, style in self._styles.items():
            shown.highlight_words([phrase], style)
        return shown


def run_tables(run: FinishedRun) -> Group:
    """Return the measured numbers of a run and, where no claim was judged, what was published beside them."""
    beside = None if run.record.verdicts else run.overview.beside
    shown = (*run.workload.show(run.view), *([beside] if beside else []))
    return Group(*(View(table) for table in shown))


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
    return View(table, below=[f"Why: {reason(one)}" for one in verdicts], styles=styles)


def _words(title: str, columns: Sequence[str], rows: tuple[tuple[Cell, ...], ...]) -> Table:
    return Table(title=title, columns=word_columns(*columns), rows=rows)


def _whole(phrase: str) -> str:
    return phrase.replace(" ", HARD_SPACE)


class Line(NamedTuple):
    """One line and its style."""

    text: str
    style: str = ""


def lines(table: Table, *, room: int, below: Sequence[str] = ()) -> Iterator[Line]:
    """Yield a table in `room` columns; those that do not fit beside the rest follow in a part of their own.

    Args:
        below: a text to each row, of the whole width.
    """
    least = [_width(table, place, whole=False) for place in range(len(table.columns))]
    natural = [_width(table, place, whole=True) for place in range(len(table.columns))]
    shared = parts(least, room)
    if table.title:
        yield from (Line(text, "bold") for text in textwrap.wrap(table.title, room))
    for part in shared:
        widths = widened([least[one] for one in part], [natural[one] for one in part], room)
        yield from _part(table, part, widths, room, below if part == shared[-1] else ())
    for note in table.notes:
        yield from (Line(text, "dim") for text in _wrapped(note, room, indent=2))
    yield Line("")


def parts(least: Sequence[int], room: int) -> list[list[int]]:
    """Return which columns stand side by side; the first, which names the row, leads every part."""
    found: list[list[int]] = [[0]]
    for place in range(1, len(least)):
        if len(found[-1]) > 1 and _total([least[one] for one in (*found[-1], place)]) > room:
            found.append([0])
        found[-1].append(place)
    return found


def widened(least: Sequence[int], natural: Sequence[int], room: int) -> list[int]:
    """Return widths that use the room, the column that lacks most served first."""
    widths = [min(one, room) for one in least]
    while _total(widths) < room:
        lacking, place = max(
            (want - has, -place) for place, (want, has) in enumerate(zip(natural, widths, strict=True))
        )
        if lacking <= 0:
            break
        widths[-place] += 1
    return widths


def _part(
    table: Table, part: Sequence[int], widths: Sequence[int], room: int, below: Sequence[str]
) -> Iterator[Line]:
    right = [table.columns[place].numeric for place in part]
    heads = [
        _wrapped(heading(table.columns[place].title), width)
        for place, width in zip(part, widths, strict=True)
    ]
    yield from (Line(text, "bold") for text in _rows(heads, widths, right))
    yield Line("─" * _total(widths))
    for row, under in zip_longest(table.rows, below):
        cells = [_cell(row[place], width) for place, width in zip(part, widths, strict=True)]
        yield from (Line(one) for one in _rows(cells, widths, right))
        yield from (Line(one, "dim") for one in _wrapped(under or "", room, indent=2))


def _rows(cells: Sequence[list[str]], widths: Sequence[int], right: Sequence[bool]) -> Iterator[str]:
    for texts in zip_longest(*cells, fillvalue=""):
        placed = (
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(texts, widths, right, strict=True)
        )
        yield GAP.join(placed).rstrip().replace(HARD_SPACE, " ")


def _cell(cell: Cell, width: int) -> list[str]:
    return [line for text in (cell.text, cell.detail) for line in _wrapped(text, width)]


def _wrapped(text: str, width: int, *, indent: int = 0) -> list[str]:
    return textwrap.wrap(
        text,
        max(width, indent + 1),
        break_on_hyphens=False,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
    )


def _width(table: Table, place: int, *, whole: bool) -> int:
    """Return the width of a column: of its longest text, or of its longest word; a number stays whole."""
    column = table.columns[place]
    texts = [text for row in table.rows for text in (row[place].text, row[place].detail)]
    pieces = texts if whole or column.numeric else [word for text in texts for word in text.split(" ")]
    title = heading(column.title)
    heads = [title] if whole else title.split()
    return max((len(text) for text in (*pieces, *heads)), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)
