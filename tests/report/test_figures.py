from __future__ import annotations

from tests.report.committed import PROJECT, changed, committed, newest
from twinrun.report.figures import newest_of_each, with_figures

PAGE = "before\n<!-- figures: mpt7b-scaling -->\nold\n<!-- end of figures -->\nafter\n"


def test_tables_stand_between_their_markers() -> None:
    text = with_figures(PAGE, PROJECT)
    assert text.startswith("before\n<!-- figures: mpt7b-scaling -->\n| hardware |")
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
    text = with_figures(PAGE.replace("mpt7b-scaling", "mamba-kernels"), PROJECT)
    assert " to " in text
    assert "times as fast" in text
