"""Charts to pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinrun.report.bar_chart import draw_bars
from twinrun.report.line_chart import draw_lines
from twinrun.report.roofline_chart import draw_roofline
from twinrun.report.svg import Picture
from twinrun.workloads.charts import Chart

# Any: each function takes the chart of its key.
_DRAWINGS: dict[str, Callable[[Any], Picture]] = {
    "lines": draw_lines,
    "bars": draw_bars,
    "roofline": draw_roofline,
}


def draw(chart: Chart) -> Picture:
    """Draw a chart of any kind."""
    return _DRAWINGS[chart.chart](chart)
