"""Which hardware to choose: tokens a second of a device as published, as measured here, and as predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from twinrun.manifests.claims import Claim
from twinrun.manifests.published import Reference
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.memory import capacity
from twinrun.predict.parallel_layout import Recomputation, Shards
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import LayoutSettings, predict_at
from twinrun.protocol.models import ModelShape, member, members
from twinrun.results.record import Record, hardware

Mark = Literal["published", "measured", "predicted"]
SOFTWARE = "twinrun-2026"
DEVICES, GLOBAL_BATCH, PRECISION = 8, 512, "bf16"
TERA = 1e12
# Ways to train, the one that spares most first.
WAYS: tuple[tuple[str, Shards, Recomputation], ...] = (
    ("whole copies", "none", False),
    ("optimizer state split", "optimizer", False),
    ("all states split", "parameters", False),
    ("split, products kept", "parameters", "selective"),
    ("split, recomputed", "parameters", True),
)


@dataclass(frozen=True)
class KnownRate:
    """What somebody published, or what was measured here."""

    mark: Mark
    rate: float
    """Tokens a second of a device."""
    devices: int
    origin: str
    """Machine, date and software."""
    source: str
    """Document that published it, or the run that measured it."""
    power: float | None = None
    """Watts of a device, where they were sampled."""


@dataclass(frozen=True)
class HardwareChoice:
    """A GPU in one precision."""

    gpu: Gpu
    precision: str
    known: tuple[KnownRate, ...]
    predicted: Prediction | None
    """On a node of eight devices; None in another precision than predictions are of."""
    way: str | None
    """How little must be split or recomputed there; None where nothing fits."""

    def of(self, mark: Mark) -> list[KnownRate]:
        """Return what is known of a kind, fastest first."""
        return sorted((one for one in self.known if one.mark == mark), key=lambda one: -one.rate)

    @property
    def best(self) -> tuple[Mark, float] | None:
        """The fastest that was published or measured, else what is predicted; None where nothing is known."""
        if self.known:
            fastest = max(self.known, key=lambda one: one.rate)
            return fastest.mark, fastest.rate
        rate = self.predicted.tokens_per_second if self.predicted else None
        return ("predicted", rate) if rate else None


@dataclass(frozen=True)
class ModelChoices:
    """One model on every GPU."""

    name: str
    shape: ModelShape
    choices: tuple[HardwareChoice, ...]
    """Those with a number of somebody first, fastest first."""


def choices(project: Project, records: Sequence[Record], *, only: str | None = None) -> list[ModelChoices]:
    """Return the published models of the families, smallest first.

    Args:
        only: one model.
    """
    found: defaultdict[str, dict[tuple[str, str], list[KnownRate]]] = defaultdict(lambda: defaultdict(list))
    for model, gpu, precision, one in (*_published(project), *_measured(records)):
        if model in members() and only in {None, model}:
            found[model][gpu, precision].append(one)
    shapes = {name: member(name, place="model") for name in ([only] if only else found)}
    ordered = sorted(shapes.items(), key=lambda item: item[1].parameters())
    return [_of_model(project, name, shape, found[name]) for name, shape in ordered]


def _of_model(
    project: Project, name: str, shape: ModelShape, known: Mapping[tuple[str, str], Sequence[KnownRate]]
) -> ModelChoices:
    pairs = dict.fromkeys([*known, *((gpu, PRECISION) for gpu in project.gpus)])
    made = []
    for gpu, precision in pairs:
        row = project.gpus[gpu]
        way, predicted = _predicted(name, shape, row) if precision == PRECISION else (None, None)
        made.append(HardwareChoice(row, precision, tuple(known.get((gpu, precision), ())), predicted, way))
    made.sort(key=lambda one: (not one.known, -(one.best[1] if one.best else 0.0), one.gpu.id))
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


def _published(project: Project) -> Iterator[tuple[str, str, str, KnownRate]]:
    for loaded in project.recipes().values():
        for row in loaded.published.reference:
            if rate := _tokens(row, row.model, row.gpu, loaded, project):
                origin = row.label
                devices = row.cards * project.gpus[row.gpu].devices_per_card
                yield (
                    row.model,
                    row.gpu,
                    row.precision,
                    KnownRate("published", rate, devices, origin, row.source.document),
                )
        training = getattr(loaded.tables, "training", None)
        for claim in loaded.published.claim:
            if training is None or claim.kind != "absolute" or claim.hardware is None:
                continue
            if claim.configuration is not None:
                # A reference has the same number under the name of its model.
                continue
            place = claim.hardware
            if rate := _tokens(claim, training.model, place.gpu, loaded, project):
                devices = place.cards * project.gpus[place.gpu].devices_per_card
                origin = f"{place.software}, {place.cards:,} cards"
                one = KnownRate("published", rate, devices, origin, claim.source.document)
                yield training.model, place.gpu, training.precision, one


def _tokens(
    one: Reference | Claim, model: str, gpu_id: str, loaded: LoadedRecipe, project: Project
) -> float | None:
    """Return tokens a second of a device; None for another metric, or FLOP by a formula that is not known."""
    shape: ModelShape | None = getattr(loaded.tables, "models", {}).get(model)
    dies = {"device": 1, "card": project.gpus[gpu_id].devices_per_card}.get(one.per)
    if shape is None or dies is None or one.value is None:
        return None
    if (one.metric, one.unit) == ("tokens-per-second", "tokens/s"):
        return one.value / dies
    flops = shape.flops_by_formula().get(one.formula) if one.formula else None
    if (one.metric, one.unit) != ("model-flops", "TFLOP/s") or flops is None:
        return None
    return one.value * TERA / flops / dies


def _measured(records: Sequence[Record]) -> Iterator[tuple[str, str, str, KnownRate]]:
    """Yield the points of records on GPUs; one of a layout is no recipe to choose hardware by."""
    for record in records:
        training = getattr(record.plan.part, "training", None)
        if training is None or record.gpu is None or record.evidence != "measured":
            continue
        for point in record.points:
            rate, power = point.measurement("tokens-per-second"), point.measurement("power")
            if rate and getattr(point.part, "layout", None) is None:
                origin = f"{record.created[:10]}, {record.plan.stack}, {hardware(record)}"
                watts = power.median if power else None
                one = KnownRate("measured", rate.median, point.devices, origin, record.run, watts)
                yield training.model, record.gpu.id, training.precision, one
