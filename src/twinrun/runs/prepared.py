"""A run with all that it needs, found once: `--dry` prints it, and a run starts it."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from twinrun.execution.engine import Engine, Workspace, log_folder, point_folder
from twinrun.execution.environment import package_folders
from twinrun.execution.job_script import RUN, RUN_FOLDER
from twinrun.execution.ranks import METRICS, Launch, Ranks
from twinrun.foundation.cache import cache_root, runs_folder
from twinrun.foundation.errors import InputError, MachineError, TwinrunError
from twinrun.foundation.files import real
from twinrun.foundation.text import size
from twinrun.machine.checks import demand_device_files
from twinrun.machine.memory import processor_memory
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.protocol.job import PowerReading
from twinrun.protocol.model_source import FolderModel
from twinrun.runs.checkpointing import PointCheckpoints, resolved
from twinrun.runs.data import (
    data_folder,
    demand_documents,
    demand_fetched,
    given_folder,
)
from twinrun.runs.models import demand_model, model_folder
from twinrun.runs.selection import Selection, demand_runnable
from twinrun.workloads.workload import Point, Run

# Logs, metrics, the record and its page; and what interpreters compile.
RUN_BYTES, CACHE_BYTES = 64 << 20, 256 << 20
_ANSWER_SECONDS = 5.0
# Name of an attempt that nobody counts.
PRINTED = "printed"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a run starts, where, and with which folders."""

    project: Project
    selection: Selection
    workspace: Workspace
    """Its run folder is `$RUN` in a plan that is only printed."""
    script: Path | str
    """What ranks run: a file of the recipe, or a module of twinrun."""
    renderer: Engine
    """How commands are written: the engine itself, once it is open."""
    folders: Mapping[str, Path]
    """What ranks read, by what it is: data, documents, given, model."""
    checkpoints: Mapping[str, PointCheckpoints]
    """By point; empty where nothing is saved."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of ranks, beside those of the site: where kernels find their code."""
    refusals: tuple[TwinrunError, ...] = ()
    """What stands against a plan that is only printed; a run is refused by the first."""

    @property
    def plan(self) -> Plan:
        """What is run."""
        return self.selection.plan

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.workspace.run

    def opened(
        self, engine: Engine, *, folders: Mapping[str, Path], variables: Mapping[str, str]
    ) -> Prepared:
        """Return the same with the engine that was opened, and what was prepared in it."""
        return replace(self, renderer=engine, folders={**self.folders, **folders}, variables=variables)

    @cached_property
    def ranks(self) -> Ranks:
        """What starts launches."""
        chosen = self.selection
        return Ranks(
            engine=self.renderer,
            launcher=chosen.launcher,
            scheduler=chosen.scheduler,
            workspace=self.workspace,
            cores=chosen.cores,
            variables={**self.variables, **(chosen.site.site.environment if chosen.site else {})},
        )

    @cached_property
    def shared(self) -> Run:
        """What the jobs of all points share; folders and attempt are filled in for each."""
        chosen, inside, site = self.selection, self.renderer.inside, self.selection.site
        power, gpu = PowerReading(), chosen.gpu
        # A card that the table does not know is one device.
        if gpu:
            known = {"devices_per_card": gpu.devices_per_card, "gpu": gpu.id, "clock_mhz": gpu.clock_mhz}
            power = power.model_copy(update=known)
        return Run(
            recipe=self.plan.recipe,
            accelerator=chosen.accelerator,
            out="",
            metrics=inside(self.run / METRICS),
            attempt="",
            checkpointing=chosen.checkpointing,
            power=power,
            sniff_steps=site.site.sniff_steps if site else 0,
            watchdog_seconds=site.site.watchdog_seconds if site else None,
            folders={name: inside(folder) for name, folder in self.folders.items()},
        )

    def launch(self, point: Point, attempt: int) -> Launch:
        """Return what is started for one attempt at a point."""
        inside, own = self.renderer.inside, self.checkpoints.get(point.id)
        asked = self.shared.checkpointing
        checkpoints = own.seen(asked, inside) if own and asked else None
        settings = self.shared.model_copy(
            update={"out": inside(point_folder(self.run, point.id)), "checkpointing": checkpoints}
        )
        return Launch(
            placement=point,
            script=self.script,
            job=self.selection.workload.job(self.plan.part, point, attempt, settings),
        )

    def printed(self) -> dict[str, object]:
        """Return for each point what starts its ranks: the command of each node, or a scheduler's script.

        The script is given the run folder as the variable RUN.
        """
        scripts, commands = dict[str, str](), dict[str, object]()
        for point in self.plan.points:
            launch, logs = self.launch(point, 0), str(log_folder(RUN_FOLDER, point.id))
            task = self.ranks.task(launch, attempt=PRINTED)
            if script := self.selection.scheduler.script(task, run=RUN, logs=logs):
                scripts[point.id] = script
            else:
                commands[point.id] = [
                    {"arguments": list(one.arguments), "variables": one.variables} for one in task.commands
                ]
        return {"scripts": scripts} if scripts else {"commands": commands}


def prepare(
    project: Project,
    selection: Selection,
    *,
    out: Path | None = None,
    resume: bool = False,
    detach: bool = False,
    dry: bool = False,
) -> Prepared:
    """Find all that a run needs, look at it, and start nothing.

    Args:
        out: folder of runs, that of the project when left out.
        resume: go on in the newest unfinished folder of the same plan.
        detach: the run is to go on after its command.
        dry: keep what stands against the run, instead of raising it.

    Raises:
        InputError: what it should go on from is not there.
        MachineError: something is missing; names it and says what to do.
    """
    described, data = selection.description, cache_root() / "data"
    base = (out or runs_folder(project.root)).absolute()
    model = model_folder(described.model) if described.model else None
    refusals = []

    def demand(look: Callable[[], object]) -> None:
        try:
            look()
        except TwinrunError as error:
            if not dry:
                raise
            refusals.append(error)

    demand(lambda: _demand_here(selection, detach=detach))
    if dry:
        demand(lambda: demand_runnable(selection))
    run = RUN_FOLDER
    if not dry:
        run = unfinished(base, selection.plan) if resume else _fresh(base, selection.plan)
    workspace = _workspace(project, selection, run, model=model)
    demand(lambda: demand_documents(described.undocumented, described.given_documents))
    demand(lambda: demand_room(base, RUN_BYTES, option="--out"))
    demand(lambda: demand_room(cache_root(), CACHE_BYTES, option="TWINRUN_CACHE"))
    engine, stack, vendor = selection.engine, selection.stack, selection.vendor
    if engine.unusable(stack=stack, vendor=vendor):
        # It says itself what helps, before it uses any folder.
        known: dict[str, Any] = {"stack": stack, "vendor": vendor, "workspace": workspace}
        demand(lambda: engine.open_engine(**known, say=lambda _text: None))
    for request in (described.data, described.documents):
        if request:
            demand(lambda: demand_fetched(request, data=data, recipe=selection.recipe))  # noqa: B023
    if source := described.model:
        demand(lambda: demand_model(source, model_folder(source), container=engine.RUNS_IMAGES))
    checkpoints: dict[str, PointCheckpoints] = {}
    demand(
        lambda: checkpoints.update(resolved(selection.checkpointing, selection.plan, run=run, resume=resume))
    )
    if selection.site is None:
        demand(lambda: demand_memory(selection))
        # A container has an interface of its own.
        if not engine.RUNS_IMAGES:
            demand(demand_loopback)
    own = selection.recipe.recipe.script
    own_sources = bool(described.data and described.data.source.kind == "standard-library")
    given = described.given_documents
    folders = {
        # Which interpreter reads its own sources is known when it runs.
        "data": (RUN_FOLDER / "data" if own_sources else data_folder(described.data, data=data, python=""))
        if described.data
        else None,
        "documents": data_folder(described.documents, data=data, python="") if described.documents else None,
        "given": given_folder(given) if given else None,
        "model": model,
    }
    return Prepared(
        project=project,
        selection=selection,
        workspace=workspace,
        script=project.root / selection.recipe.file(own) if own else selection.plan.script,
        renderer=engine.renderer(stack=stack, vendor=vendor, workspace=workspace),
        folders={name: folder for name, folder in folders.items() if folder},
        checkpoints=checkpoints,
        refusals=tuple(refusals),
    )


def _workspace(project: Project, selection: Selection, run: Path, *, model: Path | None) -> Workspace:
    """Return the folders that a run uses; kernels of the image are not looked for in the checkout."""
    locked = selection.engine.RUNS_IMAGES and not selection.stack.own_image
    baked = selection.stack.stack.kernels if locked else ()
    wanted = selection.recipe.recipe.kernels if selection.description.kernels else ()
    recipe = selection.recipe
    kept = project.root / recipe.folder
    names = [name for name in wanted if name not in baked]
    own = (kept / "kernels",) if recipe.elsewhere and recipe.recipe.name in names else ()
    shared = [name for name in names if not own or name != recipe.recipe.name]
    asked, user = selection.checkpointing, isinstance(selection.description.model, FolderModel)
    left = Path(asked.source) if asked and asked.source else None
    return Workspace(
        root=project.root,
        recipe=kept if recipe.elsewhere else None,
        run=run,
        data=cache_root() / "data",
        nodes=selection.site.site if selection.site else None,
        packages=package_folders(project.root, shared, own=own),
        source=left or (model if user else None),
        place=Path(asked.place) if asked and asked.place else None,
    )


def _fresh(base: Path, plan: Plan) -> Path:
    """Return a folder that no run has; runs of one plan may start in the same second, on several machines."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return real(base) / plan.recipe / f"{stamp}-{plan.sha256()[:8]}-{uuid.uuid4().hex[:4]}"


def unfinished(base: Path, plan: Plan) -> Path:
    """Return the newest folder of a plan that has no record yet; raises InputError for none."""
    place, mark = real(base) / plan.recipe, plan.sha256()[:8]
    found = [
        folder
        for folder in sorted(place.glob(f"*-{mark}-*"))
        if (folder / "plan.json").is_file() and not (folder / "record.json").exists()
    ]
    if not found:
        raise InputError(
            "no unfinished run of this plan",
            place=str(place),
            found=f"plan {mark}",
            hint="leave --resume out to start one; a changed option or file makes another plan,"
            " and so do nodes that have gone down: --set nodes=... names the points",
        )
    return found[-1]


def _demand_here(selection: Selection, *, detach: bool) -> None:
    """Refuse a run on this machine whose ranks cannot open its GPUs, or that should outlive its command."""
    if selection.site is None:
        devices, grouped = selection.machine.devices, selection.engine.ADDS_GROUPS
        demand_device_files(selection.vendor, devices, grouped=grouped)
        if detach:
            hint = "add --cluster SITE; on this machine a run ends with the command that started it"
            raise InputError("nothing would go on with the run", place="--detach", found="no site", hint=hint)


def demand_room(folder: Path, needed: int, *, option: str) -> None:
    """Raise MachineError where `folder`, or what will hold it, has less room than `needed` or is closed."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise MachineError(
            "cannot write here",
            place=str(existing),
            found="no folder" if not existing.is_dir() else "a folder that is closed to this user",
            hint=f"choose another place with {option}",
        )
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MachineError(
            "the disk is full",
            place=str(folder),
            found=f"{size(free)} free",
            allowed=f"{size(needed)} or more",
            hint=f"free some space, or choose another disk with {option}",
        )


def demand_loopback() -> None:
    """Raise MachineError where processes of this machine cannot reach each other, as ranks must."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_ANSWER_SECONDS),
        ):
            pass
    except OSError as error:
        raise MachineError(
            "the loopback interface of this machine does not work, and ranks meet over it",
            place="127.0.0.1",
            found=error.strerror or str(error),
            hint="`ip link set lo up` starts it; in a container or sandbox, give it a network",
        ) from None


def demand_memory(selection: Selection) -> None:
    """Raise MachineError where the ranks of a point need more memory than this machine has free."""
    memory, points = processor_memory(), selection.description.points
    for point in selection.plan.points:
        needed = points[point.id].processor_bytes
        if needed is not None and _on_processor(selection, point) and needed > memory.available_bytes:
            raise MachineError(
                "the ranks need more memory than is free here; the kernel would kill them",
                place=point.id,
                found=f"about {size(needed)} for {point.world_size} rank(s), estimated",
                allowed=f"{size(memory.available_bytes)} free of {size(memory.limit_bytes)}:"
                f" {memory.limited_by}",
                hint=selection.workload.smaller,
            )


def _on_processor(selection: Selection, point: Point) -> bool:
    leg = selection.description.points[point.id].leg
    return not selection.accelerator or (leg is not None and leg.processor)
