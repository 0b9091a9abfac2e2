"""What a run uses where the user did not say, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from twinrun.execution.engine import Engine
from twinrun.execution.engines import ENGINES, load_engine
from twinrun.execution.launchers import LAUNCHERS, Launcher, load_launcher
from twinrun.execution.schedulers import Scheduler, load_scheduler
from twinrun.execution.site_qualification import is_slow, qualification_of
from twinrun.foundation.cache import bytecode_folder
from twinrun.foundation.errors import InputError, MachineError, require_known
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import duration, number
from twinrun.machine.architecture import misfit, refuse_misfit
from twinrun.machine.inventory import detect, processor
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


class Request(Frozen):
    """`invoke run` as typed; None where the user left the choice to us."""

    recipe: str
    vendor: str | None = None
    stack: str | None = None
    engine: str | None = None
    launcher: str | None = None
    scheduler: str | None = None
    cluster: str | None = None
    """Site of cluster.toml."""
    image: str | None = None
    """Image of a user or a vendor, to run in place of the stack's."""
    scale: str | None = None
    settings: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()
    leg: int | None = None
    """Leg to run, for a recipe that has several; all when left out."""
    source: str | None = None
    """Where the leg before it has left its checkpoint: `--from`."""
    dry: bool = False
    signed: bool = False
    """Whether the run goes on only from a checkpoint that a known signer has signed."""


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
    machine, vendor = _at_site(project, request, site) if site else _machine(project, request, loaded)
    scale = _scale(request.scale, machine, site)
    wanted = machine.vendor if vendor is None else vendor.value
    stack, stack_choice = stack_for_run(project, loaded, asked=request.stack, vendor=wanted, machine=machine)
    name = stack.stack.vendor
    if request.image:
        stack = stack.model_copy(update={"own_image": request.image})
    engine = _engine(project, request, stack, machine, site)
    module = load_engine(engine.value)
    launcher = _choice("launcher", request.launcher, site, default=LAUNCHER)
    scheduler = _choice("scheduler", request.scheduler, site, default=SCHEDULER)
    gpu = _site_gpu(project, site) if site else _gpu(machine, project.gpus, scale.value, loaded)
    giver = load_scheduler(scheduler.value, site=site)
    nodes = _nodes(giver, site, dry=request.dry)
    hardware = _hardware(project, machine, gpu, vendor=name, nodes=nodes, site=site)
    plan, planned = resolve(
        loaded,
        scale=scale.value,
        settings=request.settings,
        stack=stack,
        hardware=hardware,
        engine=engine.value,
        launcher=launcher.value,
        scheduler=scheduler.value,
        node_devices=site.site.devices_per_node if site else None,
        leg=request.leg,
        workload=workload,
    )
    chosen = vendor or Choice(name="vendor", value=name, because=_seen(machine))
    # The engine first: it changes when somebody builds an image.
    decided = (engine, chosen, scale, stack_choice, launcher, scheduler)
    checkpoints = checkpointing_of(request.checkpoint, workload=workload, plan=plan, source=request.source)
    selection = Selection(
        plan=plan,
        workload=workload,
        checkpointing=checkpoints,
        engine=module,
        launcher=_launcher(plan, giver),
        scheduler=giver,
        choices=(*decided, *planned, *_estimate(plan), *_limit(plan, site), *_network(site)),
        recipe=loaded,
        stack=stack,
        vendor=project.vendors[name],
        machine=machine,
        gpu=gpu,
        signed=request.signed,
        hardware=hardware,
    )
    if not request.dry:
        demand_runnable(selection)
    return selection


def demand_runnable(selection: Selection) -> None:
    """Raise a TwinrunError where the hardware, or the scheduler, cannot run a plan that was resolved."""
    plan, scheduler = selection.plan, selection.scheduler
    refuse(
        selection.workload,
        plan.description.points,
        plan.points,
        scale=plan.scale,
        hardware=selection.hardware,
        here=scheduler.site is None,
    )
    _demand_nodes(scheduler, plan)


def _site(root: Path, name: str) -> LoadedSite:
    """Return a site whose engine and launcher exist."""
    site = load_site(root, name)
    for kind, known in (("engine", list(ENGINES)), ("launcher", list(LAUNCHERS))):
        value, place = getattr(site.site, kind), f"{site.place}.{kind}"
        require_known(value, known, f"unknown {kind}", place=place)
    return site


def _at_site(project: Project, request: Request, site: LoadedSite) -> tuple[Machine, Choice]:
    """Return this machine, which only submits, and the vendor of the site."""
    vendor = site.site.vendor
    require_vendor(vendor, project.vendors)
    if request.vendor not in (None, vendor):
        raise InputError(
            "the site is of another vendor", place="--vendor", found=request.vendor, allowed=vendor
        )
    machine = detect(project.root, vendor=processor(project.root))
    return machine, Choice(name="vendor", value=vendor, because=f"the site {site.name} has it")


def _site_gpu(project: Project, site: LoadedSite) -> Gpu | None:
    if site.site.gpu is None:
        return None
    require_known(site.site.gpu, project.gpus, "no such GPU", place=f"{site.place}.gpu")
    return project.gpus[site.site.gpu]


def _hardware(
    project: Project,
    machine: Machine,
    gpu: Gpu | None,
    *,
    vendor: str,
    nodes: int | None,
    site: LoadedSite | None,
) -> Hardware:
    return Hardware(
        gpu=gpu,
        device_memory_bytes=_device_memory(machine, gpu),
        devices=_devices(machine, site),
        cores=site.site.cores_per_node if site else machine.cpu_count,
        nodes=nodes,
        network_gbit_s=site.site.network_gbit_s if site else None,
        vendor=vendor,
        processor=processor(project.root),
    )


def _nodes(scheduler: Scheduler, site: LoadedSite | None, *, dry: bool) -> int | None:
    """Return the nodes that points may have: of a site those that are up, in a plan all that it has."""
    if dry:
        return site.site.nodes if site else None
    found = scheduler.size()
    return min(found, site.site.nodes) if site else found


def _devices(machine: Machine, site: LoadedSite | None) -> int:
    """Return the GPUs that a plan may use, 0 on a processor."""
    if site is None:
        return len(machine.devices)
    return site.site.nodes * site.site.devices_per_node if site.site.gpu else 0


def _choice(name: str, asked: str | None, site: LoadedSite | None, *, default: str) -> Choice:
    """Return what was asked for, else what the site has under that name, else the default."""
    if site and not asked:
        return Choice(name=name, value=getattr(site.site, name), because=f"the site {site.name} has it")
    return Choice(name=name, value=asked or default, because=_why(asked))


def _machine(project: Project, request: Request, loaded: LoadedRecipe) -> tuple[Machine, Choice | None]:
    """Probe the machine; a paper-scale plan that will not run may be for GPUs it lacks."""
    root, only_a_plan = project.root, request.scale == "paper" and request.dry
    if request.vendor is None:
        machine = detect(root)
        if machine.devices or not only_a_plan:
            return machine, None
        vendor = project.gpus[_published_gpu(loaded)].vendor
        return machine, Choice(
            name="vendor", value=vendor, because="the published hardware; this is only a plan"
        )
    asked = Choice(name="vendor", value=request.vendor, because=_why(request.vendor))
    if only_a_plan:
        require_vendor(request.vendor, project.vendors)
        return detect(root), asked
    return detect(root, vendor=request.vendor), asked


def _scale(asked: str | None, machine: Machine, site: LoadedSite | None) -> Choice:
    if asked:
        return Choice(name="scale", value=asked, because=_why(asked))
    if site and site.site.gpu:
        return Choice(name="scale", value="node", because=f"the nodes of {site.name} have GPUs")
    if machine.devices:
        return Choice(name="scale", value="node", because="the machine has GPUs")
    return Choice(name="scale", value="smoke", because="no GPU in use")


def _engine(
    project: Project, request: Request, stack: LoadedStack, machine: Machine, site: LoadedSite | None
) -> Choice:
    """Return the engine that was asked for, else the site's, else docker where its image runs, else venv."""
    if request.image:
        found = request.engine or (site.site.engine if site else "docker")
        require_known(found, ("docker", "podman"), "runs no image by its name", place="--image")
        return Choice(name="engine", value=found, because=f"it runs the image {request.image}")
    if site:
        return _choice("engine", request.engine, site, default="venv")
    built, vendor = stack.stack.archs, project.vendors[stack.stack.vendor]
    unfit = misfit(built=built, machine=machine, vendor=vendor, gpus=project.gpus)
    if request.engine:
        if load_engine(request.engine).RUNS_IMAGES:
            refuse_misfit(image=stack.image(), built=built, unfit=unfit)
        return Choice(name="engine", value=request.engine, because=_why(request.engine))
    reason = load_engine("docker").unusable(stack=stack, vendor=vendor)
    if reason is None and unfit:
        reason = f"{stack.image()} is built for {', '.join(built)}, not for {unfit}"
    if reason is None:
        because = f"the daemon answers and has {stack.image()}"
        return Choice(name="engine", value="docker", because=because)
    return Choice(name="engine", value="venv", because=reason)


def _gpu(machine: Machine, gpus: dict[str, Gpu], scale: str, loaded: LoadedRecipe) -> Gpu | None:
    if machine.devices:
        known = machine.devices[0].gpu
        return gpus[known] if known else None
    return gpus[_published_gpu(loaded)] if scale == "paper" else None


def _published_gpu(loaded: LoadedRecipe) -> str:
    published = loaded.published
    named = [claim.hardware.gpu for claim in published.claim if claim.hardware]
    named += [claim.over.gpu for claim in published.between_records]
    if not named:
        raise InputError(
            "no claim names its hardware", place=f"{loaded.folder}/published.toml:claim.hardware"
        )
    return named[0]


def _device_memory(machine: Machine, gpu: Gpu | None) -> int | None:
    probed = [device.memory_bytes for device in machine.devices if device.memory_bytes]
    if probed:
        return min(probed)
    return gpu.device_memory_bytes if gpu else None


def _launcher(plan: Plan, scheduler: Scheduler) -> Launcher:
    """Return the launcher; raises MachineError where it cannot start ranks on what the scheduler gives."""
    launcher = load_launcher(plan.launcher)
    reason = launcher.unusable(scheduler.abilities)
    if reason:
        raise MachineError(reason, place=f"--launcher {plan.launcher}", found=plan.scheduler)
    return launcher


def _demand_nodes(scheduler: Scheduler, plan: Plan) -> None:
    """Raise MachineError where the scheduler cannot give the nodes of a point."""
    nodes = max(point.nodes for point in plan.points)
    site = scheduler.site
    reason = scheduler.unusable(nodes=nodes)
    if reason:
        raise MachineError(
            reason,
            place=f"--scheduler {plan.scheduler}",
            allowed=f"points of up to {site.site.nodes} nodes" if site else "points of one node",
            hint="print the plan with --dry, or use --scale node",
        )
    if site and nodes > site.site.nodes:
        raise MachineError(
            "no job gets so many nodes",
            place=f"{site.place}.nodes",
            found=nodes,
            allowed=f"up to {site.site.nodes}",
            hint="choose fewer with --set nodes=..., or print the plan with --dry",
        )


def _most(point: Point) -> float | None:
    """Return the seconds of a point at the upper end of the interval of a step, None where nobody knows."""
    first = point.predicted[0] if point.predicted else None
    if point.seconds is None or first is None or not first.seconds or not first.covers:
        return point.seconds
    return point.seconds * max(1.0, first.covers[1] / first.seconds)


def _estimate(plan: Plan) -> tuple[Choice, ...]:
    """Return how long the points will take and the node-hours of that, where anything is known of it."""
    known = [point for point in plan.points if point.seconds is not None]
    if not known:
        return ()
    start = LATER_START if bytecode_folder().is_dir() else FIRST_START
    total, most = (
        start + sum(one.seconds or 0 for one in known),
        start + sum(_most(one) or 0 for one in known),
    )
    value = f"about {duration(total)}" + (f", at most {duration(most)}" if most > 1.02 * total else "")
    each = [f"start {duration(start)}", *(f"{one.id} {duration(one.seconds or 0)}" for one in known)]
    because = ", ".join(each)
    if unknown := [one.id for one in plan.points if one.seconds is None]:
        value += f" for {len(known)} of {len(plan.points)} points"
        because += f"; not estimated: {', '.join(unknown)}"
    found = [Choice(name="time", value=value, because=because)]
    if max(point.nodes for point in plan.points) > 1 and not unknown:
        hours, worst = (
            sum(one.nodes * (start + (of(one) or 0)) for one in known) / 3600
            for of in (lambda one: one.seconds, _most)
        )
        value, because = f"{number(hours)}, at most {number(worst)}", "nodes of each point by its time"
        found.append(Choice(name="node hours", value=value, because=because))
    return tuple(found)


def _limit(plan: Plan, site: LoadedSite | None) -> tuple[Choice, ...]:
    """Return what stands against the time limit of a site: points that may take longer, or nobody knows."""
    if site is None:
        return ()
    most = {point.id: _most(point) for point in plan.points}
    longer = [
        f"{name} takes up to {duration(seconds + FIRST_START)}"
        for name, seconds in most.items()
        if seconds is not None and seconds + FIRST_START > site.site.minutes * 60
    ]
    found = []
    if longer:
        because = f"{', '.join(longer)}: raise `minutes` of {site.place}"
        found.append(Choice(name="limit", value=f"{site.site.minutes} min is too short", because=because))
    if unknown := [name for name, seconds in most.items() if seconds is None]:
        because = f"not estimated: {', '.join(unknown)}; a job is ended after that"
        found.append(Choice(name="limit", value=f"{site.site.minutes} min", because=because))
    return tuple(found)


def _network(site: LoadedSite | None) -> tuple[Choice, ...]:
    """Return that sockets carry what a fast link is declared for, where that was measured."""
    measured = qualification_of(site) if site else None
    if site is None or measured is None or not is_slow(site.site, measured):
        return ()
    value = f"{measured.transport} carries the messages, where a fast link is declared"
    because = f"measured {measured.created:%Y-%m-%d}; {site.place} declares the link"
    return (Choice(name=NETWORK, value=value, because=because),)


def _seen(machine: Machine) -> str:
    if not machine.devices:
        return machine.probe
    return f"{len(machine.devices)} x {machine.devices[0].name}"


def _why(asked: str | None) -> str:
    return ASKED if asked else "default when no --cluster is given"


def stack_for_run(
    project: Project, loaded: LoadedRecipe, *, asked: str | None, vendor: str, machine: Machine
) -> tuple[LoadedStack, Choice]:
    """Return the stack that a run uses, and why: as asked for, else the vendor's that is built for its GPUs.

    Raises:
        InputError: the recipe has no stack for the vendor, or the one that is asked for does not serve it.
    """
    stacks = loaded.recipe.stacks
    there = (name for name in stacks.published if (project.root / "images" / "stacks" / name).is_dir())
    serving = [*stacks.current.values(), *stacks.also, *there]
    name = asked or _fitting(project, loaded, vendor, machine)
    if name is None:
        raise InputError(
            "the recipe has no stack for this vendor",
            place=f"{loaded.folder}/recipe.toml:stacks.current",
            found=vendor,
            allowed=sorted(stacks.current),
        )
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
    return stack, _reason(loaded, stack, asked=asked)


def _fitting(project: Project, loaded: LoadedRecipe, vendor: str, machine: Machine) -> str | None:
    """Return the vendor's current stack, or the first further one where that is not built for the GPUs.

    Raises:
        MachineError: no stack that serves the recipe is built for the GPUs of this machine.
    """
    stacks = loaded.recipe.stacks
    current = stacks.current.get(vendor)
    if current is None:
        return None
    serving = (current, *(name for name in stacks.also if project.stack(name).stack.vendor == vendor))
    unfit: str | None = None
    for name in serving:
        built = project.stack(name).stack.archs
        unfit = misfit(built=built, machine=machine, vendor=project.vendors[vendor], gpus=project.gpus)
        if not unfit:
            return name
    raise MachineError(
        "no stack of this recipe is built for this GPU",
        place="--stack",
        found=unfit,
        allowed=[f"{name}: {', '.join(project.stack(name).stack.archs)}" for name in serving],
        hint="name one with --stack to try it all the same, or take --vendor cpu",
    )


def _reason(loaded: LoadedRecipe, stack: LoadedStack, *, asked: str | None) -> Choice:
    vendor, name = stack.stack.vendor, stack.stack.name
    because = ASKED if asked else f"the recipe's current stack for {vendor}"
    if not asked and name != (current := loaded.recipe.stacks.current[vendor]):
        because = f"{current} is not built for this GPU"
    return Choice(name="stack", value=stack.stack.name, because=because)
