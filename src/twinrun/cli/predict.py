"""`twinrun predict`: memory and time of a training on GPUs you do not own."""

from __future__ import annotations

from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Group

from twinrun.cli.console import Shown, listed, tell
from twinrun.cli.program import Count, demand_one, demand_with, demand_without
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError, require_known
from twinrun.planning.project import Project
from twinrun.predict import prediction
from twinrun.predict.calibration import SOFTWARE, Run, calibration
from twinrun.predict.parallel_layout import Machines, Software
from twinrun.predict.request import Asked, asked_of_model, asked_of_recipe, run_of
from twinrun.predict.search import best
from twinrun.predict.step import kernel_times
from twinrun.protocol.models import members
from twinrun.report.prediction import DAY, predictions_view, search_view
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record

# Devices of a node, and layouts of a sweep that are shown.
DEVICES, SHOWN = 8, 10


def predict(
    subject: str | None = None,
    /,
    *,
    gpu: str,
    nodes: tuple[int, ...] = (1,),
    devices_per_node: Count = None,
    network: float | None = None,
    software: str = SOFTWARE,
    set: tuple[str, ...] = (),
    sweep: bool = False,
    goal: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    price: tuple[float, ...] = (),
    kernels: bool = False,
    measured: tuple[str, ...] = (),
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
        measured: a run to learn from: a record, another program's log, or a line like
            "tokens_per_second=13000 nodes=1" of a device, with what was unlike the question
    """
    project, names = Project(project_root()), gpu.split(",")
    for name in names:
        require_known(name, sorted(project.gpus), "no such GPU", place="--gpu")
    gpus = [project.gpus[name] for name in names]
    if len(price) not in {0, 1, len(gpus)}:
        found, allowed = f"{len(price)} prices", f"1, or {len(gpus)}, the GPUs"
        raise InputError("expected a price for each GPU", place="--price", found=found, allowed=allowed)
    demand_with("--sweep", sweep, goal=goal, days=days)
    demand_with("--tokens", tokens, days=days)
    demand_one(goal=goal, days=days)
    demand_without("kernels", kernels, sweep=sweep, measured=measured, tokens=tokens, price=price, set=set)
    if kernels:
        return _kernels([one.arch for one in gpus])
    if not subject:
        raise InputError("SUBJECT is missing", place="twinrun predict", allowed="a recipe, a model or a file")
    path = Path(subject)
    of_model = path.suffix == ".json" or (path / "config.json").is_file() or subject in members()
    of_model = of_model or ("/" not in subject and subject not in project.recipe_names)
    asked = asked_of_model(subject, set) if of_model else asked_of_recipe(project.recipe(subject), set)
    machines = partial(Machines.of, devices_per_node=devices_per_node or DEVICES, network=network)
    here = machines(gpus[0], nodes=1)
    loops = calibration().of(software)
    runs = [one for text in measured for one in _runs(project, text, asked, here, loops)]
    known = committed(project) if software == SOFTWARE else []
    runs += [run for one in known for row in gpus for run in one.runs(row)]
    untold = [] if devices_per_node or not of_model else [f"{DEVICES} devices a node"]
    taken = ", ".join([*asked.silent, *untold])
    said = [*asked.said, *([f"Defaults taken: {taken}."] if taken else [])]
    offered = [*zip(gpus, cycle(price or (None,)), strict=False)]
    if sweep:
        target = goal or (tokens / (days * DAY) if tokens and days else 0.0)
        offers = [machines(one, nodes=count, price=cost) for one, cost in offered for count in nodes]
        layout = asked.settings.layout(loops)
        searched = best(asked.shape, offers, layout, loops, runs, count=SHOWN, goal=target)
        view = search_view(searched, said=said, goal=target, tokens=tokens or 1e9, priced=bool(price))
        data: dict[str, Any] = {"layouts": searched.seen, "fitting": searched.fitting}
        data |= {"left_out": searched.left_out, "no_order": searched.unordered, "goal": target}
        return Shown(view, data | {"predictions": [one.summary() | one.offer() for one in searched.best]})
    views, rows = [], []
    for one, cost in offered:
        subjects = [asked.settings.subject(asked.shape, machines(one, nodes=n), loops) for n in nodes]
        row = [prediction.predict(each, runs) for each in subjects]
        views.append(predictions_view(row, said=said, tokens=tokens, price=cost))
        rows += [each.summary() for each in row]
    data = {"calibration": calibration().version, "not_understood": asked.strange, "predictions": rows}
    return Shown(Group(*views), data)


def committed(project: Project, *recipes: str) -> list[Judged]:
    """Return the committed records of these recipes, of all where none is named."""
    loaded = (project.recipe(name) for name in recipes or project.recipe_names)
    return [read_record(file, project) for one in loaded for file in project.results(one)]


def _runs(project: Project, text: str, asked: Asked, machines: Machines, loops: Software) -> tuple[Run, ...]:
    """Return the runs of a record, of a log or of a line; raises InputError where there is none."""
    path, gpu = Path(text), machines.gpu
    if not path.is_dir() and path.suffix != ".json":
        return (run_of(text, asked, machines, loops),)
    if found := read_record(path, project).runs(gpu, machines.network):
        return found
    allowed = f"a training on {gpu.name}; of several nodes with --network"
    raise InputError("the record has no such training", place="--measured", found=text, allowed=allowed)


def _kernels(archs: list[str]) -> Shown:
    """Return the predicted times of the recipes' kernels; raises InputError for a GPU that has none."""
    known = dict.fromkeys(one.arch for one in kernel_times())
    for arch in archs:
        require_known(arch, known, "no kernel was predicted for it", place="--gpu")
    rows = [one for one in kernel_times() if one.arch in archs]
    tell("ms are predicted; nine times of ten they lie between low and high")
    return listed(rows, "kernel", "shape", "causal", "ms", "low", "high", "bound", none="none")
