"""`twinrun predict`: memory and time of a training on GPUs you do not own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Group

from twinrun.cli.console import Shown, demand_with, demand_without
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError, require_known
from twinrun.manifests.vendor import Gpu
from twinrun.planning.project import Project
from twinrun.predict.calibration import SOFTWARE, Run, basis
from twinrun.predict.kernel_times import kernel_times
from twinrun.predict.measured import run_of
from twinrun.predict.parallel_layout import Machines
from twinrun.predict.request import Asked, machines_of, predict_at, subject_of_model, subject_of_recipe
from twinrun.predict.search import Offer, best, unordered
from twinrun.protocol.models import members
from twinrun.report.plan import plain_table
from twinrun.report.prediction import DAY, predictions_view, search_view
from twinrun.results.reading import read_record

# Devices of a node, and layouts of a sweep that are shown.
DEVICES, SHOWN = 8, 10


def predict(
    subject: str | None = None,
    /,
    *,
    gpu: str,
    nodes: tuple[int, ...] = (1,),
    devices_per_node: int | None = None,
    network: float | None = None,
    software: str = SOFTWARE,
    set: Annotated[tuple[str, ...], Parameter(allow_repeating=True)] = (),
    sweep: bool = False,
    goal: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    price: tuple[float, ...] = (),
    kernels: bool = False,
    measured: Annotated[tuple[str, ...], Parameter(allow_repeating=True)] = (),
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
    project = Project(project_root())
    for name in gpu.split(","):
        require_known(name, sorted(project.gpus), "no such GPU", place="--gpu")
    gpus = [project.gpus[name] for name in gpu.split(",")]
    amounts = [("tokens", tokens), ("days", days), ("goal", goal)]
    for option, value in (*amounts, *(("price", one) for one in price)):
        if value is not None and value <= 0:
            raise InputError("expected an amount", place=f"--{option}", found=value, allowed="above 0")
    if len(price) not in {0, 1, len(gpus)}:
        found, allowed = f"{len(price)} prices", f"1, or {len(gpus)}, the GPUs"
        raise InputError("expected a price for each GPU", place="--price", found=found, allowed=allowed)
    demand_with("--sweep", sweep, goal=goal, days=days)
    demand_with("--tokens", tokens is not None, days=days)
    demand_without("--goal", goal is not None, days=days)
    demand_without("--kernels", kernels, sweep=sweep, measured=measured, tokens=tokens, price=price, set=set)
    if kernels:
        return _kernels([one.arch for one in gpus])
    if not subject:
        raise InputError("SUBJECT is missing", place="twinrun predict", allowed="a recipe, a model or a file")
    path = Path(subject)
    of_model = path.suffix == ".json" or (path / "config.json").is_file() or subject in members()
    of_model = of_model or ("/" not in subject and subject not in project.recipe_names)
    asked = subject_of_model(subject, set) if of_model else subject_of_recipe(project.recipe(subject), set)
    place: dict[str, Any] = {"devices_per_node": DEVICES if devices_per_node is None else devices_per_node}
    place["network"] = network
    first = machines_of(gpus[0], nodes=1, **place)
    runs = [one for text in measured for one in _runs(project, text, asked, first, software)]
    rests = basis(software, runs + (_committed(project, gpus) if software == SOFTWARE else []))
    untold = [] if devices_per_node or not of_model else [f"{DEVICES} devices a node"]
    taken = ", ".join([*asked.silent, *untold])
    said = [*asked.said, *([f"Defaults taken: {taken}."] if taken else [])]
    prices = [None] * len(gpus) if not price else [*price] * (len(gpus) // len(price))
    if sweep:
        target = goal or (tokens / (days * DAY) if tokens and days else 0.0)
        offers = [
            Offer(machines_of(one, nodes=count, **place), cost or 1.0)
            for one, cost in zip(gpus, prices, strict=True)
            for count in nodes
        ]
        layout = asked.settings.layout(rests.software)
        searched = best(asked.shape, offers, layout, rests, count=SHOWN, goal=target)
        return Shown(
            view=lambda: search_view(
                searched, said=said, goal=target, tokens=tokens or 1e9, priced=bool(price)
            ),
            data=lambda: {
                "layouts": searched.seen,
                "fitting": searched.fitting,
                "left_out": searched.left_out,
                "no_order": unordered(searched),
                "goal": target,
                "predictions": [one.summary() for one in searched.best],
            },
        )
    rows = [
        [predict_at(asked.shape, machines_of(one, nodes=n, **place), asked.settings, rests) for n in nodes]
        for one in gpus
    ]
    return Shown(
        view=lambda: Group(
            *(
                predictions_view(several, said=said, tokens=tokens, price=cost)
                for several, cost in zip(rows, prices, strict=True)
            )
        ),
        data=lambda: {
            "calibration": rests.known.version,
            "not_understood": asked.strange,
            "predictions": [one.summary() for several in rows for one in several],
        },
    )


def _runs(project: Project, text: str, asked: Asked, machines: Machines, software: str) -> tuple[Run, ...]:
    """Return the runs of a record, of a log or of a line; raises InputError where there is none."""
    path, gpu = Path(text), machines.gpu
    if not path.is_dir() and path.suffix != ".json":
        return (run_of(text, asked, machines, basis(software).software),)
    if found := read_record(path, project).runs(gpu, machines.network):
        return found
    allowed = f"a training on {gpu.name}; of several nodes with --network"
    raise InputError("the record has no such training", place="--measured", found=text, allowed=allowed)


def _committed(project: Project, gpus: list[Gpu]) -> list[Run]:
    """Return the committed trainings on any of the GPUs, all of this project's software."""
    loaded = (project.recipe(name) for name in project.recipe_names)
    records = [read_record(file, project) for one in loaded for file in project.results(one)]
    return [run for one in records for gpu in gpus for run in one.runs(gpu)]


def _kernels(archs: list[str]) -> Shown:
    """Return the predicted times of the recipes' kernels; raises InputError for a GPU that has none."""
    known = {one.arch for one in kernel_times()}
    for arch in archs:
        require_known(arch, known, "no kernel was predicted for it", place="--gpu")
    rows = [one for one in kernel_times() if one.arch in archs]
    heads = ("arch", "kernel", "batch x heads x length x size", "ms, predicted", "90 % interval", "bound by")
    cells = [
        (
            *(row.arch, f"{row.kernel}{' causal' if row.causal else ''}", "x".join(map(str, row.shape))),
            *(f"{row.ms:g}", f"{row.low:g} to {row.high:g}", row.bound),
        )
        for row in rows
    ]
    return Shown(view=lambda: plain_table(heads, cells), data=lambda: [row.model_dump() for row in rows])
