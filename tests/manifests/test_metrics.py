"""Metrics: units, and what a card has of what a device has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.records import PROJECT, ROOT
from twinrun.foundation.errors import InputError
from twinrun.manifests.metrics import FILE, load_metrics


@pytest.mark.parametrize("name", PROJECT.metrics)
def test_every_unit_goes_there_and_back(name: str) -> None:
    metric = PROJECT.metrics[name]
    for unit in (metric.unit, *metric.units):
        assert metric.in_unit(metric.canonical(3.5, unit), unit) == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('id = "loss"', 'id = "time"', "given twice"),
        ('id = "loss"', 'id = "Loss"', r"metric\.\d+\.id"),
        ('better = "lower"', 'better = "less"', r"metric\.0\.better"),
        ("units = { ms = 1e-3 }", "units = { ms = 0 }", r"metric\.0\.units"),
        ("units = { ms = 1e-3 }", "units = { s = 1.0 }", "needs no factor"),
        ('per = ["run"]', "per = []", r"metric\.0\.per"),
        ('per = ["run"]', 'per = ["rack"]', r"metric\.0\.per"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, old: str, new: str, expected: str) -> None:
    (tmp_path / FILE).parent.mkdir()
    text = (ROOT / FILE).read_text(encoding="utf-8")
    assert old in text
    (tmp_path / FILE).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError, match=expected):
        load_metrics(tmp_path)
