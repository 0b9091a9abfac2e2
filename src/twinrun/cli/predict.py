"""`twinrun predict`: memory and time of a training on GPUs you do not own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Group
from rich.table import Table

from twinrun.cli.console import Shown, demand_with, demand_without
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError, require_known
from twinrun.manifests.settings import parse_settings
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.configured_model import configured
from twinrun.predict.kernel_times import kernel_times
from twinrun.predict.peak import checked_speed
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import GIGABIT, LayoutSettings, Trains, machines_of, predict_at, with_sequence
from twinrun.predict.search import Offer, best, unordered
from twinrun.protocol.models import ModelShape, member, members
from twinrun.report.prediction import DAY, peak_view, predictions_view, search_view

# Sequences of a step where a model is named and no recipe, devices of a node, and layouts of a sweep.
GLOBAL_BATCH, DEVICES, SHOWN = 512, 8, 10


def predict(
    subject: str | None = None,
    /,
    *,
    gpu: str,
    nodes: tuple[int, ...] = (1,),
    devices_per_node: int | None = None,
    network: float | None = None,
    software: str = "twinrun-2026",
    set: Annotated[tuple[str, ...], Parameter(allow_repeating=True)] = (),
    sweep: bool = False,
    goal: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    price: tuple[float, ...] = (),
    kernels: bool = False,
    measured: float | None = None,
) -> Shown:
    """Predict memory and time of a training, with an interval, on GPUs you do not own.

    Args:
        subject: folder of a recipe that trains, or a model, for example mpt-7b or mpt-7b-4096
        gpu: rows of images/gpus.toml, for example mi300x,h200
        nodes: numbers of nodes, for example 1,8,32
        devices_per_node: devices of a node, not cards; 8 when left out
        network: Gbit/s that a node sends, all its adapters together
        software: generation of software that the prediction is for
        set: key=value: global_batch, sequence, microbatch, tensor, pipeline, shards, precision, ...
        sweep: show the cheapest distinct layouts that fit, on any of the GPUs and numbers of nodes
        goal: rate in tokens/s of all devices that a layout of the sweep must reach
        tokens: a budget of tokens, for which days are shown
        days: the most days that the budget of tokens may take, with --sweep
        price: price of a device for an hour: one for all GPUs, or one for each
        kernels: print the predicted time of each kernel of the recipes instead
        measured: tokens a second that somebody says a device trains: say whether that can be true
    """
    project, names = Project(project_root()), gpu.split(",")
    for one in names:
        require_known(one, sorted(project.gpus), "no such GPU", place="--gpu")
    gpus = [project.gpus[one] for one in names]
    budgets = {"tokens": tokens, "days": days, "goal": goal, "measured": measured}
    for option, value in (*budgets.items(), *(("price", one) for one in price)):
        if value is not None and value <= 0:
            raise InputError("expected an amount", place=f"--{option}", found=value, allowed="above 0")
    if len(price) not in {0, 1, len(gpus)}:
        allowed = f"1, or {len(gpus)}, the GPUs"
        raise InputError(
            "expected a price for each GPU", place="--price", found=f"{len(price)} prices", allowed=allowed
        )
    demand_with("--sweep", sweep, goal=goal, days=days)
    demand_with("--tokens", tokens is not None, days=days)
    demand_without("--goal", goal is not None, days=days)
    demand_without("--kernels", kernels, sweep=sweep, measured=measured, tokens=tokens, price=price, set=set)
    demand_without("--measured", measured is not None, sweep=sweep, tokens=tokens, price=price)
    if kernels:
        return _kernels(gpus)
    if not subject:
        raise InputError("SUBJECT is missing", place="twinrun predict", allowed="a recipe, a model or a file")
    asked, known = _asked(project, subject, set), calibration()
    if measured is not None:
        speed = checked_speed(
            asked.shape,
            gpus[0],
            tokens_per_second=measured,
            fp8=asked.settings.precision == "fp8",
            known=known,
        )
        found = {"gpu": gpus[0].id, "not_understood": asked.strange, "verdict": speed.verdict}
        return Shown(
            view=lambda: peak_view(speed, said=asked.said),
            data=lambda: found | asdict(speed),
            code=int(speed.impossible),
        )
    place: dict[str, Any] = {"devices_per_node": DEVICES, "network": network}
    if devices_per_node is not None:
        place["devices_per_node"] = devices_per_node
    said = [] if asked.of_recipe or devices_per_node else [f"{DEVICES} devices a node"]
    said = [
        *asked.said,
        *([f"Defaults taken: {', '.join([*asked.silent, *said])}."] if asked.silent or said else []),
    ]
    prices = dict(zip(names, (price or (None,)) * (len(names) // len(price or (None,))), strict=True))
    terms: dict[str, Any] = {**place, "software": known.of(software), "calibration": known}
    if sweep:
        target = goal or (tokens / (days * DAY) if tokens and days else 0.0)
        offers = [
            Offer(machines_of(one, nodes=n, **place), prices[one.id] or 1.0) for one in gpus for n in nodes
        ]
        layout = asked.settings.layout(known.of(software))
        searched = best(
            asked.shape,
            offers,
            layout,
            software=known.of(software),
            calibration=known,
            count=SHOWN,
            goal=target,
        )
        tops = [
            summary(one.prediction)
            | {
                "tokens_per_second": one.tokens_per_second,
                "sure_tokens_per_second": one.sure_tokens_per_second,
            }
            | {"price_of_1e9_tokens": one.price(1e9)}
            for one in searched.best
        ]
        counts = {"layouts": searched.seen, "fitting": searched.fitting, "left_out": searched.left_out}
        return Shown(
            view=lambda: search_view(
                searched, said=said, goal=target, tokens=tokens or 1e9, priced=bool(price)
            ),
            data=lambda: {**counts, "no_order": unordered(searched), "goal": target, "predictions": tops},
        )
    rows = {
        one.id: [predict_at(asked.shape, one, asked.settings, nodes=n, **terms) for n in nodes]
        for one in gpus
    }

    def others(one: Gpu) -> list[str]:
        """Return what other software that ran on the GPU would make of the first row."""
        rates = {
            other.id: predict_at(
                asked.shape, one, asked.settings, nodes=nodes[0], **(terms | {"software": other})
            ).tokens_per_second
            for other in known.known(one)
            if other.id != software
        }
        words = [f"{name} {rate:,.0f}" for name, rate in rates.items() if rate]
        return [f"With other software, tokens/s a device: {', '.join(words)}."] if words else []

    return Shown(
        view=lambda: Group(
            *(
                predictions_view(
                    rows[one.id], said=[*said, *others(one)], tokens=tokens, price=prices[one.id]
                )
                for one in gpus
            )
        ),
        data=lambda: {
            "calibration": known.version,
            "not_understood": asked.strange,
            "predictions": [summary(one) for several in rows.values() for one in several],
        },
    )


@dataclass(frozen=True)
class _Subject:
    """The model and its training, and in words what nobody said."""

    shape: ModelShape
    settings: LayoutSettings
    said: tuple[str, ...]
    silent: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    """Keys of a config.json that were not understood."""
    of_recipe: bool = False


def _asked(project: Project, name: str, texts: Sequence[str]) -> _Subject:
    """Return the model and settings of a recipe, of a member of a family or of somebody's config.json.

    Raises:
        InputError: there is none, the recipe trains nothing, or a setting is none.
    """
    given, path = parse_settings(tuple(texts)), Path(name)
    file = path.suffix == ".json" or (path / "config.json").is_file()
    if file or name in members() or ("/" not in name and name not in project.recipe_names):
        sequence, strange = given.get("sequence"), tuple[str, ...]()
        if "model" in given:
            hint = f"twinrun predict {given['model']}"
            raise InputError(
                "the model is the argument", place="--set model", found=given["model"], hint=hint
            )
        settings = LayoutSettings(model=name, global_batch=GLOBAL_BATCH).with_settings(given)
        shape: ModelShape
        if file or path.is_dir():
            shape, strange = configured(path, sequence=sequence)
        else:
            shape = with_sequence(member(name, place="twinrun predict"), sequence)
        silent = {"global_batch": f"{GLOBAL_BATCH} sequences a step", "shards": "all states split (FSDP)"}
        untold = tuple(text for key, text in silent.items() if key not in given)
        left_out = (f"Not understood, and left out: {', '.join(strange)}.",) if strange else ()
        return _Subject(shape, settings, (_named(name, shape), *left_out), untold, strange)
    tables = project.recipe(name).tables
    if not isinstance(tables, Trains):
        hint = f"name a model: {', '.join(sorted(members()))}"
        raise InputError("this recipe trains nothing", place=name, hint=hint)
    settings = LayoutSettings.of(tables.training).with_settings(given)
    require_known(settings.model, sorted(tables.models), "no such model", place="--set model")
    shape = with_sequence(tables.models[settings.model], settings.sequence)
    return _Subject(shape, settings, (_named(f"{name}: {settings.model}", shape),), of_recipe=True)


def _named(name: str, shape: ModelShape) -> str:
    return f"{name}: {shape.parameters() / 1e9:.3g}B parameters, sequences of {shape.sequence:,} tokens."


def _kernels(gpus: Sequence[Gpu]) -> Shown:
    """Return the predicted times of the recipes' kernels; raises InputError for a GPU that has none."""
    known = {one.arch for one in kernel_times()}
    for gpu in gpus:
        require_known(gpu.arch, known, "no kernel was predicted for it", place=f"--gpu {gpu.id}")
    rows = [one for one in kernel_times() if one.arch in {gpu.arch for gpu in gpus}]
    heads = ("arch", "kernel", "batch x heads x length x size", "ms, predicted", "90 % interval", "bound by")
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        name, shape = f"{row.kernel}{' causal' if row.causal else ''}", "x".join(map(str, row.shape))
        table.add_row(row.arch, name, shape, f"{row.ms:g}", f"{row.low:g} to {row.high:g}", row.bound)
    return Shown(view=lambda: table, data=lambda: [row.model_dump() for row in rows])


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
