"""The command that predicts memory and time of a training, on any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from twinrun.cli.console import demand_with, demand_without, print_json
from twinrun.foundation.errors import InputError, closest, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.settings import parse_settings
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import GIGABIT, LayoutSettings, predict_at
from twinrun.predict.search import Offer, best
from twinrun.protocol.models import ModelShape, member, members
from twinrun.protocol.training import Training
from twinrun.report.prediction import DAY, predictions_view, search_view
from twinrun.report.terminal import show

# Sequences of a step where a model is named and no recipe.
GLOBAL_BATCH = 512
SHOWN = 10


class PredictRequest(Frozen):
    """What `invoke predict` was asked."""

    subject: str
    """Folder of a recipe that trains, or a member of a model family."""
    gpus: tuple[str, ...]
    nodes: tuple[int, ...]
    devices_per_node: int
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
    given = parse_settings(request.settings)
    shape, settings = _subject(project, request.subject, given)
    terms: dict[str, Any] = {
        "devices_per_node": request.devices_per_node,
        "network": request.network,
        "software": known.of(request.software),
        "calibration": known,
    }
    prices = request.prices or (None,)
    priced = dict(zip(request.gpus, prices * (len(request.gpus) // len(prices)), strict=True))
    found = {
        one: [predict_at(shape, project.gpus[one], settings, nodes=nodes, **terms) for nodes in request.nodes]
        for one in request.gpus
    }
    if request.sweep:
        return _sweep(found, priced, request, as_json=as_json)
    if as_json:
        every = [_summary(one) for several in found.values() for one in several]
        print_json({"calibration": known.version, "predictions": every})
        return 0
    for one, several in found.items():
        show(predictions_view(several, tokens=request.tokens, price=priced[one]))
    return 0


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


def _subject(project: Project, name: str, given: dict[str, Any]) -> tuple[ModelShape, LayoutSettings]:
    """Return the model and the settings of a recipe, or of a member of a family.

    Raises:
        InputError: neither is called so, the recipe trains nothing, or a setting is none.
    """
    if "/" not in name and name not in project.recipe_names:
        shape = member(name, place="invoke predict")
        settings = LayoutSettings(model=name, global_batch=GLOBAL_BATCH)
        return shape, settings.with_settings(given)
    recipe = project.recipe(name)
    training, models = getattr(recipe.tables, "training", None), getattr(recipe.tables, "models", {})
    if not isinstance(training, Training):
        raise InputError(
            "this recipe trains nothing", place=name, hint=f"name a model: {', '.join(sorted(members()))}"
        )
    settings = LayoutSettings.of(training).with_settings(given)
    if settings.model not in models:
        raise InputError(
            "no such model",
            place="--set model",
            found=settings.model,
            allowed=sorted(models),
            hint=closest(settings.model, models),
        )
    return models[settings.model], settings


def _sweep(
    found: Mapping[str, Sequence[Prediction]],
    priced: Mapping[str, float | None],
    request: PredictRequest,
    *,
    as_json: bool,
) -> int:
    """Print the cheapest layouts that reach the goal on any of the machines asked about."""
    goal = request.goal or 0.0
    if request.tokens and request.days:
        goal = request.tokens / (request.days * DAY)
    offers = [Offer(one.machines, priced[gpu] or 1.0) for gpu, several in found.items() for one in several]
    like = next(iter(found.values()))[0]
    known = calibration()
    searched = best(
        like.shape, offers, like.layout, software=like.software, calibration=known, count=SHOWN, goal=goal
    )
    if as_json:
        shown = [
            _summary(one.prediction)
            | {"tokens_per_second": one.tokens_per_second, "price_of_1e9_tokens": one.price(1e9)}
            for one in searched.best
        ]
        print_json(
            {"layouts": searched.seen, "fitting": searched.fitting, "goal": goal, "predictions": shown}
        )
    else:
        tokens = request.tokens or 1e9
        show(search_view(searched, goal=goal, tokens=tokens, priced=bool(request.prices)))
    return 0


def _summary(one: Prediction) -> dict[str, Any]:
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
