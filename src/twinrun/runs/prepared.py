"""A run with all that it needs, found once: `--dry` prints it, and a run starts it."""

from __future__ import annotations

import datetime
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from twinrun.checkpoints.folder import MANIFEST, FolderStore
from twinrun.checkpoints.verification import demand_same_run, demand_signed_checkpoint, read_manifest
from twinrun.execution.engine import Engine, Workspace, log_folder, point_folder
from twinrun.execution.environment import package_folders
from twinrun.execution.job_script import RUN, RUN_FOLDER
from twinrun.execution.ranks import METRICS, Launch, Ranks
from twinrun.foundation.cache import cache_root, runs_folder
from twinrun.foundation.errors import InputError, MachineError, TwinrunError
from twinrun.foundation.files import real
from twinrun.foundation.manifest import validate
from twinrun.foundation.signatures import is_demanded
from twinrun.foundation.text import size
from twinrun.machine.checks import demand_device_files
from twinrun.machine.memory import processor_memory
from twinrun.manifests.settings import parse_settings
from twinrun.planning.plan import Plan
from twinrun.planning.project import Project
from twinrun.protocol.job import Checkpointing, PowerReading
from twinrun.protocol.model_source import FolderModel, in_words
from twinrun.runs.data import demand_documents, demand_fetched, demand_model, input_folders
from twinrun.runs.selection import Selection, demand_runnable
from twinrun.workloads.workload import LegSteps, Point, Run, Workload

# Logs, metrics, the record and its page; and what interpreters compile.
RUN_BYTES, CACHE_BYTES = 64 << 20, 256 << 20
# Name of an attempt that nobody counts.
PRINTED = "printed"
OPTION, FROM = "--checkpoint", "--from"


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
    checkpoints: Mapping[str, Checkpointing]
    """Where each point saves and what it goes on from, as this machine sees both; empty for neither."""
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

    def opened(self, say: Callable[[str], None]) -> Prepared:
        """Return the same with its engine open; raises MachineError."""
        chosen, workspace = self.selection, self.workspace
        workspace.data.mkdir(parents=True, exist_ok=True)
        known: dict[str, Any] = {"stack": chosen.stack, "vendor": chosen.vendor, "workspace": workspace}
        return replace(self, renderer=chosen.engine.open_engine(**known, say=say))

    @cached_property
    def ranks(self) -> Ranks:
        """What starts launches."""
        chosen = self.selection
        return Ranks(
            engine=self.renderer,
            launcher=chosen.launcher,
            scheduler=chosen.scheduler,
            workspace=self.workspace,
            cores=chosen.hardware.cores,
            variables={**self.variables, **(chosen.site.site.environment if chosen.site else {})},
        )

    def launch(self, point: Point, attempt: int) -> Launch:
        """Return what is started for one attempt at a point."""
        chosen, inside, gpu = self.selection, self.renderer.inside, self.selection.hardware.gpu
        site, power = chosen.site.site if chosen.site else None, PowerReading()
        # A card that the table does not know is one device.
        if gpu:
            power = PowerReading(devices_per_card=gpu.devices_per_card, gpu=gpu.id, clock_mhz=gpu.clock_mhz)
        if own := self.checkpoints.get(point.id):
            seen = {"place": inside(Path(own.place)), "source": own.source and inside(Path(own.source))}
            own = own.model_copy(update=seen)
        shared = Run(
            recipe=self.plan.recipe,
            accelerator=bool(chosen.hardware.devices),
            out=inside(point_folder(self.run, point.id)),
            metrics=inside(self.run / METRICS),
            attempt="",
            checkpointing=own,
            power=power,
            sniff_steps=site.sniff_steps if site else 0,
            watchdog_seconds=site.watchdog_seconds if site else None,
            folders={name: inside(folder) for name, folder in self.folders.items()},
        )
        job = chosen.workload.job(self.plan.part, point, attempt, shared)
        return Launch(placement=point, script=self.script, job=job)

    def printed(self) -> dict[str, object]:
        """Return for each point what starts its ranks: the command of each node, or a scheduler's script.

        The script is given the run folder as the variable RUN.
        """
        scripts, commands = dict[str, str](), dict[str, object]()
        for point in self.plan.points:
            task = self.ranks.task(self.launch(point, 0), attempt=PRINTED)
            logs = str(log_folder(RUN_FOLDER, point.id))
            if script := self.selection.scheduler.script(task, run=RUN, logs=logs):
                scripts[point.id] = script
            commands[point.id] = [one.model_dump(include={"arguments", "variables"}) for one in task.commands]
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
    plan, described, engine = selection.plan, selection.plan.description, selection.engine
    base, request = (out or runs_folder(project.root)).absolute(), selection.request
    asked = checkpointing_of(request.checkpoint, selection.workload, plan, source=request.from_)
    refusals = list[TwinrunError]()

    def demand(look: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return look(*arguments, **options)
        except TwinrunError as error:
            if not dry:
                raise
            refusals.append(error)

    if selection.site is None:
        if detach:
            hint = "add --cluster SITE; on this machine a run ends with the command that started it"
            raise InputError("nothing would go on with the run", place="--detach", hint=hint)
        devices = selection.machine.devices
        demand(demand_device_files, selection.vendor, devices, grouped=engine.ADDS_GROUPS)
    run = RUN_FOLDER
    if dry:
        demand(demand_runnable, selection)
    else:
        run = unfinished(base, plan) if resume else _fresh(base, plan)
    folders = input_folders(described)
    workspace = _workspace(project, selection, run, folders.get("model"), asked)
    demand(demand_documents, described.undocumented, described.given_documents)
    demand(demand_room, base, RUN_BYTES, option="--out")
    demand(demand_room, cache_root(), CACHE_BYTES, option="TWINRUN_CACHE")
    known: dict[str, Any] = {"stack": selection.stack, "vendor": selection.vendor}
    if engine.unusable(**known):
        # It says itself what helps, before it uses any folder.
        demand(engine.open_engine, **known, workspace=workspace, say=lambda _text: None)
    for data in filter(None, (described.data, described.documents)):
        demand(demand_fetched, data, recipe=selection.recipe)
    if model := described.model:
        demand(demand_model, model, folders["model"], container=engine.RUNS_IMAGES)
    checkpoints = demand(resolved, asked, plan, run=run, resume=resume) or {}
    demand(_demand_signatures, project.root, checkpoints, signed=request.require_signature)
    if selection.site is None:
        demand(_demand_memory, selection)
    own = selection.recipe.recipe.script
    return Prepared(
        project=project,
        selection=selection,
        workspace=workspace,
        script=project.root / selection.recipe.file(own) if own else plan.script,
        renderer=engine.renderer(**known, workspace=workspace),
        folders=folders,
        checkpoints=checkpoints,
        refusals=tuple(refusals),
    )


def _workspace(
    project: Project, selection: Selection, run: Path, model: Path | None, asked: Checkpointing | None
) -> Workspace:
    """Return the folders that a run uses; kernels of the image are not looked for in the checkout."""
    recipe, stack, described = selection.recipe, selection.stack, selection.plan.description
    baked = stack.stack.kernels if selection.engine.RUNS_IMAGES and not stack.own_image else ()
    wanted = [name for name in recipe.recipe.kernels if described.kernels and name not in baked]
    kept, name = project.root / recipe.folder, recipe.recipe.name
    own = (kept / "kernels",) if recipe.elsewhere and name in wanted else ()
    given = model if isinstance(described.model, FolderModel) else None
    return Workspace(
        root=project.root,
        recipe=kept if recipe.elsewhere else None,
        run=run,
        data=cache_root() / "data",
        nodes=selection.site.site if selection.site else None,
        packages=package_folders(project.root, [one for one in wanted if not own or one != name], own=own),
        source=Path(asked.source) if asked and asked.source else given,
        place=Path(asked.place) if asked and asked.place else None,
    )


def _fresh(base: Path, plan: Plan) -> Path:
    """Return a folder that no run has; runs of one plan may start in the same second, on several machines."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return real(base) / plan.recipe / f"{stamp}-{plan.sha256()[:8]}-{uuid.uuid4().hex[:4]}"


def unfinished(base: Path, plan: Plan) -> Path:
    """Return the newest folder of a plan that has no record yet; raises InputError for none."""
    place, mark = real(base) / plan.recipe, plan.sha256()[:8]
    begun = sorted(place.glob(f"*-{mark}-*/plan.json"))
    found = [one.parent for one in begun if not one.with_name("record.json").exists()]
    if not found:
        hint = "leave --resume out to start one; another option, file or number of nodes makes another plan"
        raise InputError("no unfinished run of this plan", place=str(place), found=f"plan {mark}", hint=hint)
    return found[-1]


def demand_room(folder: Path, needed: int, *, option: str) -> None:
    """Raise MachineError where `folder`, or what will hold it, has less room than `needed` or is closed."""
    # A link that leads nowhere, or to itself, is there, and no folder.
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    hint = f"choose another place with {option}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found = "a folder that is closed to this user" if existing.is_dir() else "no folder"
        raise MachineError("cannot write here", place=str(existing), found=found, hint=hint)
    if (free := shutil.disk_usage(existing).free) < needed:
        found, allowed = f"{size(free)} free", f"{size(needed)} or more"
        raise MachineError("the disk is full", place=str(folder), found=found, allowed=allowed, hint=hint)


def _demand_memory(selection: Selection) -> None:
    """Raise MachineError where the ranks of a point need more memory than this machine has free."""
    memory = processor_memory()
    for point in selection.plan.points:
        described = selection.plan.description.points[point.id]
        on_processor = not selection.hardware.devices or (described.leg and described.leg.processor)
        needed = described.processor_bytes
        if on_processor and needed is not None and needed > memory.available_bytes:
            message = "the ranks need more memory than is free here; the kernel would kill them"
            found = f"about {size(needed)} for {point.world_size} rank(s), estimated"
            free = f"{size(memory.available_bytes)} free of {size(memory.limit_bytes)}: {memory.limited_by}"
            raise MachineError(
                message, place=point.id, found=found, allowed=free, hint=selection.workload.smaller
            )


def checkpointing_of(
    texts: Sequence[str], workload: Workload, plan: Plan, *, source: str | None = None
) -> Checkpointing | None:
    """Return what the options ask for, or None where nothing is saved; a run in legs saves at their ends.

    Args:
        texts: each a `key=value` of Checkpointing.
        source: where the leg before the one that is run has left its checkpoint.

    Raises:
        InputError: it is no such key or value, or this workload, engine or leg cannot do it.
    """
    points, model = plan.description.points, plan.description.model
    legs = [one for point in plan.points if (one := points[point.id].leg)]
    _check_source(plan, legs, source)
    if not texts and not legs:
        return None
    if not workload.saves or model:
        message = "nothing is trained, so nothing is saved" if model else "a run of this kind is not saved"
        raise InputError(message, place=OPTION, found=in_words(model) if model else f"[{plan.workload}]")
    for point in plan.points:
        if without := points[point.id].unsaved:
            message, allowed = "no checkpoint is made of this layout", "layouts of data parallelism and ZeRO"
            hint = "choose layouts with --set layouts=..., or leave --checkpoint out"
            raise InputError(message, place=f"{OPTION} {point.id}", found=without, allowed=allowed, hint=hint)
    values: dict[str, Any] = {"steps": max(one.end for one in legs), "mode": "bounded"} if legs else {}
    values |= parse_settings(texts, place=OPTION, example="steps=20")
    if "begin" in values:
        raise InputError("legs alone have a beginning", place=OPTION, found="begin", hint="use --leg")
    asked = validate(values, Checkpointing, place=OPTION)
    given = (asked.place, source or asked.source)
    place, source = (str(Path(one).absolute()) if one and "://" not in one else one for one in given)
    return asked.model_copy(update={"place": place, "source": source})


def _check_source(plan: Plan, legs: Sequence[LegSteps], source: str | None) -> None:
    """Refuse a later leg that has nothing to go on from, and a source that nothing goes on from."""
    known = {point.id for point in plan.points}
    lacking = [one for one in legs[:1] if one.previous and one.previous not in known]
    for leg in lacking if not source else ():
        message = f"leg {leg.number} goes on after step {leg.begin}"
        allowed = f"the run folder of leg {leg.number - 1}"
        raise InputError(message, place=FROM, found="nothing to go on from", allowed=allowed)
    if source and not lacking:
        message, allowed = "nothing here goes on from another run", "with --leg 2 or a later one"
        hint = "`--checkpoint source=...` is for a run without legs"
        raise InputError(message, place=FROM, found=source, allowed=allowed, hint=hint)


def resolved(asked: Checkpointing | None, plan: Plan, *, run: Path, resume: bool) -> dict[str, Checkpointing]:
    """Return the checkpoints of each point, once what lies at their places was held against the plan.

    Args:
        run: folder of the run, in which points save where no other place is asked for.

    Raises:
        InputError: a leg was run before, or what it should go on from is no checkpoint, of another run, or
            after another step.
    """
    if asked is None:
        return {}
    for option, folder in ((FROM, asked.source), (f"{OPTION} place", asked.place)):
        if folder and not Path(folder).is_dir():
            hint = "name a folder that is there; a bucket must be mounted"
            raise InputError("no such folder", place=option, found=folder, hint=hint)
    found = dict[str, Checkpointing]()
    for point in plan.points:
        leg = plan.description.points[point.id].leg
        source: str | None = asked.source
        place = Path(asked.place, point.id) if asked.place else run / "checkpoints" / point.id
        if leg and asked.place and not resume and (steps := FolderStore(place).steps()):
            message = f"leg {leg.number} was run before; nothing is overwritten"
            found_there = f"a checkpoint after step {steps[-1]}"
            hint = "choose another place, run the leg after it, or go on with --resume"
            raise InputError(message, place=str(place), found=found_there, hint=hint)
        if leg and leg.previous in found:
            source = found[leg.previous].place
        elif leg:
            source = _source_of(leg, source, plan) if leg.previous and source else None
        own = {"place": str(place), "source": source, "begin": leg.begin if leg else None}
        found[point.id] = asked.model_copy(update=own)
    return found


def _source_of(leg: LegSteps, given: str, plan: Plan) -> str:
    """Return the place of the leg before inside a run folder, a place of several points, or as it is."""
    inside = [Path(given, "checkpoints", str(leg.previous)), Path(given, str(leg.previous)), Path(given)]
    place = next((one for one in inside if FolderStore(one).steps()), inside[-1])
    store = FolderStore(place)
    steps = store.steps()
    if leg.begin not in steps:
        message = f"leg {leg.number} goes on after step {leg.begin}" if steps else "no checkpoint here"
        found = f"checkpoints after step {', '.join(map(str, steps))}" if steps else "no folder `step-...`"
        allowed = f"one after step {leg.begin}, where leg {leg.number - 1} ends"
        raise InputError(message, place=str(place), found=found, allowed=allowed)
    # Data and tokenizer are the ranks' to compare: here they may not be prepared yet.
    ours, theirs = plan.description.identity, read_manifest(store, leg.begin).identity
    held = {name: theirs.get(name, "nothing") for name in {*ours, *(name for name in theirs if "." in name)}}
    file = store.file(leg.begin, MANIFEST)
    demand_same_run(held, ours, "the checkpoint is of another run", place=file)
    return str(place)


def _demand_signatures(root: Path, found: Mapping[str, Checkpointing], *, signed: bool) -> None:
    """Hold the checkpoints that a run goes on from against their signatures, where those are demanded.

    Args:
        signed: an option demands them; the file of signers may too.

    Raises:
        InputError: no known signer has signed the newest of a place, or the one that a leg goes on from.
    """
    if signed and not found:
        raise InputError("nothing here goes on from a checkpoint", place="--require-signature")
    own = {one.place for one in found.values()}
    for one in found.values() if is_demanded(root, asked=signed) else ():
        demand_signed_checkpoint(FolderStore(Path(one.place)), step=None, root=root)
        if one.source and one.source not in own:
            demand_signed_checkpoint(FolderStore(Path(one.source)), step=one.begin, root=root)
