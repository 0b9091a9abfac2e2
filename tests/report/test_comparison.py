from __future__ import annotations

from tests.report.committed import PROJECT, committed, newest
from tests.report.test_tables import rendered
from twinrun.report.comparison import comparison_view
from twinrun.results.compare import compare


def test_a_comparison_shows_both_sides_and_the_differences() -> None:
    a, b = sorted(committed("mamba-kernels"), key=lambda record: record.created)[:2]
    comparison = compare(a, b, PROJECT)
    text = rendered(comparison_view(comparison), width=400)
    assert comparison.summary in " ".join(text.split())
    for one in comparison.pairs:
        assert one.measurement in text
    for found in comparison.differences:
        assert found.name in text
        assert found.because in text


def test_equal_records_differ_in_nothing() -> None:
    record = newest("mpt7b-scaling")
    text = rendered(comparison_view(compare(record, record, PROJECT)))
    assert "No recorded circumstance differs." in text
    assert "equal in 5 steps" in text
    assert "within spread" in text


def test_a_comparison_fits_a_narrow_terminal() -> None:
    a, b = committed("mpt7b-scaling")[-2:]
    text = rendered(comparison_view(compare(a, b, PROJECT)), width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
