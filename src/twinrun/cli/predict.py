"""The commands that predict a training on any machine, and that check the speed somebody says one had."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinrun.cli.console import demand_with, demand_without, print_json
from twinrun.foundation.errors import InputError, closest, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.settings import parse_settings
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import Calibration, Software, calibration
from twinrun.predict.configured_model import configured
from twinrun.predict.peak import checked_speed
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import GIGABIT, LayoutSettings, Trains, machines_of, predict_at, with_sequence
from twinrun.predict.search import Offer, best, unordered
from twinrun.protocol.models import ModelShape, member, members
from twinrun.report.prediction import DAY, peak_view, predictions_view, search_view
from twinrun.report.terminal import show

# Sequences of a step where a model is named and no recipe.
GLOBAL_BATCH = 512
SHOWN = 10


class PeakRequest(Frozen):
    """What `invoke peak` was asked."""

    gpu: str
    model: str
    """Member of a model family, a config.json, or a folder with one."""
    tokens_per_second: float
    """Tokens that a device is said to train in a second."""
    sequence: int | None
    fp8: bool


class PredictRequest(Frozen):
    """What `invoke predict` was asked."""

    subject: str
    """Folder of a recipe that trains, a member of a model family, a config.json, or a folder with one."""
    gpus: tuple[str, ...]
    nodes: tuple[int, ...]
    devices_per_node: int
    chose_devices: bool = True
    """Whether the user named the devices of a node."""
    network: float | None
    """Gbit/s of a node, all its adapters together."""
    software: str
    settings: tuple[str, ...]
    sweep: bool
    goal: float | None
    """Tokens a second of all devices."""
    tokens: float | None
    days: float | None
    prices: tuple[float, ...]
    """Prices of a device for an hour, in any currency: one for all GPUs or one for each, or none."""


def predict(root: Path, request: PredictRequest, *, as_json: bool) -> int:
    """Print what memory and time a training will need on each number of nodes."""
    project, known = Project(root), calibration()
    for one in request.gpus:
        require_known(one, sorted(project.gpus), "no such GPU", place="--gpu")
    _check(request)
    asked = _asked(project, request)
    software = known.of(request.software)
    prices = request.prices or (None,)
    priced = dict(zip(request.gpus, prices * (len(request.gpus) // len(prices)), strict=True))
    place = {"devices_per_node": request.devices_per_node, "network": request.network}
    if request.sweep:
        offers = [
            Offer(machines_of(project.gpus[one], nodes=nodes, **place), priced[one] or 1.0)  # type: ignore[arg-type]
            for one in request.gpus
            for nodes in request.nodes
        ]
        return _sweep(asked, offers, software, request, as_json=as_json)
    terms: dict[str, Any] = {**place, "software": software, "calibration": known}
    found = {
        one: [
            predict_at(asked.shape, project.gpus[one], asked.settings, nodes=nodes, **terms)
            for nodes in request.nodes
        ]
        for one in request.gpus
    }
    if as_json:
        every = [summary(one) for several in found.values() for one in several]
        print_json({"calibration": known.version, "not_understood": asked.strange, "predictions": every})
        return 0
    for one, several in found.items():
        others = _others(asked, project.gpus[one], request, known)
        show(predictions_view(several, said=(*asked.said, *others), tokens=request.tokens, price=priced[one]))
    return 0


def _others(asked: _Subject, gpu: Gpu, request: PredictRequest, known: Calibration) -> tuple[str, ...]:
    """Return a sentence on what other software that ran on the GPU would make of the first row."""
    place = {"devices_per_node": request.devices_per_node, "network": request.network}
    rates = {
        one.id: predict_at(
            asked.shape,
            gpu,
            asked.settings,
            nodes=request.nodes[0],
            software=one,
            calibration=known,
            **place,  # type: ignore[arg-type]
        ).tokens_per_second
        for one in known.known(gpu)
        if one.id != request.software
    }
    said = [f"{name} {rate:,.0f}" for name, rate in rates.items() if rate]
    return (f"With other software, tokens/s a device: {', '.join(said)}.",) if said else ()


def peak(root: Path, request: PeakRequest, *, as_json: bool) -> int:
    """Print which share of a GPU's peak a speed would be, by both formulas; return 1 where it is too much."""
    project = Project(root)
    require_known(request.gpu, sorted(project.gpus), "no such GPU", place="--gpu")
    if request.tokens_per_second <= 0:
        raise InputError(
            "expected an amount",
            place="--tokens-per-second",
            found=request.tokens_per_second,
            allowed="above 0",
        )
    gpu = project.gpus[request.gpu]
    shape, strange = _model(request.model, request.sequence)
    if request.fp8 and not gpu.fp8:
        raise InputError("its matrix units have no fp8", place="--fp8", found=gpu.name)
    found = checked_speed(
        shape, gpu, tokens_per_second=request.tokens_per_second, fp8=request.fp8, known=calibration()
    )
    if as_json:
        print_json({"gpu": gpu.id, "not_understood": strange, **asdict(found), "verdict": found.verdict})
    else:
        show(peak_view(found, said=_named(request.model, shape, strange)))
    return 1 if found.impossible else 0


def _check(request: PredictRequest) -> None:
    """Refuse amounts of nothing, and what only a sweep is asked; raises InputError."""
    amounts = [("--tokens", request.tokens), ("--days", request.days), ("--goal", request.goal)]
    for place, amount in (*amounts, *(("--price", price) for price in request.prices)):
        if amount is not None and amount <= 0:
            raise InputError("expected an amount", place=place, found=amount, allowed="above 0")
    if len(request.prices) not in {0, 1, len(request.gpus)}:
        raise InputError(
            "expected a price for each GPU",
            place="--price",
            found=f"{len(request.prices)} prices",
            allowed=f"1, or {len(request.gpus)}, the GPUs",
        )
    demand_with("--sweep", request.sweep, goal=request.goal, days=request.days)
    demand_without("--goal", request.goal is not None, days=request.days)
    demand_with("--tokens", request.tokens is not None, days=request.days)


@dataclass(frozen=True)
class _Subject:
    """The model and its training, and in words what nobody said."""

    shape: ModelShape
    settings: LayoutSettings
    said: tuple[str, ...]
    strange: tuple[str, ...] = ()
    """Keys of a config.json that were not understood."""


def _asked(project: Project, request: PredictRequest) -> _Subject:
    """Return the model and the settings of a recipe, of a member of a family or of somebody's config.json.

    Raises:
        InputError: there is none, the recipe trains nothing, or a setting is none.
    """
    name, given = request.subject, parse_settings(request.settings)
    fields = sorted(set(LayoutSettings.model_fields) - {"model"})
    for key in given:
        if key == "model" and not _is_recipe(project, name):
            raise InputError(
                "the model is the argument",
                place="--set model",
                found=given[key],
                hint=f"invoke predict {given[key]}",
            )
        if key not in {*fields, "model"}:
            hint = "--nodes and --devices-per-node" if key == "devices" else closest(key, fields)
            raise InputError("no such field", place=f"--set {key}", found=key, allowed=fields, hint=hint)
    if not _is_recipe(project, name):
        shape, strange = _model(name, given.get("sequence"))
        settings = LayoutSettings(model=name, global_batch=GLOBAL_BATCH).with_settings(given)
        defaults = [] if "global_batch" in given else [f"{GLOBAL_BATCH} sequences a step"]
        defaults += [] if "shards" in given else ["all states split (FSDP)"]
        defaults += [] if request.chose_devices else [f"{request.devices_per_node} devices a node"]
        said = f"Where nobody said: {', '.join(defaults)}." if defaults else ""
        return _Subject(shape, settings, tuple(filter(None, (*_named(name, shape, strange), said))), strange)
    recipe = project.recipe(name)
    training, models = recipe.tables.training, recipe.tables.models
    settings = LayoutSettings.of(training).with_settings(given)
    if settings.model not in models:
        raise InputError(
            "no such model",
            place="--set model",
            found=settings.model,
            allowed=sorted(models),
            hint=closest(settings.model, models),
        )
    shape = with_sequence(models[settings.model], settings.sequence)
    return _Subject(shape, settings, _named(f"{name}: {settings.model}", shape, ()))


def _is_recipe(project: Project, name: str) -> bool:
    """Say whether a subject is a recipe that trains; raises InputError for one that does not, or for none."""
    if name in members() or Path(name).suffix == ".json" or (Path(name) / "config.json").is_file():
        return False
    if "/" not in name and name not in project.recipe_names:
        return False
    if not isinstance(project.recipe(name).tables, Trains):
        raise InputError(
            "this recipe trains nothing", place=name, hint=f"name a model: {', '.join(sorted(members()))}"
        )
    return True


def _model(name: str, sequence: int | None) -> tuple[ModelShape, tuple[str, ...]]:
    """Return a member of a family, or a config.json's model with the keys that were not understood."""
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return configured(path, sequence=sequence)
    return with_sequence(member(name, place="invoke predict"), sequence), ()


def _named(name: str, shape: ModelShape, strange: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sentences that say what model it is."""
    size = f"{name}: {shape.parameters() / 1e9:.3g}B parameters, sequences of {shape.sequence:,} tokens."
    return (size, f"Not understood, and left out: {', '.join(strange)}.") if strange else (size,)


def _sweep(
    asked: _Subject, offers: list[Offer], software: Software, request: PredictRequest, *, as_json: bool
) -> int:
    """Print the cheapest layouts that reach the goal on any of the machines asked about."""
    goal = request.goal or 0.0
    if request.tokens and request.days:
        goal = request.tokens / (request.days * DAY)
    like = asked.settings.layout(software)
    searched = best(
        asked.shape, offers, like, software=software, calibration=calibration(), count=SHOWN, goal=goal
    )
    if as_json:
        shown = [
            summary(one.prediction)
            | {
                "tokens_per_second": one.tokens_per_second,
                "sure_tokens_per_second": one.sure_tokens_per_second,
                "price_of_1e9_tokens": one.price(1e9),
            }
            for one in searched.best
        ]
        counts = {"layouts": searched.seen, "fitting": searched.fitting, "left_out": searched.left_out}
        print_json({**counts, "no_order": unordered(searched), "goal": goal, "predictions": shown})
    else:
        tokens = request.tokens or 1e9
        show(search_view(searched, said=asked.said, goal=goal, tokens=tokens, priced=bool(request.prices)))
    return 0


def summary(one: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON: bytes, seconds, tokens of a device in a second."""
    machines = one.machines
    return {
        "gpu": machines.gpu.id,
        "nodes": machines.nodes,
        "devices_per_node": machines.devices_per_node,
        "network_gbit_s": None if machines.network is None else machines.network / GIGABIT,
        "model": one.shape.model_dump(),
        "parameters": one.shape.parameters(),
        "layout": asdict(one.layout),
        "software": one.software.id,
        "memory_bytes": asdict(one.memory) | {"total": one.memory.bytes},
        "fit": one.memory.fit(machines.gpu),
        "largest_microbatch": one.largest_microbatch,
        "step_seconds": None if one.time is None else asdict(one.time) | {"total": one.time.seconds},
        "tokens_per_second_per_device": one.tokens_per_second,
        "interval_90_percent": one.interval,
        "model_flops_share": one.model_flops_share,
        "formula": one.shape.formula,
        "cannot_say": one.unknown,
        "distances": one.distances,
    }
