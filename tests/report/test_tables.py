"""Tables on a terminal: as wide as it is, no word broken, nothing cut off."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from tests.report.committed import newest, verdict
from twinrun.report.tables import View, run_tables, verdict_table
from twinrun.report.terminal import show
from twinrun.results.reading import FinishedRun
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns

WORDS = st.text("abc-", min_size=1, max_size=14)
PHRASES = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)


def rendered(view: RenderableType, *, width: int = 120) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def shown(content: Table, room: int, below: tuple[str, ...] = ()) -> list[str]:
    return [line.rstrip() for line in rendered(View(content, below=below), width=room).splitlines()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_of_a_run_fit_the_terminal_and_keep_names_whole(width: int) -> None:
    record = newest("mpt7b-scaling")
    run = FinishedRun(record=record, folder=Path(), file=Path("record.json"))
    text = rendered(verdict_table(record.verdicts), width=width) + rendered(run_tables(run), width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert {one.claim for one in record.verdicts} <= set(text.split())
    assert {point.id for point in record.points} <= set(text.split())
    assert "…" not in text
    wide = rendered(verdict_table(record.verdicts), width=1000)
    assert all(f"{one.claim}: {one.why}" in wide for one in record.verdicts)


def test_a_pipe_has_no_escape_and_a_locale_without_the_signs_gets_other_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    show(verdict_table([verdict("reproduced")]))
    stream.flush()
    assert b"? reproduced" in stream.buffer.getvalue()
    assert b"\x1b" not in stream.buffer.getvalue()


@given(rows=st.lists(st.tuples(PHRASES, PHRASES, PHRASES), min_size=1, max_size=4), room=st.integers(32, 120))
def test_no_word_is_broken_and_none_is_cut(rows: list[tuple[str, ...]], room: int) -> None:
    cells = tuple(tuple(map(text, row)) for row in rows)
    lines = shown(Table(title="", columns=word_columns("one", "two", "three"), rows=cells), room)
    assert all(len(line) <= room for line in lines)
    words = {word for line in lines for word in line.split()}
    assert {word for row in rows for cell in row for word in cell.split()} <= words


def test_columns_that_do_not_fit_follow_under_the_same_names() -> None:
    titles = ("name", "throughput", "memory", "loss")
    columns = tuple(Column(title=title, numeric=place > 0) for place, title in enumerate(titles))
    cells = tuple(Cell(text=f"{title}-value", detail="±0.1%") for title in titles)
    content = Table(title="", columns=columns, rows=(cells, cells))
    for room, count in ((120, 2), (46, 4)):
        lines = shown(content, room, ("a reason",))
        assert len([line for line in lines if line.startswith("name-value")]) == count
        assert all(len(line) <= room for line in lines)
        assert "  a reason" in lines


def test_numbers_stay_whole_and_names_are_no_markup() -> None:
    columns = (Column(title="name", numeric=False), Column(title="a long heading of words"))
    content = Table(title="", columns=columns, rows=((text("[bold]a[/x]"), text("0.2017 exp2", "44.4%")),))
    lines = shown(content, 26)
    assert any("0.2017 exp2" in line for line in lines)
    assert any("[bold]a[/x]" in line for line in lines)
