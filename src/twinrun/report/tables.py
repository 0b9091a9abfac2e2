"""What a run ends with on the terminal: tables, laid out by rich, and how its record can be sent in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from twinrun.foundation.errors import InputError
from twinrun.report import words
from twinrun.results.judged import gpus_of
from twinrun.results.reading import FinishedRun
from twinrun.results.submission import FILE, write_submission
from twinrun.results.verdicts import FAILURES, Outcome, Verdict
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns, word_table

STYLES: dict[Outcome, str] = {"reproduced": "green", "exceeds": "green", "holds-here": "green"}
STYLES |= dict.fromkeys(FAILURES, "bold red")
VERDICT = Column(title="verdict", numeric=False, whole=True)
# What no probe says.
QUESTIONS = (
    "Power limit and cooling of the card, as far as they are not the factory's",
    "What else ran on the machine meanwhile",
    "Partitioning or virtualisation of the device",
    "May the record be published under the project's licence, with your name or without",
)
# Columns that a column takes beside its text: its padding and a divider.
GAP = 2


class View:
    """A table as wide as what it is printed on: no word is broken, and nothing is cut off."""

    def __init__(
        self, table: Table, *, below: Sequence[str] = (), styles: Mapping[str, str] | None = None
    ) -> None:
        """Take a table, texts below it, and the styles of cells by their text."""
        self._table, self._below, self._styles = table, below, styles or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, the columns that fit beside each other, then the rest, and all texts below."""
        table, room = self._table, options.max_width
        sizes = [self._measured(console, options, place) for place in range(len(table.columns))]
        if table.title:
            yield Text(table.title, style="bold")
        # The first column names the row, so it leads every part.
        parts: list[list[int]] = [[0]]
        for place in range(1, len(sizes)):
            taken = sum(sizes[one].minimum + GAP for one in (*parts[-1], place))
            if len(parts[-1]) > 1 and taken > room:
                parts.append([0])
            parts[-1].append(place)
        yield from (self._grid(part, sizes, room) for part in parts)
        said = (*filter(None, self._below), *table.notes)
        yield from (Padding(Text(one, style="dim"), (0, 0, 0, 2)) for one in said)
        yield Text("")

    def _measured(self, console: Console, options: ConsoleOptions, place: int) -> Measurement:
        """Return the least and the natural width of a column; a text that stays whole has its own."""
        column = self._table.columns[place]
        texts = [Text(words.heading(column.title)), *(self._shown(row[place]) for row in self._table.rows)]
        sizes = [Measurement.get(console, options, one) for one in texts]
        natural = max(one.maximum for one in sizes)
        whole = max((one.maximum for one in sizes[1:]), default=0)
        least = max(whole if column.numeric or column.whole else 0, *(one.minimum for one in sizes))
        return Measurement(least, natural)

    def _grid(self, part: Sequence[int], sizes: Sequence[Measurement], room: int) -> Grid:
        widths = {place: min(sizes[place].minimum, room - GAP) for place in part}
        # Room goes to the column that lacks most.
        while sum(widths.values()) + GAP * len(part) <= room:
            lacking = max(part, key=lambda place: sizes[place].maximum - widths[place])
            if sizes[lacking].maximum <= widths[lacking]:
                break
            widths[lacking] += 1
        grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
        for place in part:
            column = self._table.columns[place]
            title = words.heading(column.title)
            justify: JustifyMethod = "right" if column.numeric else "left"
            grid.add_column(title, justify=justify, width=widths[place], overflow="fold")
        for row in self._table.rows:
            grid.add_row(*(self._shown(row[place]) for place in part))
        return grid

    def _shown(self, cell: Cell) -> Text:
        # Names that come from a machine must not be read as markup.
        lines = [Text(cell.text, style=self._styles.get(cell.text, "")), Text(cell.detail)]
        return Text("\n").join(line for line in lines if line.plain)


def run_tables(run: FinishedRun) -> Group:
    """Return the measured numbers of a run."""
    return Group(*(View(table) for table in run.record.workload.show(run.record.view)))


def condition_table(verdict: Verdict) -> View:
    """Return each condition of a verdict with what was seen."""
    heads, rows = ("met", "condition", "seen"), words.shown_conditions(verdict)
    return View(word_table(f"Conditions of {verdict.claim}", heads, rows))


def verdict_table(verdicts: Sequence[Verdict]) -> View:
    """Return each verdict with its claim, the published value and the one found here, the reason below."""
    ordered = words.by_interest(verdicts)
    rows = []
    for one in ordered:
        published = text(words.published_value(one), words.published_neutral(one))
        named = (text(words.outcome(one)), text(one.claim))
        rows.append((*named, published, text(words.measured_value(one))))
    styles = {words.outcome(one): STYLES[one.final] for one in verdicts if one.final in STYLES}
    columns = (VERDICT, *word_columns("claim", "published", "here"))
    table = Table(title="Claims", columns=columns, rows=tuple(rows))
    return View(table, below=[f"{one.claim}: {one.why}" for one in ordered], styles=styles)


def offer(run: FinishedRun) -> str:
    """Keep what can be sent in of a GPU that the recipe has no record of.

    Returns:
        What to do with it, why there is nothing, or no text for a GPU that is known and for a processor.
    """
    record, gpu = run.record, run.record.gpu
    committed = (file.name for file in record.project.results(record.recipe))
    # Files of committed records are named by their GPU.
    is_known = gpu is not None and any(name.startswith(f"{gpu.id}x") for name in committed)
    if not record.devices or is_known:
        return ""
    try:
        write_submission(run.folder / FILE, record, run.file)
    except InputError as reason:
        return f"The results have no such GPU yet, and cannot take this run: {reason.message}\n"
    lines = [
        f"The results have no {gpus_of(record)} yet. To send this run in, attach {run.folder / FILE}: it is",
        "the record without names of hosts and folders. The project takes it by",
        "",
        f"    invoke report recipes/{record.plan.recipe} --add {FILE}",
        "",
        "Please answer beside it:",
        *(f"- {question}" for question in QUESTIONS),
    ]
    return "\n".join(lines) + "\n"
