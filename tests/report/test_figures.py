"""Rows of README.md come from records, and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.records import PROJECT
from tests.report.committed import newest
from twinrun.report.site import with_figures
from twinrun.report.words import headline

PAGE = "before\n<!-- figures -->\nold\n<!-- end of figures -->\nafter\n"


def test_each_record_that_stands_for_a_recipe_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    record = newest("mpt7b-scaling")
    monkeypatch.setattr(
        type(PROJECT), "results", lambda _, one: [Path("a")] if one.recipe.name == "mpt7b-scaling" else []
    )
    monkeypatch.setattr("twinrun.report.site.read_record", lambda *_: record)
    text = with_figures(PAGE, PROJECT)
    (row,) = (line for line in text.splitlines() if line.startswith("| `mpt7b-scaling` | 50.0%"))
    assert row.endswith(f" | {headline(record)} | 2026-11-21 |")
    assert "\nold\n" not in text
    assert with_figures(text, PROJECT) == text
    monkeypatch.setattr(type(PROJECT), "results", lambda *_: [])
    assert "No record of a run on GPUs is committed yet." in with_figures(PAGE, PROJECT)
