from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console, RenderableType

from tests.report.committed import RECIPES, committed, newest, verdict
from twinrun.report.tables import View, record_tables, verdict_table, word_columns
from twinrun.report.terminal import show
from twinrun.workloads.tables import Table, text


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
    text = rendered(record_tables(record), width=width) + rendered(
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
        assert text.count(one.claim) == 1
        assert one.why in text


def test_a_point_has_all_its_numbers() -> None:
    record = newest("mpt7b-scaling")
    text = rendered(record_tables(record), width=160)
    assert all(point.id in text for point in record.points)
    assert "model-flops/6N+12LDS" in text


def test_a_point_without_a_measurement_is_shown() -> None:
    record = newest("mpt7b-scaling")
    points = tuple(point.model_copy(update={"measurements": ()}) for point in record.points)
    assert "devices=2" in rendered(record_tables(record.model_copy(update={"points": points})))


def test_every_committed_record_has_tables() -> None:
    for recipe in RECIPES:
        for record in committed(recipe):
            assert rendered(record_tables(record)).strip()


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
    assert b"? reproduced" in stream.buffer.getvalue()
