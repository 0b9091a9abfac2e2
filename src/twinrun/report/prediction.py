"""Predictions on the terminal: memory, time with its interval, and the parts of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from rich.console import Group
from rich.text import Text

from twinrun.foundation.text import GIB, number, percent
from twinrun.predict.memory import capacity
from twinrun.predict.parallel_layout import Recomputation
from twinrun.predict.prediction import Prediction
from twinrun.predict.search import OfferedLayout, Search
from twinrun.report.tables import View
from twinrun.workloads.tables_and_charts import Cell, Column, Table, text, word_columns

DAY = 86400
RECOMPUTED: dict[Recomputation, str] = {True: "whole", False: "none", "selective": "selective"}


def predictions_view(
    found: Sequence[Prediction], *, tokens: float | None = None, price: float | None = None
) -> Group:
    """Return a table of predictions, a row for each number of nodes, and what they rest on.

    Args:
        tokens: a budget of tokens, for which days are shown.
        price: of a device for an hour, for which a price is shown.
    """
    first = found[0]
    machines = first.machines
    title = f"{machines.gpu.name}, {machines.devices_per_node} devices a node: predicted, not measured"
    headings = ["nodes", "microbatch", "memory, GiB", "fit", "tokens/s a device", "MFU", "step, s"]
    headings += ["days"] if tokens else []
    headings += ["price of 1B tokens"] if price else []
    rows = tuple(_row(one, tokens=tokens, price=price) for one in found)
    columns = tuple(Column(title=one, numeric=one != "fit") for one in headings)
    table = Table(title=title, columns=columns, rows=rows, notes=tuple(_notes(first)))
    parts = [View(_parts(one)) for one in found if one.time is not None][:1]
    return Group(View(table, below=[_below(one) for one in found]), *parts)


def search_view(found: Search, *, goal: float, tokens: float, priced: bool) -> Group:
    """Return the best layouts, cheapest first, or why there is none.

    Args:
        goal: tokens a second of all devices that were asked for, 0 for none.
        tokens: whose days and price are shown.
        priced: whether a device has a price; device-hours are shown where it has none.
    """
    reasons = [Text(f"Cannot say: {one}.") for one in found.unknown]
    counted = f"{found.fitting:,} of {found.seen:,} layouts surely fit"
    if not found.best:
        fastest = f"; the fastest makes {found.fastest.tokens_per_second:,.0f}" if found.fastest else ""
        asked = f", none reaches {goal:,.0f} tokens/s{fastest}" if goal and found.fitting else ""
        return Group(Text(f"{counted}{asked}."), *reasons)
    cost = "price" if priced else "device-hours"
    titles = ("machines", "layout", "microbatch", "memory, GiB", "tokens/s in all")
    budget = (f"days of {tokens:.3g} tokens", f"{cost} of them")
    numeric = (False, False, True, True, True, True, True)
    columns = tuple(
        Column(title=title, numeric=one) for title, one in zip((*titles, *budget), numeric, strict=True)
    )
    title = f"Cheapest first, of layouts that {'reach the goal' if goal else 'fit'}: predicted, not measured"
    rows = tuple(_placed(one, goal=goal, tokens=tokens) for one in found.best)
    notes = [f"{counted}.", *_notes(found.best[0].prediction)]
    return Group(View(Table(title=title, columns=columns, rows=rows)), *map(Text, notes), *reasons)


def _placed(one: OfferedLayout, *, goal: float, tokens: float) -> tuple[Cell, ...]:
    layout, machines, rate = one.prediction.layout, one.offer.machines, one.tokens_per_second
    low, high = (side * machines.devices for side in one.prediction.interval or (0.0, 0.0))
    sure = "" if not goal else "; surely" if low >= goal else "; likely"
    cuts = [f"tensor {layout.tensor}"] * (layout.tensor > 1)
    parts = f" x {layout.interleaved} parts" if layout.interleaved > 1 else ""
    cuts += [f"pipeline {layout.pipeline}{parts}"] * (layout.pipeline > 1)
    shards = "whole copies" if layout.shards == "none" else f"{layout.shards} split"
    again = f"recomputation {RECOMPUTED[layout.recomputation]}"
    return (
        text(machines.gpu.name, f"{machines.nodes} x {machines.devices_per_node} devices"),
        text(", ".join([*cuts, shards]), again),
        text(str(layout.microbatch)),
        text(number(one.prediction.memory.bytes / GIB)),
        text(f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}{sure}"),
        text(number(tokens / rate / DAY)),
        text(number(one.price(tokens))),
    )


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
        cells.append(text(number(price * 1e9 / rate / 3600) if rate else "-"))
    return tuple(cells)


def _speed(one: Prediction) -> Cell:
    if one.interval is None or one.tokens_per_second is None:
        return text("cannot say")
    low, high = one.interval
    return text(f"{one.tokens_per_second:,.0f}", f"{low:,.0f} to {high:,.0f}")


def _below(one: Prediction) -> str:
    if one.unknown:
        return f"Cannot say: {one.unknown}."
    return f"Interval: {'; '.join(one.distances)}." if one.distances else ""


def _parts(one: Prediction) -> Table:
    """Return what a step and a device are made of."""
    assert one.time is not None
    seconds = one.time.seconds
    rows = [
        (
            text("time"),
            text(part.name),
            text(f"{getattr(one.time, part.name):.3g} s"),
            _share(getattr(one.time, part.name), seconds),
        )
        for part in fields(one.time)
    ]
    rows += [
        (
            text("memory"),
            text(part.name),
            text(f"{getattr(one.memory, part.name) / GIB:.3g} GiB"),
            _share(getattr(one.memory, part.name), one.memory.bytes),
        )
        for part in fields(one.memory)
    ]
    title = f"What it is made of at {one.machines.nodes} node(s)"
    return Table(title=title, columns=word_columns("of", "part", "amount", "share"), rows=tuple(rows))


def _share(part: float, whole: float) -> Cell:
    return text(percent(part / whole) if whole else "-")


def _notes(one: Prediction) -> list[str]:
    return [
        f"Software: {one.software.title}.",
        "The interval holds nine times of ten; docs/results/predictions.md has the errors.",
    ]
