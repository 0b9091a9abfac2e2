from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from tests.records import PROJECT, bench_record, measurement, replaced, training_record, with_derived
from tests.report.committed import RECIPES, committed, newest, verdict
from twinrun.foundation.text import number
from twinrun.protocol.measurements import sampled
from twinrun.report.summary import result
from twinrun.report.tables import View, run_tables, verdict_table
from twinrun.report.terminal import show
from twinrun.results.finished_run import run_of
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns

WORDS = st.text("abc-", min_size=1, max_size=14)
PHRASES = st.lists(WORDS, min_size=1, max_size=5).map(" ".join)


def rendered(view: RenderableType, *, width: int = 120) -> str:
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


def test_names_from_a_machine_are_not_markup() -> None:
    table = Table(title="", columns=word_columns("gpu"), rows=((text("[bold]GPU[/nonsense]"),),))
    assert "[bold]GPU[/nonsense]" in rendered(View(table))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_tables_fit_the_terminal_and_keep_names_whole(recipe: str, width: int) -> None:
    record = newest(recipe)
    text = rendered(run_tables(run_of(record, PROJECT, folder=Path())), width=width) + rendered(
        verdict_table(record.verdicts), width=width
    )
    assert max(len(line) for line in text.splitlines()) <= width
    words = set(text.split())
    assert {one.claim for one in record.verdicts} <= words
    assert "here" in words
    assert "…" not in text


def test_a_claim_stands_once_with_its_reason() -> None:
    record = newest("mpt7b-scaling")
    text = rendered(verdict_table(record.verdicts), width=1000)
    for one in record.verdicts:
        assert text.count(one.claim) == 2
        assert one.why in text
        # The fields in which the run differs stand above, once.
        assert not one.departures or "; ".join(one.departures) not in text
    assert any(one.departures for one in record.verdicts)


def test_a_point_has_all_its_numbers() -> None:
    record = newest("mpt7b-scaling")
    text = rendered(run_tables(run_of(record, PROJECT, folder=Path())), width=160)
    assert all(point.id in text for point in record.points)
    assert "model-flops/6N+12LDS" in text


def test_a_point_without_a_measurement_is_shown() -> None:
    record = newest("mpt7b-scaling")
    points = tuple(point.model_copy(update={"measurements": ()}) for point in record.points)
    assert "devices=2" in rendered(
        run_tables(run_of(record.model_copy(update={"points": points}), PROJECT, folder=Path()))
    )


def test_every_committed_record_has_tables() -> None:
    for recipe in RECIPES:
        for record in committed(recipe):
            assert rendered(run_tables(run_of(record, PROJECT, folder=Path()))).strip()


def test_a_pipe_cuts_nothing_and_has_no_escape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    record = newest("mpt7b-scaling")
    show(verdict_table(record.verdicts))
    text = capsys.readouterr().out
    assert any(len(line) > 80 for line in text.splitlines())
    assert "✓ holds here" in text
    assert "\x1b" not in text


def test_a_locale_without_the_signs_gets_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    show(verdict_table([verdict("reproduced")]))
    stream.flush()
    assert b"+ reproduced" in stream.buffer.getvalue()


def table_of(*titles: str, rows: int = 2) -> Table:
    columns = tuple(Column(title=title, numeric=place > 0) for place, title in enumerate(titles))
    cells = tuple(Cell(text=f"{title}-value", detail="±0.1%") for title in titles)
    return Table(title="", columns=columns, rows=(cells,) * rows)


def shown(content: Table, room: int, below: tuple[str, ...] = ()) -> list[str]:
    return [line.rstrip() for line in rendered(View(content, below=below), width=room).splitlines()]


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
    content = table_of("name", "throughput", "memory", "loss")
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


def test_a_reason_stands_below_its_table() -> None:
    text = shown(table_of("claim", "verdict"), 60, ("first reason", "second reason"))
    assert text.index("  first reason") < text.index("  second reason")


def test_an_empty_table_is_its_head() -> None:
    assert shown(Table(title="", columns=(Column(title="name"),), rows=()), 40)[0] == "name"


def test_power_has_columns_where_a_point_has_it() -> None:
    without = training_record({"nodes=1": 166.0, "nodes=2": 164.0})
    assert "per watt" not in rendered(run_tables(run_of(without, PROJECT, folder=Path())), width=200)
    point = without.point("nodes=1")
    assert point
    power = sampled("power", [410.0], metric="power", unit="W", per="device")
    kept = tuple(one for one in point.measurements if one.id in ("step-time", "peak-memory"))
    known = point.model_copy(
        update={"measurements": (*kept, power), "facts": {**point.facts, "power source": "a sensor"}}
    )
    record = replaced(without, "nodes=1", **dict(with_derived(known, without.plan, without.gpu)))
    tokens = measurement(record, "nodes=1", "tokens-per-second").median
    assert measurement(record, "nodes=1", "tokens-per-second-per-watt").median == tokens / 410
    text = rendered(run_tables(run_of(record, PROJECT, folder=Path())), width=200)
    assert "per watt" in text
    assert "410" in text
    assert number(tokens / 410) in text
    assert "W: a sensor" in text


def test_what_beats_eager_torch_stands_for_no_record() -> None:
    name = "scan-forward-fp16"
    times = {name: [1.0] * 20, f"{name}@mamba_ssm": [2.0] * 20, f"{name}@torch": [700.0] * 20}
    metrics = PROJECT.metrics
    assert result(bench_record(times), metrics)[0] == "2.00"
    del times[f"{name}@mamba_ssm"]
    assert result(bench_record(times), metrics)[1].startswith("time in ms")
