"""What a run uses where the user did not say, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twinrun.execution.engine import Engine
from twinrun.execution.engines import ENGINES, load_engine
from twinrun.execution.launchers import LAUNCHERS, Launcher, load_launcher
from twinrun.execution.schedulers import Scheduler, load_scheduler
from twinrun.execution.site_qualification import is_slow, qualification_of
from twinrun.foundation.cache import bytecode_folder
from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.foundation.text import duration, number
from twinrun.machine.inventory import detect, misfit, processor, refuse_misfit
from twinrun.manifests.cluster import LoadedSite, load_site
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Gpu, Vendor, require_vendor
from twinrun.planning.configuration import differences_of_plan
from twinrun.planning.plan import Plan, resolve
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Machine
from twinrun.protocol.job import Checkpointing
from twinrun.runs.checkpointing import checkpointing_of
from twinrun.workloads import load_workload
from twinrun.workloads.settings import Difference
from twinrun.workloads.sweep import refuse
from twinrun.workloads.workload import Choice, Hardware, PlanDescription, Point, Workload

LAUNCHER, SCHEDULER = "torchrun", "local"
# The choice that says of a site that its network does not do what is declared; the record has it.
NETWORK = "network"
# Why a choice is what the user typed.
ASKED = "asked for"
# Seconds before the first point: where interpreters have compiled nothing yet, every file is read for the
# first time and the data are prepared. Of 50 records of trainings on H100s and H200s, 49 took the estimate
# with one of the two within 25 % (tests/workloads/test_estimates.py).
FIRST_START, LATER_START = 45.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """`invoke run` as typed; None where the user left the choice to us."""

    recipe: Annotated[str, Parameter(parse=False)] = ""
    """Its folder or name, which the command takes as a word."""
    vendor: str | None = None
    """folder of images/vendors; what the machine has when left out"""
    stack: str | None = None
    """folder of images/stacks; the recipe's current one when left out"""
    engine: str | None = None
    """docker, apptainer, venv or host"""
    launcher: str | None = None
    """who starts the ranks: torchrun, srun or mpirun"""
    scheduler: str | None = None
    """who gives the machines: local, slurm, pbs or gridengine"""
    cluster: str | None = None
    """site of cluster.toml, where the scheduler is"""
    image: str | None = None
    """your own image of Docker or Podman, in place of the stack's; the record says what differs"""
    scale: str | None = None
    """how much of the experiment: smoke, on a processor; node, on this machine; paper, as published"""
    checkpoint: tuple[str, ...] = ()
    """key=value: steps=N between saves, mode=exact or bounded, place and source"""
    leg: int | None = None
    """the one leg to run, of a recipe whose run has several"""
    set: tuple[str, ...] = ()
    """key=value, a field of the table of the recipe's workload; may be given many times"""
    from_: str | None = None
    """where the leg before it has left its checkpoint: a run folder, or a folder of checkpoints"""
    dry: Annotated[bool, Parameter(alias="-n")] = False
    """print the plan on a page and stop; with --json all of it"""
    require_signature: bool = False
    """go on only from checkpoints whose newest a name in allowed_signers has signed"""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A plan with everything it was chosen from; nothing below looks a name of the plan up again."""

    plan: Plan
    workload: Workload
    engine: type[Engine]
    launcher: Launcher
    scheduler: Scheduler
    choices: tuple[Choice, ...]
    recipe: LoadedRecipe
    stack: LoadedStack
    vendor: Vendor
    machine: Machine
    """The host that submits."""
    hardware: Hardware
    """What the plan was made for."""
    gpu: Gpu | None
    checkpointing: Checkpointing | None = None
    """No part of the plan: it leaves what is measured as it is."""
    signed: bool = False
    """Whether the run goes on only from a checkpoint that a known signer has signed."""

    @property
    def description(self) -> PlanDescription:
        """What follows from the plan."""
        return self.plan.description

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Where the run will not be the published configuration."""
        return differences_of_plan(self.recipe, self.plan)

    @property
    def site(self) -> LoadedSite | None:
        """Where the scheduler is, None for this machine."""
        return self.scheduler.site

    @property
    def accelerator(self) -> bool:
        """Whether ranks use GPUs."""
        return self.gpu is not None if self.site else bool(self.machine.devices)

    @property
    def cores(self) -> int:
        """CPU cores of a node."""
        return self.hardware.cores


def select(project: Project, request: Request) -> Selection:
    """Choose what the request leaves open and resolve the plan; starts nothing.

    Raises:
        InputError: a name or setting that does not exist.
        MachineError: this machine cannot run it.
    """
    loaded = project.recipe(request.recipe)
    workload = load_workload(loaded.workload)
    require_known(request.scale or SCALES[0], SCALES, "unknown scale", place="--scale")
    site = _site(project.root, request.cluster) if request.cluster else None
    machine, vendor = _machine(project, request, loaded, site)
    many = bool(site.site.gpu if site else machine.devices)
    why = f"the nodes of {site.name} have GPUs" if site else "the machine has GPUs"
    why = why if many else "no GPU in use"
    scale = chosen("scale", request.scale, default="node" if many else "smoke", why=why)
    stack, stack_choice = stack_for_run(
        project, loaded, asked=request.stack, vendor=vendor.value, machine=machine
    )
    if request.image:
        stack = stack.model_copy(update={"own_image": request.image})
    engine = _engine(project, request, stack, machine, site)
    launcher = chosen("launcher", request.launcher, site=site, default=LAUNCHER)
    scheduler = chosen("scheduler", request.scheduler, site=site, default=SCHEDULER)
    module, giver = load_engine(engine.value), load_scheduler(scheduler.value, site=site)
    hardware = _hardware(project, loaded, machine, site, scale=scale.value, vendor=stack.stack.vendor)
    if not (request.dry and site is None):
        # In a plan a site has all its nodes, in a run those that are up.
        nodes = [site.site.nodes] if site else []
        nodes += [] if request.dry else [giver.size()]
        hardware = hardware.model_copy(update={"nodes": min(nodes)})
    plan, planned = resolve(
        loaded,
        scale=scale.value,
        settings=request.set,
        stack=stack,
        hardware=hardware,
        engine=engine.value,
        launcher=launcher.value,
        scheduler=scheduler.value,
        node_devices=site.site.devices_per_node if site else None,
        leg=request.leg,
        workload=workload,
    )
    # The engine first: it changes when somebody builds an image.
    decided = (engine, vendor, scale, stack_choice, launcher, scheduler)
    starter = load_launcher(plan.launcher)
    if reason := starter.unusable(giver.abilities):
        raise MachineError(reason, place=f"--launcher {plan.launcher}", found=plan.scheduler)
    selection = Selection(
        plan=plan,
        workload=workload,
        checkpointing=checkpointing_of(
            request.checkpoint, workload=workload, plan=plan, source=request.from_
        ),
        engine=module,
        launcher=starter,
        scheduler=giver,
        choices=(*decided, *planned, *_time(plan), *(_doubts(plan, site) if site else ())),
        recipe=loaded,
        stack=stack,
        vendor=project.vendors[stack.stack.vendor],
        machine=machine,
        gpu=hardware.gpu,
        signed=request.require_signature,
        hardware=hardware,
    )
    if not request.dry:
        demand_runnable(selection)
    return selection


def demand_runnable(selection: Selection) -> None:
    """Raise a TwinrunError where the hardware, or the scheduler, cannot run a plan that was resolved."""
    plan, scheduler, site = selection.plan, selection.scheduler, selection.site
    refuse(
        selection.workload,
        plan.description.points,
        plan.points,
        scale=plan.scale,
        hardware=selection.hardware,
        here=site is None,
    )
    nodes = max(point.nodes for point in plan.points)
    if reason := scheduler.unusable(nodes=nodes):
        allowed = f"points of up to {site.site.nodes} nodes" if site else "points of one node"
        hint = "print the plan with --dry, or use --scale node"
        raise MachineError(reason, place=f"--scheduler {plan.scheduler}", allowed=allowed, hint=hint)
    if site and nodes > site.site.nodes:
        raise MachineError(
            "no job gets so many nodes",
            place=f"{site.place}.nodes",
            found=nodes,
            allowed=f"up to {site.site.nodes}",
            hint="choose fewer with --set nodes=..., or print the plan with --dry",
        )


def chosen(
    name: str,
    asked: str | None,
    *,
    site: LoadedSite | None = None,
    default: str,
    why: str = "default when no --cluster is given",
) -> Choice:
    """Return what was asked for, else what the site has under that name, else the default; each with why."""
    if asked:
        return Choice(name=name, value=asked, because=ASKED)
    if site:
        return Choice(name=name, value=getattr(site.site, name), because=f"the site {site.name} has it")
    return Choice(name=name, value=default, because=why)


def _site(root: Path, name: str) -> LoadedSite:
    """Return a site whose engine and launcher exist."""
    site = load_site(root, name)
    for kind, known in (("engine", list(ENGINES)), ("launcher", list(LAUNCHERS))):
        value, place = getattr(site.site, kind), f"{site.place}.{kind}"
        require_known(value, known, f"unknown {kind}", place=place)
    return site


def _machine(
    project: Project, request: Request, loaded: LoadedRecipe, site: LoadedSite | None
) -> tuple[Machine, Choice]:
    """Return this machine, and the vendor; a site and a plan of paper scale may be of another one."""
    root, asked = project.root, request.vendor
    if site:
        require_vendor(site.site.vendor, project.vendors)
        if asked not in (None, site.site.vendor):
            message, allowed = "the site is of another vendor", site.site.vendor
            raise InputError(message, place="--vendor", found=asked, allowed=allowed)
        return detect(root, vendor=processor(root)), chosen("vendor", None, site=site, default="")
    only_a_plan = request.scale == "paper" and request.dry
    if asked and only_a_plan:
        require_vendor(asked, project.vendors)
    machine = detect(root, vendor=None if only_a_plan else asked)
    if only_a_plan and not (asked or machine.devices):
        value, why = (
            project.gpus[_published_gpu(loaded)].vendor,
            "the published hardware; this is only a plan",
        )
    else:
        value, devices = machine.vendor, machine.devices
        why = f"{len(devices)} x {devices[0].name}" if devices else machine.probe
    return machine, chosen("vendor", asked, default=value, why=why)


def _hardware(
    project: Project,
    loaded: LoadedRecipe,
    machine: Machine,
    site: LoadedSite | None,
    *,
    scale: str,
    vendor: str,
) -> Hardware:
    """Return what the plan is made for: the site's, this machine's, else at paper scale the published."""
    devices, own = len(machine.devices), site.site if site else None
    named = machine.devices[0].gpu if devices else _published_gpu(loaded) if scale == "paper" else None
    if own and site:
        devices, named = own.nodes * own.devices_per_node if own.gpu else 0, own.gpu
        if named:
            require_known(named, project.gpus, "no such GPU", place=f"{site.place}.gpu")
    gpu = project.gpus[named] if named else None
    probed = [device.memory_bytes for device in machine.devices if device.memory_bytes]
    return Hardware(
        gpu=gpu,
        device_memory_bytes=min(probed, default=gpu.device_memory_bytes if gpu else None),
        devices=devices,
        cores=own.cores_per_node if own else machine.cpu_count,
        nodes=None,
        network_gbit_s=own.network_gbit_s if own else None,
        vendor=vendor,
        processor=processor(project.root),
    )


def _engine(
    project: Project, request: Request, stack: LoadedStack, machine: Machine, site: LoadedSite | None
) -> Choice:
    """Return the engine that was asked for, else the site's, else docker where its image runs, else venv."""
    if request.image:
        found = request.engine or (site.site.engine if site else "docker")
        require_known(found, ("docker", "podman"), "runs no image by its name", place="--image")
        return Choice(name="engine", value=found, because=f"it runs the image {request.image}")
    if site:
        return chosen("engine", request.engine, site=site, default="venv")
    built, vendor = stack.stack.archs, project.vendors[stack.stack.vendor]
    unfit = misfit(built=built, machine=machine, vendor=vendor, gpus=project.gpus)
    if request.engine:
        if load_engine(request.engine).RUNS_IMAGES:
            refuse_misfit(image=stack.image(), built=built, unfit=unfit)
        return chosen("engine", request.engine, default="")
    reason = load_engine("docker").unusable(stack=stack, vendor=vendor)
    if reason is None and unfit:
        reason = f"{stack.image()} is built for {', '.join(built)}, not for {unfit}"
    docker = f"the daemon answers and has {stack.image()}"
    return chosen("engine", None, default="venv" if reason else "docker", why=reason or docker)


def _published_gpu(loaded: LoadedRecipe) -> str:
    published = loaded.published
    named = [claim.hardware.gpu for claim in published.claim if claim.hardware]
    named += [claim.over.gpu for claim in published.between_records]
    if not named:
        place = f"{loaded.folder}/published.toml:claim.hardware"
        raise InputError("no claim names its hardware", place=place)
    return named[0]


def stack_for_run(
    project: Project, loaded: LoadedRecipe, *, asked: str | None, vendor: str, machine: Machine
) -> tuple[LoadedStack, Choice]:
    """Return the stack that a run uses, and why: as asked for, else the vendor's that is built for its GPUs.

    Raises:
        InputError: the recipe has no stack for the vendor, or the one that is asked for does not serve it.
        MachineError: no stack that serves the recipe is built for the GPUs of this machine.
    """
    stacks = loaded.recipe.stacks
    there = (name for name in stacks.published if (project.root / "images" / "stacks" / name).is_dir())
    serving = [*stacks.current.values(), *stacks.also, *there]
    current, name, why = stacks.current.get(vendor), asked, f"the recipe's current stack for {vendor}"
    if not asked and current is None:
        raise InputError(
            "the recipe has no stack for this vendor",
            place=f"{loaded.folder}/recipe.toml:stacks.current",
            found=vendor,
            allowed=sorted(stacks.current),
        )
    if not asked and current:
        also = (one for one in stacks.also if project.stack(one).stack.vendor == vendor)
        built = {one: project.stack(one).stack.archs for one in (current, *also)}
        card, gpus = project.vendors[vendor], project.gpus
        unfit = {
            one: misfit(built=archs, machine=machine, vendor=card, gpus=gpus) for one, archs in built.items()
        }
        name = next((one for one in built if not unfit[one]), None)
        if name is None:
            raise MachineError(
                "no stack of this recipe is built for this GPU",
                place="--stack",
                found=unfit[current],
                allowed=[f"{one}: {', '.join(archs)}" for one, archs in built.items()],
                hint="name one with --stack to try it all the same, or take --vendor cpu",
            )
        why = why if name == current else f"{current} is not built for this GPU"
    assert name
    stack = project.stack(name)
    require_known(name, serving, "the stack does not serve this recipe", place="--stack")
    if stack.stack.vendor != vendor:
        raise InputError(
            "the stack is for another vendor",
            place="--stack",
            found=f"{name} is for {stack.stack.vendor}",
            allowed=f"a stack for {vendor}",
            hint=f"add --vendor {stack.stack.vendor}, or leave --stack out",
        )
    return stack, chosen("stack", asked, default=name, why=why)


def _most(point: Point) -> float | None:
    """Return the seconds of a point at the upper end of the interval of a step, None where nobody knows."""
    first = point.predicted[0] if point.predicted else None
    if point.seconds is None or first is None or not first.seconds or not first.covers:
        return point.seconds
    return point.seconds * max(1.0, first.covers[1] / first.seconds)


def _time(plan: Plan) -> Iterator[Choice]:
    """Yield how long the points will take and the node-hours of that, where anything is known of it."""
    known = {one.id: (one.seconds, _most(one) or 0.0) for one in plan.points if one.seconds is not None}
    if not known:
        return
    start = LATER_START if bytecode_folder().is_dir() else FIRST_START
    total, most = (start + sum(several) for several in zip(*known.values(), strict=True))
    value = f"about {duration(total)}" + (f", at most {duration(most)}" if most > 1.02 * total else "")
    each = [f"start {duration(start)}", *(f"{name} {duration(one)}" for name, (one, _) in known.items())]
    because = ", ".join(each)
    if unknown := [one.id for one in plan.points if one.seconds is None]:
        value += f" for {len(known)} of {len(plan.points)} points"
        because += f"; not estimated: {', '.join(unknown)}"
    yield Choice(name="time", value=value, because=because)
    if max(point.nodes for point in plan.points) > 1 and not unknown:
        each_node = [[one.nodes * (start + each) for each in known[one.id]] for one in plan.points]
        hours, worst = (sum(several) / 3600 for several in zip(*each_node, strict=True))
        value, because = f"{number(hours)}, at most {number(worst)}", "nodes of each point by its time"
        yield Choice(name="node hours", value=value, because=because)


def _doubts(plan: Plan, site: LoadedSite) -> Iterator[Choice]:
    """Yield what stands against a site: points beyond its limit, or nobody knows; a slow network."""
    limit, most = site.site.minutes, {point.id: _most(point) for point in plan.points}
    ends = {name: seconds + FIRST_START for name, seconds in most.items() if seconds is not None}
    longer = [f"{name} takes up to {duration(end)}" for name, end in ends.items() if end > limit * 60]
    if longer:
        because = f"{', '.join(longer)}: raise `minutes` of {site.place}"
        yield Choice(name="limit", value=f"{limit} min is too short", because=because)
    if unknown := [name for name in most if name not in ends]:
        because = f"not estimated: {', '.join(unknown)}; a job is ended after that"
        yield Choice(name="limit", value=f"{limit} min", because=because)
    measured = qualification_of(site)
    if measured and is_slow(site.site, measured):
        value = f"{measured.transport} carries the messages, where a fast link is declared"
        because = f"measured {measured.created:%Y-%m-%d}; {site.place} declares the link"
        yield Choice(name=NETWORK, value=value, because=because)
