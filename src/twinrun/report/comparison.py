"""Two records side by side on the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from twinrun.foundation.text import number
from twinrun.manifests.metrics import RATIO
from twinrun.report.tables import View, word_columns
from twinrun.results.compare import Comparison, MeasurementPair, SeriesDistance
from twinrun.results.factors import SettingChange
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text

# The first characters tell hashes apart; the JSON has all of them.
HASH = re.compile(r"[0-9a-f]{40,}")


def comparison_view(comparison: Comparison) -> Group:
    """Return the summary, the measurements side by side, the series and the ranked differences."""
    found = comparison.differences
    return Group(
        Text(comparison.summary, style="bold"),
        Text(f"A: {comparison.run_a}, record {comparison.sha256_a[:12]}"),
        Text(f"B: {comparison.run_b}, record {comparison.sha256_b[:12]}"),
        Text(f"points compared: {comparison.pairing}\n"),
        *(View(table) for table in pairs_tables(comparison)),
        *([View(series_table(comparison.series))] if comparison.series else []),
        _differences(found) if found else Text("No recorded circumstance differs."),
    )


def _differences(found: Sequence[SettingChange]) -> View:
    return View(differences_table(found), below=[one.because for one in found])


def pairs_tables(comparison: Comparison) -> list[Table]:
    """Return a table for each pair of points, with a row for each measurement that both have."""
    points = dict.fromkeys(_points(pair) for pair in comparison.pairs)
    return [_pairs_table(name, [one for one in comparison.pairs if _points(one) == name]) for name in points]


def _pairs_table(name: str, pairs: Sequence[MeasurementPair]) -> Table:
    titles = ("A", "B", "B times as good")
    return Table(
        title=f"{name}: medians",
        columns=(*word_columns("measurement"), *(Column(title=title) for title in titles)),
        rows=tuple(_row(pair) for pair in pairs),
        notes=tuple(dict.fromkeys(pair.formula for pair in pairs if pair.formula)),
    )


def _row(pair: MeasurementPair) -> tuple[Cell, ...]:
    counted = "" if pair.unit == RATIO else f"{pair.unit}{'' if pair.per == 'run' else f' per {pair.per}'}"
    return (text(pair.measurement, counted), text(number(pair.a)), text(number(pair.b)), _moved(pair))


def _moved(pair: MeasurementPair) -> Cell:
    """Return how many times as good B is; of a loss how much it is more; of two experiments why neither."""
    if pair.obstacles:
        return text("not compared", ", ".join(one.partition(" ")[0] for one in pair.obstacles))
    if pair.gain is None:
        return text("-" if pair.difference is None else f"{pair.difference:+.3g} (B - A)")
    return text(f"{pair.gain.times:.3f}", "within spread" if pair.within_spread else "")


def series_table(series: Sequence[SeriesDistance]) -> Table:
    """Return how far the series of each pair of points are apart."""
    rows = tuple((text(_points(one)), text(one.metric), text(_apart(one)), text(one.note)) for one in series)
    return Table(
        title="Series", columns=word_columns("point", "series", "largest distance", "note"), rows=rows
    )


def differences_table(differences: Sequence[SettingChange]) -> Table:
    """Return what differs, largest likely effect on speed first."""
    rows = tuple(
        tuple(
            text(one) for one in (found.name, _short(found.a), _short(found.b), found.speed, found.numerics)
        )
        for found in differences
    )
    columns = word_columns("differs", "A", "B", "speed", "numerics")
    return Table(
        title="Differences, by their likely effect on speed and numerics", columns=columns, rows=rows
    )


def _points(pair: MeasurementPair | SeriesDistance) -> str:
    return pair.point_a if pair.point_a == pair.point_b else f"{pair.point_a} and {pair.point_b}"


def _apart(one: SeriesDistance) -> str:
    if one.value is None:
        return "-"
    return (
        f"{one.value:.2g} at step {one.step} of {one.steps}" if one.value else f"equal in {one.steps} steps"
    )


def _short(value: str) -> str:
    return HASH.sub(lambda found: f"{found[0][:12]}...", value)
