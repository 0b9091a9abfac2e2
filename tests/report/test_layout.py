from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinrun.report.layout import lines, parts, widened
from twinrun.workloads.tables import Cell, Column, Table

WORDS = st.text("abc-", min_size=1, max_size=14)
PHRASES = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)


def table(*titles: str, rows: int = 2) -> Table:
    columns = tuple(Column(title=title, numeric=place > 0) for place, title in enumerate(titles))
    cells = tuple(Cell(text=f"{title}-value", detail="±0.1%") for title in titles)
    return Table(title="", columns=columns, rows=(cells,) * rows)


def shown(content: Table, room: int, below: tuple[str, ...] = ()) -> list[str]:
    return [line.text for line in lines(content, room=room, below=below)]


@given(rows=st.lists(st.tuples(PHRASES, PHRASES, PHRASES), min_size=1, max_size=4), room=st.integers(32, 120))
def test_no_word_is_broken_and_none_is_cut(rows: list[tuple[str, ...]], room: int) -> None:
    content = Table(
        title="",
        columns=tuple(Column(title=title, numeric=False) for title in ("one", "two", "three")),
        rows=tuple(tuple(Cell(text=text) for text in row) for row in rows),
    )
    text = shown(content, room)
    assert all(len(line) <= room for line in text)
    words = {word for line in text for word in line.split()}
    assert {word for row in rows for cell in row for word in cell.split()} <= words


def test_columns_that_do_not_fit_follow_under_the_same_names() -> None:
    content = table("name", "throughput", "memory", "loss")
    assert len([line for line in shown(content, 120) if line.startswith("name-value")]) == 2
    narrow = shown(content, 46)
    assert len([line for line in narrow if line.startswith("name-value")]) == 4
    assert all(len(line) <= 46 for line in narrow)


def test_a_number_stays_whole() -> None:
    content = Table(
        title="",
        columns=(Column(title="name", numeric=False), Column(title="a long heading of words")),
        rows=((Cell(text="point"), Cell(text="0.2017 exp2", detail="44.4%")),),
    )
    assert any("0.2017 exp2" in line for line in shown(content, 20))


def test_a_reason_stands_below_its_row() -> None:
    text = shown(table("claim", "verdict"), 60, ("first reason", "second reason"))
    assert text.index("  first reason") < text.index("  second reason")


@pytest.mark.parametrize(
    ("least", "room", "expected"),
    [
        ([5, 5, 5], 80, [[0, 1, 2]]),
        ([5, 5, 5], 12, [[0, 1], [0, 2]]),
        ([50, 5], 12, [[0, 1]]),
        ([5], 3, [[0]]),
    ],
)
def test_every_part_is_led_by_the_names(least: list[int], room: int, expected: list[list[int]]) -> None:
    assert parts(least, room) == expected


def test_room_goes_to_the_column_that_lacks_most() -> None:
    assert widened([5, 5], [6, 40], 30) == [5, 23]
    assert widened([5, 5], [6, 8], 30) == [6, 8]


def test_an_empty_table_is_its_head() -> None:
    assert shown(Table(title="", columns=(Column(title="name"),), rows=()), 40)[0] == "name"
