"""Which hardware to choose: tokens a second of a device as published, as measured here and as predicted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from twinrun.foundation.errors import InputError, require_known
from twinrun.foundation.text import markdown_table, number, percent
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import SOFTWARE, calibration
from twinrun.predict.parallel_layout import Machines, Recomputation, Shards
from twinrun.predict.prediction import Prediction, predict
from twinrun.predict.request import LayoutSettings
from twinrun.protocol.models import ModelShape, member, members
from twinrun.report.charts import draw, sign_of
from twinrun.report.page import figure_text, render_page
from twinrun.results.judged import Judged
from twinrun.workloads import load_workload
from twinrun.workloads.tables_and_charts import (
    ABSENT,
    Cell,
    Column,
    Mark,
    MarkKind,
    Row,
    RowChart,
    Table,
    exact_mark,
    text,
)
from twinrun.workloads.workload import CardRate, PictureContext, RecordView

Origin = Literal["published", "measured", "predicted"]
DEVICES, GLOBAL_BATCH, PRECISION = 8, 512, "bf16"
# Ways to train, the one that spares most first.
WAYS: tuple[tuple[str, Shards, Recomputation], ...] = (
    ("whole copies", "none", False),
    ("optimizer state split", "optimizer", False),
    ("all states split", "parameters", False),
    ("split, products kept", "parameters", "selective"),
    ("split, recomputed", "parameters", True),
)
THOUSAND = 1e3


def per_device(rate: CardRate) -> float:
    """Return the tokens that a device trains in a second."""
    return (rate.tokens or 0.0) / rate.gpu.devices_per_card


def mark_of(rate: CardRate) -> Origin:
    """Return how a known speed is marked: a claim and a reference were both published."""
    return "measured" if rate.mark == "measured" else "published"


def marked(kind: MarkKind, said: str) -> str:
    """Return a number after its mark, from which no line break parts it."""
    return f"{sign_of(kind)}\N{NO-BREAK SPACE}{said}"


@dataclass(frozen=True)
class HardwareChoice:
    """A GPU in one precision."""

    gpu: Gpu
    precision: str
    known: tuple[CardRate, ...]
    """Fastest first."""
    predicted: Prediction | None
    """On a node of eight devices; None in another precision than predictions are of."""
    way: str | None
    """How little must be split or recomputed there; None where nothing fits."""

    @cached_property
    def numbers(self) -> dict[str, Mark]:
        """The best number of each kind, by its kind, in tokens a second of a device."""
        found, kinds = dict[str, Mark](), dict[Origin, list[float]]()
        for rate in self.known:
            kinds.setdefault(mark_of(rate), []).append(per_device(rate))
        for kind, speeds in kinds.items():
            said = next(one.label for one in self.known if mark_of(one) == kind)
            slowest = f"; slowest recipe {speeds[-1]:,.0f}" if len(speeds) > 1 else ""
            found[kind] = exact_mark(kind, speeds[0], f"{said}{slowest}")
        one = self.predicted
        if one and self.way and one.interval and one.tokens_per_second:
            low, high = one.interval
            said = f"{low:,.0f} to {high:,.0f}; {self.way}"
            mark = Mark(kind="predicted", value=one.tokens_per_second, low=low, high=high, detail=said)
            found["predicted"] = mark
        return found

    @property
    def best(self) -> Mark | None:
        """The fastest that was published or measured, else the prediction."""
        known = [one for kind, one in self.numbers.items() if kind != "predicted"]
        return max(known, key=lambda one: one.value, default=self.numbers.get("predicted"))

    @property
    def name(self) -> str:
        """The GPU, and a precision that is not the usual one."""
        return self.gpu.name if self.precision == PRECISION else f"{self.gpu.name} in {self.precision}"

    def marks(self, scale: float) -> tuple[Mark, ...]:
        """Return the numbers times `scale`, as marks of a picture."""
        return tuple(
            Mark(kind=one.kind, value=one.value * scale, low=one.low * scale, high=one.high * scale)
            for one in self.numbers.values()
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
    rates = [one for one in _rates(project, records) if one.model in members()]
    names = [only] if only else dict.fromkeys(one.model for one in rates)
    shapes = ((name, member(name, place="model")) for name in names)
    return [
        _of_model(project, name, shape, [one for one in rates if one.model == name])
        for name, shape in sorted(shapes, key=lambda item: item[1].parameters())
    ]


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


def _of_model(project: Project, name: str, shape: ModelShape, known: Sequence[CardRate]) -> ModelChoices:
    made = []
    pairs = [*((one.gpu.id, one.precision) for one in known), *((gpu, PRECISION) for gpu in project.gpus)]
    for gpu, precision in dict.fromkeys(pairs):
        row = project.gpus[gpu]
        way, predicted = _predicted(shape, row) if precision == PRECISION else (None, None)
        rates = [one for one in known if (one.gpu.id, one.precision) == (gpu, precision)]
        rates.sort(key=per_device, reverse=True)
        made.append(HardwareChoice(row, precision, tuple(rates), predicted, way))
    made.sort(key=lambda one: (-(one.best.value if one.best else 0.0), one.gpu.id))
    return ModelChoices(name, shape, tuple(made))


def _predicted(shape: ModelShape, gpu: Gpu) -> tuple[str | None, Prediction]:
    """Return the way that fits and spares most, and what is predicted with all states split."""
    first, way, software = None, None, calibration().of(SOFTWARE)
    machines = Machines.of(gpu, nodes=1, devices_per_node=DEVICES, network=None)
    for title, shards, again in WAYS:
        settings = LayoutSettings(global_batch=GLOBAL_BATCH, shards=shards, recomputation=again)
        one = predict(settings.subject(shape, machines, software))
        fits = one.memory.fit(gpu) == "FITS"
        way = way or (title if fits else None)
        if shards == "parameters" and (first is None or (fits and first.memory.fit(gpu) != "FITS")):
            first = one
    assert first
    return way, first


def write_hardware_page(path: Path, found: Sequence[ModelChoices], prices: Mapping[str, float]) -> None:
    """Write the page as one HTML file; `prices` are of a device for an hour, by GPU."""
    models = [(one.name, fastest(one), draw(picture_of(one)), table_of(one, prices)) for one in found]
    render_page(path, "hardware.html.j2", models=models)


def hardware_excerpt(found: Sequence[ModelChoices]) -> str:
    """Return the index of models for a page of the docs: what trains each fastest."""
    rows = [
        (f"[{one.name}](hardware/{one.name}.md)", f"{one.shape.parameters() / 1e9:.3g}B", fastest(one))
        for one in found
    ]
    note = "Numbers are tokens/s of a device: a card of two dies is two. A model's page has every GPU."
    return f"{markdown_table(('model', 'parameters', 'fastest'), rows)}\n\n{note}"


def model_page(one: ModelChoices) -> str:
    """Return the page of one model, in Markdown."""
    table = table_of(one, {})
    rows = [[f"{cell.text} {cell.detail}".strip() for cell in row] for row in table.rows]
    numbers = markdown_table([column.title for column in table.columns], rows)
    parts = [
        f"---\nhide:\n  - toc\n---\n\n# {one.name}: which hardware to choose",
        f"[All models](../hardware.md)\n\n**{fastest(one)}**",
        f'<div class="excerpt">\n{figure_text(draw(picture_of(one)))}\n</div>',
        f"## {table.title}\n\n{numbers}",
        *table.notes,
    ]
    return "\n\n".join(parts) + "\n"


def fastest(one: ModelChoices) -> str:
    """Say which GPU is known to train a model fastest, and which of the others is predicted to."""
    said = {True: "The fastest that is known", False: "The fastest of the others, as predicted,"}
    parts = []
    for is_known, start in said.items():
        # Sorted by the number that stands for each.
        found = ((two, two.best) for two in one.choices if bool(two.known) == is_known)
        two, best = next(((two, best) for two, best in found if best), (None, None))
        if two and best:
            parts.append(f"{start} is {two.name}, {best.value:,.0f} tokens/s of a device.")
    return " ".join(parts) or "Nothing is known."


def picture_of(one: ModelChoices) -> RowChart:
    """Return a row for each GPU and precision, with a mark for each kind of number."""
    found = (choice for choice in one.choices if choice.numbers)
    rows = tuple(Row(label=choice.name, marks=choice.marks(1 / THOUSAND)) for choice in found)
    return RowChart(
        name=f"hardware-{one.name}",
        title=f"{one.name}: tokens/s of a device, fastest first",
        x_label="thousand tokens/s of a device",
        rows=rows,
        notes=("Higher is better. Rows are sorted by what is known, else by what is predicted.",),
    )


def table_of(one: ModelChoices, prices: Mapping[str, float]) -> Table:
    """Return a row for each GPU and precision."""
    rows = [_row(one, choice, prices) for choice in one.choices]
    known = (two for choice in one.choices for two in choice.known if mark_of(two) == "published")
    sources = dict.fromkeys(two.document for two in known)
    notes = (
        "◆ published, ● measured here, ○ predicted: tokens/s of a device; a card of two dies is two.",
        f"Sequences of {one.shape.sequence:,} tokens. Nine of ten numbers lie in a prediction's interval.",
        f"Predicted: {DEVICES} devices of a node, {PRECISION}, states split, the largest microbatch.",
        f"MFU: {one.shape.formula} of the best number of the row over the dense 16-bit peak; none in fp8.",
        *([f"Published in: {'; '.join(sources)}."] if sources else []),
    )
    return Table(
        title=f"{one.name}, {one.shape.parameters() / 1e9:.3g}B parameters",
        columns=tuple(Column(title=title, numeric=place > 1) for place, title in enumerate(rows[0])),
        rows=tuple(tuple(row.values()) for row in rows),
        notes=notes,
    )


def _row(one: ModelChoices, choice: HardwareChoice, prices: Mapping[str, float]) -> dict[str, Cell]:
    """Return the cells of a GPU in one precision, by their headings."""
    best, gpu, known = choice.best, choice.gpu, {kind: _shown(two) for kind, two in choice.numbers.items()}
    cells = {
        "GPU": text(gpu.name),
        "precision": text(choice.precision),
        "published": known.get("published", text(ABSENT)),
        "measured here": known.get("measured", text(ABSENT)),
        "predicted": known.get("predicted", _unknown(choice)),
        "MFU": text(ABSENT),
        **({"price of 1B tokens": text(ABSENT)} if prices else {}),
    }
    if best and choice.precision == PRECISION:
        share = best.value * one.shape.flops_per_token() / gpu.device_peak_flops
        cells["MFU"] = text(marked(best.kind, percent(share)))
    if best and (price := prices.get(gpu.id)):
        cells["price of 1B tokens"] = text(marked(best.kind, number(price * 1e9 / best.value / 3600)))
    return cells


def _shown(one: Mark) -> Cell:
    return text(marked(one.kind, f"{one.value:,.0f}"), one.detail)


def _unknown(choice: HardwareChoice) -> Cell:
    if choice.predicted is None:
        return text("cannot say", f"rows that were fitted are in {PRECISION}")
    if choice.way is None:
        return text("does not fit", f"on {DEVICES} devices")
    return text("cannot say", choice.predicted.unknown or "")


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
