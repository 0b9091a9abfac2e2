"""Pages are made many times of few records."""

from __future__ import annotations

from functools import cache

import pytest

from twinrun.report.charts import draw

# A chart cannot change, and the same chart gives the same picture: test_charts.py holds `draw` to it.
_DRAWN = cache(draw)


@pytest.fixture(autouse=True)
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw each chart of a page once, however many pages have it."""
    monkeypatch.setattr("twinrun.report.page.draw", _DRAWN)
