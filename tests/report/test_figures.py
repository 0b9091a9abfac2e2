from __future__ import annotations

import re

import pytest

from tests.report.committed import PROJECT, changed, committed, newest
from twinrun.report.figures import newest_of_each, with_figures

ROWS = """mpt7b-scaling | 4 x NVIDIA H200 SXM | mpt-7b, bf16, plain | devices=4
mamba-kernels | 1 x NVIDIA H200 SXM | median of 30 calls | 2x4096x5376x16"""
PAGE = f"before\n<!-- figures\n{ROWS}\n-->\nold\n<!-- end of figures -->\nafter\n"


def test_tables_stand_between_their_markers() -> None:
    text = with_figures(PAGE, PROJECT)
    assert text.startswith(f"before\n<!-- figures\n{ROWS}\n-->\n| recipe |")
    assert text.endswith("|\n<!-- end of figures -->\nafter\n")
    assert "old" not in text
    assert with_figures(text, PROJECT) == text


def test_a_page_without_markers_stays() -> None:
    assert with_figures("no table", PROJECT) == "no table"


def test_only_the_newest_of_the_same_is_shown() -> None:
    record = newest("mpt7b-scaling")
    older = changed(record, created="2020-01-01T00:00:00+00:00")
    assert newest_of_each([record, older]) == [record]
    assert len(newest_of_each(committed("mpt7b-scaling"))) > 1


def test_a_range_stands_for_several_measurements() -> None:
    assert re.search(r"\| 2x4096x5376x16 \| \S+ to \S+ times as fast \|", with_figures(PAGE, PROJECT))


def test_a_row_that_no_record_has_is_named() -> None:
    with pytest.raises(ValueError, match=r"no committed record has .*mpt-7b, bf16, plain.*devices=8"):
        with_figures(PAGE.replace("devices=4", "devices=8"), PROJECT)
