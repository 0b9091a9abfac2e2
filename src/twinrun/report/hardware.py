"""Which hardware to choose: tokens a second of a device as published, as measured here and as predicted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.text import number, percent
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.memory import capacity
from twinrun.predict.parallel_layout import Recomputation, Shards
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import LayoutSettings, predict_at
from twinrun.protocol.models import ModelShape, member, members
from twinrun.report.charts import draw
from twinrun.report.page import page_environment, render_page
from twinrun.results.record import Record
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import ABSENT, Bar, BarChart, BarKind, Cell, Column, Table, text
from twinrun.workloads.workload import CardRate, PictureContext, RecordView

Mark = Literal["published", "measured", "predicted"]
SOFTWARE = "twinrun-2026"
DEVICES, GLOBAL_BATCH, PRECISION = 8, 512, "bf16"
# Ways to train, the one that spares most first.
WAYS: tuple[tuple[str, Shards, Recomputation], ...] = (
    ("whole copies", "none", False),
    ("optimizer state split", "optimizer", False),
    ("all states split", "parameters", False),
    ("split, products kept", "parameters", "selective"),
    ("split, recomputed", "parameters", True),
)


# A mark for each kind, so that colour never carries it alone: a diamond, a disc, a ring.
SIGNS: dict[Mark, str] = {"published": "◆", "measured": "●", "predicted": "○"}
# Each stays with its number.
MARKS: dict[Mark, str] = {mark: f"{sign}\N{NO-BREAK SPACE}" for mark, sign in SIGNS.items()}
TITLES = (
    "GPU",
    "precision",
    "place",
    "published: best recipe",
    "slowest recipe",
    "measured here",
    "predicted",
    "MFU",
    "tokens a joule",
    "memory left",
)
THOUSAND = 1e3


def per_device(rate: CardRate) -> float:
    """Return the tokens that a device trains in a second."""
    return (rate.tokens or 0.0) / rate.gpu.devices_per_card


def mark_of(rate: CardRate) -> Mark:
    """Return how a known speed is marked: a claim and a reference were both published."""
    return "measured" if rate.mark == "measured" else "published"


@dataclass(frozen=True)
class HardwareChoice:
    """A GPU in one precision."""

    gpu: Gpu
    precision: str
    known: tuple[CardRate, ...]
    predicted: Prediction | None
    """On a node of eight devices; None in another precision than predictions are of."""
    way: str | None
    """How little must be split or recomputed there; None where nothing fits."""

    def of(self, mark: Mark) -> list[CardRate]:
        """Return what is known of a kind, fastest first."""
        return sorted((one for one in self.known if mark_of(one) == mark), key=lambda one: -per_device(one))

    @property
    def best(self) -> tuple[Mark, float] | None:
        """The fastest that was published or measured, else the prediction, in tokens a second of a device."""
        if self.known:
            fastest = max(self.known, key=per_device)
            return mark_of(fastest), per_device(fastest)
        rate = self.predicted.tokens_per_second if self.predicted else None
        return ("predicted", rate) if rate else None

    @property
    def reach(self) -> tuple[float, float] | None:
        """Where its speed surely lies: what somebody reached, else the interval of a prediction."""
        if self.known and self.best:
            return self.best[1], self.best[1]
        return self.predicted.interval if self.predicted and self.way else None


@dataclass(frozen=True)
class ModelChoices:
    """One model on every GPU."""

    name: str
    shape: ModelShape
    choices: tuple[HardwareChoice, ...]
    """Sorted by the sure end of their speed, fastest first."""

    def place_of(self, choice: HardwareChoice) -> str:
        """Return the places that a choice may have: those that overlap have no order."""
        if choice.reach is None:
            return ABSENT
        low, high = choice.reach
        others = [one.reach for one in self.choices if one.reach and one is not choice]
        first = 1 + sum(other[0] > high for other in others)
        last = 1 + len(others) - sum(other[1] < low for other in others)
        return str(first) if first == last else f"{first} to {last}"


def choices(project: Project, records: Sequence[Record], *, only: str | None = None) -> list[ModelChoices]:
    """Return the published models of the families, smallest first.

    Args:
        records: judged records of any recipe; those that were sent in are left out.
        only: one model.
    """
    found: defaultdict[str, defaultdict[tuple[str, str], list[CardRate]]]
    found = defaultdict(lambda: defaultdict(list))
    for rate in _rates(project, records):
        if rate.model in members() and only in {None, rate.model}:
            found[rate.model][rate.gpu.id, rate.precision].append(rate)
    shapes = {name: member(name, place="model") for name in ([only] if only else found)}
    ordered = sorted(shapes.items(), key=lambda item: item[1].parameters())
    return [_of_model(project, name, shape, found[name]) for name, shape in ordered]


def _rates(project: Project, records: Sequence[Record]) -> Iterator[CardRate]:
    """Yield every speed that a recipe publishes or one of the records measured, in tokens a second."""
    views: defaultdict[str, list[RecordView]] = defaultdict(list)
    for record in records:
        if record.evidence == "measured":
            views[record.plan.recipe].append(record.shown())
    for name, loaded in project.recipes().items():
        drawn = PictureContext(recipe=loaded, gpus=project.gpus)
        rates = load_workload(loaded.workload).overview(views[name], drawn).rates
        yield from (rate for rate in rates if rate.tokens)


def _of_model(
    project: Project, name: str, shape: ModelShape, known: Mapping[tuple[str, str], Sequence[CardRate]]
) -> ModelChoices:
    pairs = dict.fromkeys([*known, *((gpu, PRECISION) for gpu in project.gpus)])
    made = []
    for gpu, precision in pairs:
        row = project.gpus[gpu]
        way, predicted = _predicted(name, shape, row) if precision == PRECISION else (None, None)
        made.append(HardwareChoice(row, precision, tuple(known.get((gpu, precision), ())), predicted, way))
    made.sort(key=lambda one: (-(one.reach[0] if one.reach else 0.0), one.gpu.id))
    return ModelChoices(name, shape, tuple(made))


def _predicted(name: str, shape: ModelShape, gpu: Gpu) -> tuple[str | None, Prediction]:
    """Return the way that fits and spares most, and what is predicted with all states split."""
    known, first, way = calibration(), None, None
    for title, shards, again in WAYS:
        settings = LayoutSettings(model=name, global_batch=GLOBAL_BATCH, shards=shards, recomputation=again)
        one = predict_at(
            shape,
            gpu,
            settings,
            nodes=1,
            devices_per_node=DEVICES,
            network=None,
            software=known.of(SOFTWARE),
            calibration=known,
        )
        fits = one.memory.fit(gpu) == "FITS"
        way = way or (title if fits else None)
        if shards == "parameters" and (first is None or (fits and first.memory.fit(gpu) != "FITS")):
            first = one
    assert first
    return way, first


def headroom(one: Prediction, gpu: Gpu) -> float:
    """Return the share of a device's memory that its states and gathered blocks leave."""
    states = one.memory.bytes - one.memory.activations - one.memory.logits
    return 1 - states / capacity(gpu)


def write_hardware_page(path: Path, found: Sequence[ModelChoices], prices: Mapping[str, float]) -> None:
    """Write the page as one HTML file; `prices` are of a device for an hour, by GPU."""
    first, models = first_sentence(found), _sections(found, prices)
    render_page(path, "hardware.html.j2", first=first, models=models)


def hardware_excerpt(found: Sequence[ModelChoices]) -> str:
    """Return the index of models for a page of the docs."""
    models = [
        {"name": one.name, "size": one.shape.parameters() / 1e9, "strip": strip_of(one)} for one in found
    ]
    return _markdown("hardware_excerpt.html.j2", first=first_sentence(found), models=models)


def model_page(one: ModelChoices) -> str:
    """Return the page of one model, in Markdown."""
    body = _markdown("hardware_model.html.j2", first=fastest(one), models=_sections([one], {}))
    head = f"---\nhide:\n  - toc\n---\n\n# {one.name}: which hardware to choose"
    return f"{head}\n\n[All models](../hardware.md)\n\n{body}\n"


def _markdown(template: str, **values: object) -> str:
    written = page_environment().get_template(template).render(values)
    # Markdown ends a block of HTML at an empty line.
    return "\n".join(line for line in written.splitlines() if line.strip())


def fastest(one: ModelChoices) -> str:
    """Say which GPU surely trains a model fastest, or which have no order."""
    rivals = [choice for choice in one.choices if one.place_of(choice).split(" ")[0] == "1"]
    names = [f"{choice.gpu.name} in {choice.precision}" for choice in rivals]
    if len(names) == 1:
        return f"The fastest of what is known and predicted is {names[0]}."
    return f"No order: {', '.join(names[:-1])} and {names[-1]} overlap." if names else "Nothing is known."


def strip_of(one: ModelChoices) -> dict[str, object]:
    """Return the small picture of a model: a mark for each GPU, in shares of the fastest."""
    spots = [(choice.best[0], *choice.reach) for choice in one.choices if choice.best and choice.reach]
    most = max((high for *_, high in spots), default=1.0)
    places = [{"mark": mark, "low": 100 * low / most, "high": 100 * high / most} for mark, low, high in spots]
    return {"spots": places, "said": fastest(one)}


def _sections(found: Sequence[ModelChoices], prices: Mapping[str, float]) -> list[dict[str, object]]:
    return [
        {"name": one.name, "tables": tables_of(one, prices), "picture": draw(picture_of(one))}
        for one in found
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


def tables_of(one: ModelChoices, prices: Mapping[str, float]) -> list[Table]:
    """Return the rows that somebody measured, then those that are predicted alone."""
    whole = table_of(one, prices)
    parts = list[Table]()
    for title, known in ((f"{whole.title}, published or measured", True), ("Predicted alone", False)):
        pairs = zip(one.choices, whole.rows, strict=True)
        rows = tuple(row for choice, row in pairs if bool(choice.known) == known)
        # The notes say what the signs mean, and stand once.
        notes = () if parts else whole.notes
        if rows:
            parts.append(whole.model_copy(update={"title": title, "rows": rows, "notes": notes}))
    return parts


def table_of(one: ModelChoices, prices: Mapping[str, float]) -> Table:
    """Return a row for each GPU and precision."""
    titles = (*TITLES, *(("price of 1B tokens",) if prices else ()))
    sources = dict.fromkeys(known.document for choice in one.choices for known in choice.of("published"))
    notes = (
        "◆ published, ● measured here, ○ predicted: tokens/s of a device; a card of two dies is two.",
        f"Sequences of {one.shape.sequence:,} tokens. Nine of ten numbers lie in a prediction's interval.",
        "Sorted by the sure end: what somebody reached, else the lower end of the prediction's interval.",
        "Place: two GPUs whose places overlap have no order.",
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
        text(one.place_of(choice)),
        _known(published[:1]),
        _known(published[-1:] if len(published) > 1 else []),
        _known(choice.of("measured")[:1]),
        _predicted_cell(choice),
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


def _known(found: Sequence[CardRate]) -> Cell:
    if not found:
        return text(ABSENT)
    one = found[0]
    return text(f"{MARKS[mark_of(one)]}{per_device(one):,.0f}", one.label)


def _predicted_cell(choice: HardwareChoice) -> Cell:
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
            return text(
                f"{MARKS['measured']}{per_device(one) / one.power:.1f}", f"of {one.power:.0f} W, sampled"
            )
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


def _bar(label: str, known: CardRate) -> Bar:
    rate = per_device(known) / THOUSAND
    kind: BarKind = "measured" if known.mark == "measured" else "published"
    return Bar(label=label, kind=kind, value=rate, low=rate, high=rate, detail="")


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
