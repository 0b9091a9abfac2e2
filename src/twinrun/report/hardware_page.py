"""The page "which hardware to choose": a table and a picture for each model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.files import write_atomically
from twinrun.foundation.text import number, percent
from twinrun.manifests.vendor import Gpu
from twinrun.report.charts import draw
from twinrun.report.hardware import (
    DEVICES,
    PRECISION,
    HardwareChoice,
    KnownRate,
    Mark,
    ModelChoices,
    headroom,
)
from twinrun.report.page import page_environment
from twinrun.workloads.tables_and_charts import ABSENT, Bar, BarChart, Cell, Column, Table, text

# Three marks: what somebody published, what was measured here, what is predicted; each stays with its number.
MARKS: dict[Mark, str] = {
    "published": "●\N{NO-BREAK SPACE}",
    "measured": "■\N{NO-BREAK SPACE}",
    "predicted": "△\N{NO-BREAK SPACE}",
}
TITLES = (
    "GPU",
    "precision",
    "published: best recipe",
    "slowest recipe",
    "measured here",
    "predicted",
    "MFU",
    "tokens a joule",
    "memory left",
)
THOUSAND = 1e3


def write_hardware_page(path: Path, found: Sequence[ModelChoices], prices: Mapping[str, float]) -> None:
    """Write the page as one HTML file; `prices` are of a device for an hour, by GPU."""
    template = page_environment().get_template("hardware.html.j2")
    write_atomically(path, template.render(first=first_sentence(found), models=_sections(found, prices)))


def hardware_excerpt(found: Sequence[ModelChoices]) -> str:
    """Return the same for a page of the docs."""
    template = page_environment().get_template("hardware_excerpt.html.j2")
    written = template.render(first=first_sentence(found), models=_sections(found, {}))
    # Markdown ends a block of HTML at an empty line.
    return "\n".join(line for line in written.splitlines() if line.strip())


def _sections(found: Sequence[ModelChoices], prices: Mapping[str, float]) -> list[dict[str, object]]:
    return [
        {"name": one.name, "table": table_of(one, prices), "picture": draw(picture_of(one))} for one in found
    ]


def first_sentence(found: Sequence[ModelChoices]) -> str:
    """Say what is known and what is not."""
    every = [(one.name, choice) for one in found for choice in one.choices]
    pairs = {(name, choice.gpu.id) for name, choice in every}
    published, measured = (
        {(name, choice.gpu.id) for name, choice in every if choice.of(mark)}
        for mark in ("published", "measured")
    )
    gpus = {choice.gpu.id: choice.gpu.name for _, choice in every}
    known = {gpu for _, gpu in published | measured}
    silent = ", ".join(sorted(name for gpu, name in gpus.items() if gpu not in known))
    here = " and ".join(sorted({gpus[gpu] for _, gpu in measured}))
    return (
        f"Of {len(pairs)} pairs of a model and a GPU, {len(published)} were published and {len(measured)}"
        f" measured here, on {here or 'no GPU'}; the other {len(pairs - published - measured)} are predicted"
        f" alone, and nobody's number is known of {silent or 'no GPU that is left'}."
    )


def table_of(one: ModelChoices, prices: Mapping[str, float]) -> Table:
    """Return a row for each GPU and precision."""
    titles = (*TITLES, *(("price of 1B tokens",) if prices else ()))
    sources = dict.fromkeys(known.source for choice in one.choices for known in choice.of("published"))
    notes = (
        "● published, ■ measured here, △ predicted: tokens/s of a device; a card of two dies is two.",
        f"Sequences of {one.shape.sequence:,} tokens. Nine of ten numbers lie in a prediction's interval.",
        f"Predicted: {DEVICES} devices of a node, {PRECISION}, states split, the largest microbatch.",
        f"MFU: {one.shape.formula} of the best number of the row over the dense 16-bit peak; none in fp8.",
        "Tokens a joule: the best number over what a card draws at most, or over what a record sampled.",
        "Memory left: what states and gathered blocks leave of a device, and how little must be split.",
        *([f"Published in: {'; '.join(sources)}."] if sources else []),
    )
    return Table(
        title=f"{one.name}, {one.shape.parameters() / 1e9:.3g}B parameters",
        columns=tuple(Column(title=title, numeric=place > 1) for place, title in enumerate(titles)),
        rows=tuple(_row(one, choice, prices) for choice in one.choices),
        notes=notes,
    )


def _row(one: ModelChoices, choice: HardwareChoice, prices: Mapping[str, float]) -> tuple[Cell, ...]:
    published, best = choice.of("published"), choice.best
    share = best[1] * one.shape.flops_per_token() / choice.gpu.device_peak_flops if best else None
    cells = [
        text(choice.gpu.name),
        text(choice.precision),
        _known(published[:1]),
        _known(published[-1:] if len(published) > 1 else []),
        _known(choice.of("measured")[:1]),
        _predicted(choice),
        text(f"{_mark(best)}{percent(share)}" if share and choice.precision == PRECISION else ABSENT),
        _joules(choice),
        _memory(choice),
    ]
    if prices:
        price = prices.get(choice.gpu.id)
        cost = price * 1e9 / best[1] / 3600 if price and best else None
        cells.append(text(f"{_mark(best)}{number(cost)}" if cost else ABSENT))
    return tuple(cells)


def _mark(best: tuple[Mark, float] | None) -> str:
    return MARKS[best[0]] if best else ""


def _known(found: Sequence[KnownRate]) -> Cell:
    if not found:
        return text(ABSENT)
    one = found[0]
    return text(f"{MARKS[one.mark]}{one.rate:,.0f}", one.origin)


def _predicted(choice: HardwareChoice) -> Cell:
    one = choice.predicted
    if one is None:
        return text("cannot say", f"rows that were fitted are in {PRECISION}")
    if choice.way is None:
        return text("does not fit", f"on {DEVICES} devices")
    if one.interval is None or one.tokens_per_second is None:
        return text("cannot say", one.unknown or "")
    low, high = one.interval
    return text(f"{MARKS['predicted']}{one.tokens_per_second:,.0f}", f"{low:,.0f} to {high:,.0f}")


def _joules(choice: HardwareChoice) -> Cell:
    gpu, best = choice.gpu, choice.best
    for one in choice.of("measured"):
        if one.power:
            return text(f"{MARKS['measured']}{one.rate / one.power:.1f}", f"of {one.power:.0f} W, sampled")
    if best is None or gpu.power_w is None:
        return text(ABSENT)
    joules = best[1] * gpu.devices_per_card / gpu.power_w
    return text(f"{_mark(best)}{joules:.1f}", f"of {gpu.power_w:.0f} W a card")


def _memory(choice: HardwareChoice) -> Cell:
    if choice.predicted is None:
        return text(ABSENT)
    left = headroom(choice.predicted, choice.gpu)
    return text(percent(max(0.0, left)), choice.way or f"does not fit on {DEVICES}")


def picture_of(one: ModelChoices) -> BarChart:
    """Return a bar for each number, those of one GPU together."""
    bars: list[Bar] = []
    for choice in one.choices:
        label = f"{choice.gpu.name}, {choice.precision}"
        for mark in ("published", "measured"):
            bars += [_bar(label, known) for known in choice.of(mark)[:1]]
        two = choice.predicted
        if two and choice.way and two.interval and two.tokens_per_second:
            low, high = two.interval
            value, low, high = (rate / THOUSAND for rate in (two.tokens_per_second, low, high))
            bars.append(Bar(label=label, kind="predicted", value=value, low=low, high=high, detail=""))
    return BarChart(
        name=f"hardware-{one.name}",
        title=f"{one.name}: tokens/s of a device",
        unit="thousand tokens/s of a device",
        better="higher",
        bars=tuple(bars),
        notes=("A line through a bar is the interval of a prediction.",),
    )


def _bar(label: str, known: KnownRate) -> Bar:
    rate = known.rate / THOUSAND
    assert known.mark != "predicted"
    return Bar(label=label, kind=known.mark, value=rate, low=rate, high=rate, detail="")


def prices_of(words: str, gpus: Mapping[str, Gpu]) -> dict[str, float]:
    """Read `h200=3.1,mi300x=2`: prices of a device for an hour.

    Raises:
        InputError: what is named is no GPU, or its price is not above 0.
    """
    found = {}
    for one in words.split(",") if words else ():
        name, _, price = one.partition("=")
        require_known(name, sorted(gpus), "no such GPU", place="--price")
        try:
            value = float(price)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise InputError("expected a price", place=f"--price {name}", found=price, allowed="above 0")
        found[name] = value
    return found
