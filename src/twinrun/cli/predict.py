"""The command that predicts memory and time of a training, on any machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from twinrun.cli.console import print_json
from twinrun.foundation.errors import InputError, closest, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.settings import parse_settings
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import GIGABIT, LayoutSettings, predict_at
from twinrun.predict.search import best
from twinrun.protocol.models import ModelShape, member, members
from twinrun.protocol.training import Training
from twinrun.report.prediction import predictions_view, search_view
from twinrun.report.terminal import show

# Sequences of a step where a model is named and no recipe.
GLOBAL_BATCH = 512
SHOWN = 10


class PredictRequest(Frozen):
    """What `invoke predict` was asked."""

    subject: str
    """Folder of a recipe that trains, or a member of a model family."""
    gpu: str
    nodes: tuple[int, ...]
    devices_per_node: int
    network: float | None
    """Gbit/s of a node, all its adapters together."""
    software: str
    settings: tuple[str, ...]
    sweep: bool
    tokens: float | None
    price: float | None
    """Of a device for an hour, in any currency."""


def predict(root: Path, request: PredictRequest, *, as_json: bool) -> int:
    """Print what memory and time a training will need on each number of nodes."""
    project, known = Project(root), calibration()
    require_known(request.gpu, sorted(project.gpus), "no such GPU", place="--gpu")
    for place, amount in (("--price", request.price), ("--tokens", request.tokens)):
        if amount is not None and amount <= 0:
            raise InputError("expected an amount", place=place, found=amount, allowed="above 0")
    given = parse_settings(request.settings)
    shape, settings = _subject(project, request.subject, given)
    terms: dict[str, Any] = {
        "devices_per_node": request.devices_per_node,
        "network": request.network,
        "software": known.of(request.software),
        "calibration": known,
    }
    gpu = project.gpus[request.gpu]
    found = [predict_at(shape, gpu, settings, nodes=nodes, **terms) for nodes in request.nodes]
    if request.sweep:
        return _sweep(found[-1], as_json=as_json)
    if as_json:
        print_json({"calibration": known.version, "predictions": [_summary(one) for one in found]})
    else:
        show(predictions_view(found, tokens=request.tokens, price=request.price))
    return 0


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


def _sweep(like: Prediction, *, as_json: bool) -> int:
    found, seen = best(
        like.shape,
        like.machines,
        like.layout,
        software=like.software,
        calibration=calibration(),
        count=SHOWN,
    )
    if as_json:
        print_json({"layouts": seen, "predictions": [_summary(one) for one in found]})
    elif found:
        show(search_view(found, seen))
    else:
        print(f"none of {seen} layouts surely fits and can be timed: {like.unknown or 'too little memory'}")
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
