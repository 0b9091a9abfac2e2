"""Two records side by side on the terminal."""

from __future__ import annotations

import textwrap

from rich.console import Group
from rich.table import Table
from rich.text import Text

from twinrun.circumstances import Difference
from twinrun.compare import Comparison, Pair, Side
from twinrun.compare_bench import BenchComparison
from twinrun.report.tables import NAME_COLUMNS, add_row, plain_table
from twinrun.report.words import number, percent

# Hashes are told apart by their first characters; the JSON has all of them.
LONGEST = 40


def comparison_view(comparison: Comparison) -> Group:
    """Return the summary, the points side by side and the ranked differences."""
    found = comparison.differences
    return Group(
        Text(comparison.summary, style="bold"),
        Text(f"A: {comparison.run_a}, record {comparison.sha256_a[:12]}"),
        Text(f"B: {comparison.run_b}, record {comparison.sha256_b[:12]}"),
        pairs_table(comparison),
        differences_table(found) if found else Text("No recorded circumstance differs."),
    )


def bench_comparison_view(comparison: BenchComparison) -> Group:
    """Return the summary, the times side by side and the ranked differences of two benchmarks."""
    found = comparison.differences
    return Group(
        Text(comparison.summary, style="bold"),
        Text(f"A: {comparison.run_a}, record {comparison.sha256_a[:12]}"),
        Text(f"B: {comparison.run_b}, record {comparison.sha256_b[:12]}"),
        times_table(comparison),
        differences_table(found) if found else Text("No recorded circumstance differs."),
    )


def times_table(comparison: BenchComparison) -> Table:
    """Return a row for each measurement that both records have timed."""
    table = plain_table("case", "measurement", title="Medians of one device, in ms")
    for heading in ("A", "B", "B times\nas fast"):
        table.add_column(heading, justify="right")
    for pair in comparison.pairs:
        ratio = f"{pair.ratio:.3f}" + ("\nwithin the spread" if pair.within_spread else "")
        name = "\n".join(textwrap.wrap(pair.measurement, NAME_COLUMNS))
        add_row(table, pair.case, name, number(pair.a.median), number(pair.b.median), ratio)
    return table


def pairs_table(comparison: Comparison) -> Table:
    """Return a row for each pair of points; rates are medians of one device."""
    table = plain_table("A", "B", title=f"Points compared: {comparison.pairing}")
    for heading in ("tokens/s\nper device", "B / A", "model TFLOP/s\nper device", "B / A", "MFU"):
        table.add_column(heading, justify="right")
    table.add_column("loss, B against A")
    for pair in comparison.pairs:
        add_row(table, pair.a.point, pair.b.point, *_rates(pair), _loss(pair))
    table.caption = Text(f"model FLOP/s: {comparison.formula}; medians of the timed steps", style="dim")
    return table


def differences_table(differences: tuple[Difference, ...]) -> Table:
    """Return what differs, largest likely effect on speed first."""
    table = plain_table("differs", "A", "B", "speed", "numerics", "because", title="Differences")
    for item in differences:
        add_row(table, item.name, _short(item.a), _short(item.b), item.speed, item.numerics, item.because)
    return table


def _rates(pair: Pair) -> tuple[str, ...]:
    return (
        f"{number(pair.a.tokens_per_second)}\n{number(pair.b.tokens_per_second)}",
        f"{pair.tokens_ratio:.3f}",
        f"{number(pair.a.model_tflops)}\n{number(pair.b.model_tflops)}",
        f"{pair.flops_ratio:.3f}",
        f"{_share(pair.a)}\n{_share(pair.b)}",
    )


def _share(side: Side) -> str:
    return "-" if side.utilisation is None else percent(side.utilisation)


def _loss(pair: Pair) -> str:
    if pair.loss is None:
        return pair.loss_note
    loss = pair.loss
    if not loss.value:
        return f"equal in all {loss.steps} steps; {pair.loss_note}"
    return f"{loss.value:.2g} apart at most, at step {loss.step} of {loss.steps}; {pair.loss_note}"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:12]}..."
