"""Predictions on the terminal: memory, time with its interval, and the parts of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from twinrun.foundation.text import GIB, number, percent
from twinrun.predict.memory import capacity
from twinrun.predict.parallel_layout import Recomputation
from twinrun.predict.prediction import Prediction
from twinrun.predict.search import Search
from twinrun.report.tables import View
from twinrun.workloads.tables_and_charts import ABSENT, Cell, Column, Table, text, word_columns

DAY, UNKNOWN = 86400, "cannot say"
RECOMPUTED: dict[Recomputation, str] = {True: "whole", False: "none"}
INTERVAL = "The interval holds nine times of ten; docs/results/predictions.md has the errors."


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
    rows = [_row(one, tokens=tokens, price=price) for one in found]
    layout = f"{first.layout.global_batch:,} sequences a step, {_layout(first)}."
    table = Table(
        title=f"{machines.gpu.name}, {machines.devices_per_node} devices a node: predicted, not measured",
        columns=tuple(Column(title=one, numeric=one != "fit") for one in rows[0]),
        rows=tuple(tuple(row.values()) for row in rows),
        notes=(*said, layout, f"Software: {first.software.title}.", INTERVAL),
    )
    return Group(View(table, below=[_below(one) for one in found]))


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
    reasons = [f"Cannot say: {one}." for one in found.unknown]
    if left := found.left_out:
        reasons.append(f"Left out, since no layout divides ({len(left)}): {'; '.join(left)}.")
    counted = f"{found.fitting:,} of {found.seen:,} layouts surely fit"
    if not found.best:
        fastest = f"; the fastest makes {found.fastest.rate:,.0f}" if found.fastest else ""
        asked = f", none reaches {goal:,.0f} tokens/s{fastest}" if goal and found.fitting else ""
        return Group(*map(Text, (f"{counted}{asked}.", *reasons)))
    days, cost = f"days of {tokens:.3g} tokens", "price" if priced else "device-hours"
    counts = ("microbatch", "memory, GiB", "tokens/s in all", days, f"{cost} of them")
    notes = [*said, f"{counted}.", f"Software: {found.best[0].software.title}.", INTERVAL]
    if names := found.unordered:
        notes.append(f"No order between {', '.join(names)}: their intervals overlap.")
    which = "reach the goal" if goal else "fit"
    table = Table(
        title=f"Cheapest first by what is sure, of layouts that {which}: predicted, not measured",
        columns=(*word_columns("machines", "layout"), *(Column(title=title) for title in counts)),
        rows=tuple(_placed(one, goal=goal, tokens=tokens) for one in found.best),
    )
    return Group(View(table), *map(Text, (*notes, *reasons)))


def _placed(one: Prediction, *, goal: float, tokens: float) -> tuple[Cell, ...]:
    machines, rate = one.machines, one.rate
    low, high = (side * machines.devices for side in one.interval or (0.0, 0.0))
    cost, cheap, dear = map(number, one.prices(tokens))
    sure = "" if not goal else "; surely" if low >= goal else "; likely"
    return (
        text(machines.gpu.name, f"{machines.nodes} x {machines.devices_per_node} devices"),
        text(_layout(one)),
        text(str(one.layout.microbatch)),
        text(number(one.memory.bytes / GIB)),
        text(f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}{sure}"),
        text(number(tokens / rate / DAY)),
        text(cost, f"{cheap} to {dear}"),
    )


def _layout(one: Prediction) -> str:
    """Return a layout in words."""
    layout = one.layout
    sizes = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context")}
    cuts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    cuts += [f"{layout.interleaved} parts a stage"] * (layout.interleaved > 1)
    cuts += [f"experts over {layout.experts}"] * (layout.experts > 1)
    cuts += [name for name in ("sequence_parallel", "zero_bubble") if getattr(layout, name)]
    cuts += [layout.precision] * (layout.precision != "bf16")
    shards = "whole copies" if layout.shards == "none" else f"{layout.shards} split"
    again = RECOMPUTED.get(layout.recomputation, str(layout.recomputation))
    return ", ".join([*cuts, shards, f"recomputation {again}"]).replace("_", " ")


def _row(one: Prediction, *, tokens: float | None, price: float | None) -> dict[str, Cell]:
    """Return the cells of a prediction, by their headings."""
    gpu, rate, (low, high) = one.machines.gpu, one.tokens_per_second, one.interval or (0.0, 0.0)
    share, budget = one.model_flops_share, tokens or 1e9
    cells = {
        "nodes": text(str(one.machines.nodes)),
        "microbatch": text(str(one.layout.microbatch), f"at most {one.largest_microbatch or 'none'}"),
        "memory, GiB": text(number(one.memory.bytes / GIB), f"of {capacity(gpu) / GIB:.0f}"),
        "fit": text(one.memory.fit(gpu)),
        "tokens/s a device": text(f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}") if rate else text(UNKNOWN),
        "MFU": text(percent(share) if share else ABSENT, one.shape.formula),
        "step, s": text(number(one.time.seconds) if one.time else UNKNOWN),
    }
    if tokens:
        days = number(tokens / rate / one.machines.devices / DAY) if rate else ABSENT
        cells[f"days of {tokens:.3g} tokens"] = text(days)
    if price:
        costs = [number(price * budget / each / 3600) for each in (rate, high, low) if each]
        cost = text(costs[0], " to ".join(costs[1:])) if costs else text(ABSENT)
        cells[f"price of {budget:.3g} tokens"] = cost
    return cells


def _below(one: Prediction) -> str:
    if one.unknown:
        return f"{one.machines.nodes} nodes: cannot say, {one.unknown}."
    words = f"no row has {', nor '.join(one.distances)}" if one.distances else ""
    learned = ""
    if one.runs:
        factors = [number(math.exp(half)) for half in (one.half_without_runs, one.half)]
        learned = f"{one.runs} run(s) narrow the interval from a factor of {factors[0]} to {factors[1]}"
    said = "; ".join(filter(None, (learned, words)))
    return f"{one.machines.nodes} nodes: {said}." if said else ""
