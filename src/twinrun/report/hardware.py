"""Which hardware to choose: tokens a second of a device as published, as measured here and as predicted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.text import markdown_table, number, percent
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.memory import capacity
from twinrun.predict.parallel_layout import Recomputation, Shards
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import LayoutSettings, predict_at
from twinrun.protocol.models import ModelShape, member, members
from twinrun.report.charts import Row, RowChart, draw_rows, sign_of
from twinrun.report.page import page_environment, render_page
from twinrun.results.judged import Judged
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import ABSENT, Bar, Cell, Column, Table, text
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
    def prediction(self) -> tuple[float, float, float] | None:
        """Tokens a second of a device as predicted, and the ends of the interval; None where nothing fits."""
        one = self.predicted
        if one is None or self.way is None or one.interval is None or one.tokens_per_second is None:
            return None
        return (one.tokens_per_second, *one.interval)

    @property
    def best(self) -> tuple[Mark, float] | None:
        """The fastest that was published or measured, else the prediction, in tokens a second of a device."""
        if self.known:
            fastest = max(self.known, key=per_device)
            return mark_of(fastest), per_device(fastest)
        return ("predicted", self.prediction[0]) if self.prediction else None

    def marks(self, scale: float = 1.0) -> tuple[Bar, ...]:
        """Return the best numbers of each kind times `scale`, as marks of a picture."""
        found: list[tuple[Mark, float, float, float]] = []
        for one in (*self.of("published")[:1], *self.of("measured")[:1]):
            rate = per_device(one)
            found.append((mark_of(one), rate, rate, rate))
        found += [("predicted", *self.prediction)] if self.prediction else []
        return tuple(
            Bar(kind=mark, value=value * scale, low=low * scale, high=high * scale, label="", detail="")
            for mark, value, low, high in found
        )


@dataclass(frozen=True)
class ModelChoices:
    """One model on every GPU."""

    name: str
    shape: ModelShape
    choices: tuple[HardwareChoice, ...]
    """Sorted by the number that stands for each, fastest first."""


def choices(project: Project, records: Sequence[Judged], *, only: str | None = None) -> list[ModelChoices]:
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


def _rates(project: Project, records: Sequence[Judged]) -> Iterator[CardRate]:
    """Yield every speed that a recipe publishes or one of the records measured, in tokens a second."""
    views: defaultdict[str, list[RecordView]] = defaultdict(list)
    for record in records:
        if record.record.evidence == "measured":
            views[record.plan.recipe].append(record.view)
    for name, loaded in project.recipes().items():
        drawn = PictureContext(recipe=loaded, gpus=project.gpus)
        rates = load_workload(loaded.workload).overview(views[name], drawn).rates
        yield from (rate for rate in rates if rate.tokens)


def _of_model(
    project: Project, name: str, shape: ModelShape, known: Mapping[tuple[str, str], Sequence[CardRate]]
) -> ModelChoices:
    made = []
    for gpu, precision in dict.fromkeys([*known, *((gpu, PRECISION) for gpu in project.gpus)]):
        row = project.gpus[gpu]
        way, predicted = _predicted(name, shape, row) if precision == PRECISION else (None, None)
        made.append(HardwareChoice(row, precision, tuple(known.get((gpu, precision), ())), predicted, way))
    made.sort(key=lambda one: (-(one.best[1] if one.best else 0.0), one.gpu.id))
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


def write_hardware_page(path: Path, found: Sequence[ModelChoices], prices: Mapping[str, float]) -> None:
    """Write the page as one HTML file; `prices` are of a device for an hour, by GPU."""
    render_page(path, "hardware.html.j2", first=first_sentence(found), models=_sections(found, prices))


def hardware_excerpt(found: Sequence[ModelChoices]) -> str:
    """Return the index of models for a page of the docs: the fastest number of each kind, and its GPU."""
    rows = []
    for one in found:
        cells = [f"[{one.name}](hardware/{one.name}.md)", f"{one.shape.parameters() / 1e9:.3g}B"]
        for kind in ("published", "measured", "predicted"):
            marks = [(mark.value, two) for two in one.choices for mark in two.marks() if mark.kind == kind]
            best = max(marks, key=lambda found: found[0], default=None)
            named = f"{sign_of(kind)} {best[0]:,.0f}, {_named(best[1])}" if best else ABSENT
            cells.append(named)
        rows.append(cells)
    titles = ("model", "parameters", "fastest published", "measured here", "predicted")
    note = "Numbers are tokens/s of a device: a card of two dies is two. A model's page has every GPU."
    return f"**{first_sentence(found)}**\n\n{markdown_table(titles, rows)}\n\n{note}"


def _named(choice: HardwareChoice) -> str:
    return choice.gpu.name if choice.precision == PRECISION else f"{choice.gpu.name} in {choice.precision}"


def model_page(one: ModelChoices) -> str:
    """Return the page of one model, in Markdown."""
    template = page_environment().get_template("hardware_model.html.j2")
    written = template.render(first=fastest(one), models=_sections([one], {}))
    # Markdown ends a block of HTML at an empty line.
    body = "\n".join(line for line in written.splitlines() if line.strip())
    head = f"---\nhide:\n  - toc\n---\n\n# {one.name}: which hardware to choose"
    return f"{head}\n\n[All models](../hardware.md)\n\n{body}\n"


def fastest(one: ModelChoices) -> str:
    """Say which GPU is known to train a model fastest, and which of the others is predicted to."""
    said = []
    for verb, is_known in (("is known", True), ("of the other GPUs is predicted", False)):
        rows = [(two.best[1], two) for two in one.choices if two.best and bool(two.known) == is_known]
        if rows:
            rate, choice = max(rows, key=lambda found: found[0])
            said.append(f"The fastest that {verb} is {_named(choice)}, {rate:,.0f} tokens/s of a device.")
    return " ".join(said).replace("fastest that of", "fastest of") or "Nothing is known."


def first_sentence(found: Sequence[ModelChoices]) -> str:
    """Say how many pairs of a model and a GPU are known, by whom; the counts add up."""
    marks: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for one in found:
        for choice in one.choices:
            marks[one.name, choice.gpu.id] |= {mark.kind for mark in choice.marks()}
    kinds = {
        "are published alone": lambda had: "published" in had and "measured" not in had,
        "are published and measured here": lambda had: {"published", "measured"} <= had,
        "are measured here alone": lambda had: "measured" in had and "published" not in had,
        "are predicted alone": lambda had: had == {"predicted"},
        "have no number": lambda had: not had,
    }
    counts = {name: sum(map(test, marks.values())) for name, test in kinds.items()}
    *parts, last = [f"{count} {name}" for name, count in counts.items() if count] or ["none"]
    listed = f"{', '.join(parts)} and {last}" if parts else last
    return f"Of {len(marks)} pairs of a model and a GPU {listed}."


def _sections(found: Sequence[ModelChoices], prices: Mapping[str, float]) -> list[dict[str, object]]:
    return [
        {"name": one.name, "tables": [table_of(one, prices)], "picture": draw_rows(picture_of(one))}
        for one in found
    ]


def picture_of(one: ModelChoices) -> RowChart:
    """Return a row for each GPU and precision, with a mark for each kind of number."""
    rows = tuple(
        Row(label=_named(choice), marks=marks)
        for choice in one.choices
        if (marks := choice.marks(1 / THOUSAND))
    )
    return RowChart(
        name=f"hardware-{one.name}",
        title=f"{one.name}: tokens/s of a device, fastest first",
        x_label="thousand tokens/s of a device",
        rows=rows,
        notes=("Higher is better. Rows are sorted by what is known, else by what is predicted.",),
    )


def table_of(one: ModelChoices, prices: Mapping[str, float]) -> Table:
    """Return a row for each GPU and precision."""
    titles = (*TITLES, *(("price of 1B tokens",) if prices else ()))
    sources = dict.fromkeys(known.document for choice in one.choices for known in choice.of("published"))
    notes = (
        "◆ published, ● measured here, ○ predicted: tokens/s of a device; a card of two dies is two.",
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
    published, best, gpu = choice.of("published"), choice.best, choice.gpu
    share = best[1] * one.shape.flops_per_token() / gpu.device_peak_flops if best else None
    cells = [
        text(gpu.name),
        text(choice.precision),
        _known(published[:1]),
        _known(published[-1:] if len(published) > 1 else []),
        _known(choice.of("measured")[:1]),
        _predicted_cell(choice),
        _marked(best, percent(share) if share and choice.precision == PRECISION else None),
        _joules(choice),
        text(ABSENT) if choice.predicted is None else _memory(choice.predicted, choice),
    ]
    if prices:
        price = prices.get(gpu.id)
        cells.append(_marked(best, number(price * 1e9 / best[1] / 3600) if price and best else None))
    return tuple(cells)


def _marked(best: tuple[Mark, float] | None, said: str | None, detail: str = "") -> Cell:
    # A mark stays with its number.
    return text(f"{sign_of(best[0])}\N{NO-BREAK SPACE}{said}", detail) if best and said else text(ABSENT)


def _known(found: Sequence[CardRate]) -> Cell:
    return next(
        (_marked((mark_of(one), 0), f"{per_device(one):,.0f}", one.label) for one in found), text(ABSENT)
    )


def _predicted_cell(choice: HardwareChoice) -> Cell:
    one = choice.predicted
    if choice.prediction:
        rate, low, high = choice.prediction
        return _marked(("predicted", rate), f"{rate:,.0f}", f"{low:,.0f} to {high:,.0f}")
    if one is not None and choice.way is None:
        return text("does not fit", f"on {DEVICES} devices")
    return text("cannot say", (one.unknown or "") if one else f"rows that were fitted are in {PRECISION}")


def _joules(choice: HardwareChoice) -> Cell:
    gpu, best = choice.gpu, choice.best
    for one in choice.of("measured"):
        if one.power:
            rate = f"{per_device(one) / one.power:.1f}"
            return _marked(("measured", 0), rate, f"of {one.power:.0f} W, sampled")
    if best is None or gpu.power_w is None:
        return text(ABSENT)
    joules = best[1] * gpu.devices_per_card / gpu.power_w
    return _marked(best, f"{joules:.1f}", f"of {gpu.power_w:.0f} W a card")


def _memory(one: Prediction, choice: HardwareChoice) -> Cell:
    states = one.memory.bytes - one.memory.activations - one.memory.logits
    left = 1 - states / capacity(choice.gpu)
    return text(percent(max(0.0, left)), choice.way or f"does not fit on {DEVICES}")


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
