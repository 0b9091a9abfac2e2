from __future__ import annotations

import pytest
from rich.console import Console

from tests.benches import bench_record
from twinrun.compare_bench import compare_benches
from twinrun.errors import InputError
from twinrun.report.comparison import bench_comparison_view


def test_a_faster_record_is_told_by_how_much_and_why() -> None:
    comparison = compare_benches(bench_record(gpu="mi250", factor=3), bench_record(gpu="h200"))
    assert {round(pair.ratio, 6) for pair in comparison.pairs} == {3.0}
    assert comparison.differences[0].name == "GPU model"
    assert comparison.summary.startswith("B is 3.00 to 3.00 times as fast as A")


def test_the_same_record_twice_differs_in_nothing() -> None:
    comparison = compare_benches(bench_record(), bench_record())
    assert comparison.differences == ()
    assert all(pair.within_spread for pair in comparison.pairs)


def test_cases_with_other_settings_are_no_pair() -> None:
    other = bench_record(settings=("options.groups=2",))
    with pytest.raises(InputError, match="no measurement was timed in both"):
        compare_benches(bench_record(), other)


def test_untimed_records_have_nothing_to_compare() -> None:
    checked = bench_record(gpu=None, scale="smoke")
    with pytest.raises(InputError, match="checks and does not time"):
        compare_benches(checked, checked)


def test_the_view_shows_every_pair() -> None:
    comparison = compare_benches(bench_record(), bench_record(factor=1.5))
    console = Console(width=200, no_color=True)
    with console.capture() as shown:
        console.print(bench_comparison_view(comparison))
    text = shown.get()
    assert all(pair.case in text for pair in comparison.pairs)
    assert "scan-backward-" in text
    assert "0.667" in text
