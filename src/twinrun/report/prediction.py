"""Predictions on the terminal: memory, time with its interval, and the parts of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group
from rich.text import Text

from twinrun.foundation.text import GIB, number, percent
from twinrun.predict.memory import capacity
from twinrun.predict.parallel_layout import Recomputation
from twinrun.predict.peak import CheckedSpeed
from twinrun.predict.prediction import Prediction
from twinrun.predict.search import OfferedLayout, Search, unordered
from twinrun.report.tables import View
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns

DAY = 86400
RECOMPUTED: dict[Recomputation, str] = {True: "whole", False: "none"}


def predictions_view(
    found: Sequence[Prediction],
    *,
    said: Sequence[str] = (),
    tokens: float | None = None,
    price: float | None = None,
) -> Group:
    """Return a table of predictions, a row for each number of nodes, and what they rest on.

    Args:
        said: sentences about the model, and about what nobody said.
        tokens: a budget of tokens, for which days are shown.
        price: of a device for an hour, for which a price is shown: of the budget, or of 1B tokens.
    """
    first = found[0]
    machines = first.machines
    title = f"{machines.gpu.name}, {machines.devices_per_node} devices a node: predicted, not measured"
    headings = ["nodes", "microbatch", "memory, GiB", "fit", "tokens/s a device", "MFU", "step, s"]
    headings += [f"days of {tokens:.3g} tokens"] if tokens else []
    headings += [f"price of {tokens or 1e9:.3g} tokens"] if price else []
    rows = tuple(_row(one, tokens=tokens, price=price) for one in found)
    columns = tuple(Column(title=one, numeric=one != "fit") for one in headings)
    notes = (*said, f"{first.layout.global_batch:,} sequences a step, {_layout(first)}.", *_notes(first))
    table = Table(title=title, columns=columns, rows=rows, notes=notes)
    parts = [View(_parts(one)) for one in found if one.time is not None][:1]
    return Group(View(table, below=[_below(one) for one in found]), *parts)


def search_view(
    found: Search, *, said: Sequence[str] = (), goal: float, tokens: float, priced: bool
) -> Group:
    """Return the best layouts, cheapest first by the sure end of their intervals, or why there is none.

    Args:
        said: sentences about the model, and about what nobody said.
        goal: tokens a second of all devices that were asked for, 0 for none.
        tokens: whose days and price are shown.
        priced: whether a device has a price; device-hours are shown where it has none.
    """
    reasons = [Text(f"Cannot say: {one}.") for one in found.unknown]
    counted = f"{found.fitting:,} of {found.seen:,} layouts surely fit"
    if found.left_out:
        reasons.append(
            Text(f"Left out, since no layout divides ({len(found.left_out)}): {'; '.join(found.left_out)}.")
        )
    if not found.best:
        fastest = f"; the fastest makes {found.fastest.tokens_per_second:,.0f}" if found.fastest else ""
        asked = f", none reaches {goal:,.0f} tokens/s{fastest}" if goal and found.fitting else ""
        return Group(Text(f"{counted}{asked}."), *reasons)
    cost = "price" if priced else "device-hours"
    counts = (
        "microbatch",
        "memory, GiB",
        "tokens/s in all",
        f"days of {tokens:.3g} tokens",
        f"{cost} of them",
    )
    columns = (*word_columns("machines", "layout"), *(Column(title=title) for title in counts))
    which = "reach the goal" if goal else "fit"
    title = f"Cheapest first by what is sure, of layouts that {which}: predicted, not measured"
    rows = tuple(_placed(one, goal=goal, tokens=tokens) for one in found.best)
    notes = [*said, f"{counted}.", *_notes(found.best[0].prediction)]
    if names := unordered(found):
        notes.append(f"No order between {', '.join(names)}: their intervals overlap.")
    return Group(View(Table(title=title, columns=columns, rows=rows)), *map(Text, notes), *reasons)


def peak_view(found: CheckedSpeed, *, said: Sequence[str]) -> Group:
    """Return a speed as shares of the peak, by formula, and what that says."""
    rows = tuple(
        (
            text(name),
            text(f"{flops / 1e9:.4g}"),
            text(f"{found.tokens_per_second * flops / 1e12:,.0f}"),
            text(percent(found.shares[name])),
        )
        for name, flops in found.flops_of_token.items()
    )
    title = f"{found.gpu_name}: {found.tokens_per_second:,.0f} tokens/s a device"
    columns = word_columns("formula", "GFLOP a token", "TFLOP/s", f"of {found.peak / 1e12:,.0f} TFLOP/s")
    table = Table(title=title, columns=columns, rows=rows, notes=(*said, f"Verdict: {found.verdict}."))
    return Group(View(table))


def _placed(one: OfferedLayout, *, goal: float, tokens: float) -> tuple[Cell, ...]:
    machines, rate = one.offer.machines, one.tokens_per_second
    low, high = (side * machines.devices for side in one.prediction.interval or (0.0, 0.0))
    sure = "" if not goal else "; surely" if low >= goal else "; likely"
    cheap, dear = one.price_interval(tokens)
    return (
        text(machines.gpu.name, f"{machines.nodes} x {machines.devices_per_node} devices"),
        text(_layout(one.prediction)),
        text(str(one.prediction.layout.microbatch)),
        text(number(one.prediction.memory.bytes / GIB)),
        text(f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}{sure}"),
        text(number(tokens / rate / DAY)),
        text(number(one.price(tokens)), f"{number(cheap)} to {number(dear)}"),
    )


def _layout(one: Prediction) -> str:
    """Return a layout in words."""
    layout = one.layout
    cuts = [
        f"{name} {size}" for name in ("tensor", "pipeline", "context") if (size := getattr(layout, name)) > 1
    ]
    cuts += [f"{layout.interleaved} parts a stage"] * (layout.interleaved > 1)
    cuts += [f"experts over {layout.experts}"] * (layout.experts > 1)
    cuts += [name for name in ("sequence_parallel", "zero_bubble", "fp8") if getattr(layout, name)]
    shards = "whole copies" if layout.shards == "none" else f"{layout.shards} split"
    again = RECOMPUTED.get(layout.recomputation, str(layout.recomputation))
    return ", ".join([*cuts, shards, f"recomputation {again}"]).replace("_", " ")


def _row(one: Prediction, *, tokens: float | None, price: float | None) -> tuple[Cell, ...]:
    has = capacity(one.machines.gpu) / GIB
    cells = [
        text(str(one.machines.nodes)),
        text(str(one.layout.microbatch), f"at most {one.largest_microbatch or 'none'}"),
        text(number(one.memory.bytes / GIB), f"of {has:.0f}"),
        text(one.memory.fit(one.machines.gpu)),
        _speed(one),
        text(percent(one.model_flops_share) if one.model_flops_share else "-", one.shape.formula),
        text(number(one.time.seconds) if one.time else "cannot say"),
    ]
    rate = one.tokens_per_second
    if tokens:
        cells.append(text(number(tokens / rate / one.machines.devices / DAY) if rate else "-"))
    if price:
        cells.append(_price(one, tokens or 1e9, price))
    return tuple(cells)


def _price(one: Prediction, tokens: float, price: float) -> Cell:
    if one.interval is None or one.tokens_per_second is None:
        return text("-")
    middle, dear, cheap = (
        number(price * tokens / rate / 3600) for rate in (one.tokens_per_second, *one.interval)
    )
    return text(middle, f"{cheap} to {dear}")


def _speed(one: Prediction) -> Cell:
    if one.interval is None or one.tokens_per_second is None:
        return text("cannot say")
    low, high = one.interval
    return text(f"{one.tokens_per_second:,.0f}", f"{low:,.0f} to {high:,.0f}")


def _below(one: Prediction) -> str:
    if one.unknown:
        return f"{one.machines.nodes} nodes: cannot say, {one.unknown}."
    return f"{one.machines.nodes} nodes: interval {'; '.join(one.distances)}." if one.distances else ""


def _parts(one: Prediction) -> Table:
    """Return what a step and a device are made of."""
    assert one.time is not None
    wholes = (
        ("time", asdict(one.time), one.time.seconds, 1, "s"),
        ("memory", asdict(one.memory), one.memory.bytes, GIB, "GiB"),
    )
    rows = [
        (
            text(what),
            text(name),
            text(f"{part / size:.3g} {unit}"),
            text(percent(part / whole) if whole else "-"),
        )
        for what, parts, whole, size, unit in wholes
        for name, part in parts.items()
    ]
    title = f"What it is made of at {one.machines.nodes} node(s)"
    return Table(title=title, columns=word_columns("of", "part", "amount", "share"), rows=tuple(rows))


def _notes(one: Prediction) -> list[str]:
    return [
        f"Software: {one.software.title}.",
        "The interval holds nine times of ten; docs/results/predictions.md has the errors.",
    ]
