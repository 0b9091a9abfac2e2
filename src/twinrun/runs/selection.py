"""What a run uses where the user did not say, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from twinrun.execution.engine import Engine
from twinrun.execution.engines import ENGINES, load_engine
from twinrun.execution.launchers import LAUNCHERS, Launcher, load_launcher
from twinrun.execution.schedulers import Scheduler, load_scheduler
from twinrun.execution.site_qualification import is_slow, qualification_of
from twinrun.foundation.cache import bytecode_folder
from twinrun.foundation.errors import MachineError, require_equal, require_known
from twinrun.foundation.text import duration, number, plural
from twinrun.machine.inventory import detect, misfit, processor, refuse_misfit
from twinrun.manifests.cluster import LoadedSite, load_site
from twinrun.manifests.recipe import SCALES, LoadedRecipe
from twinrun.manifests.settings import parse_settings
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor, require_vendor
from twinrun.planning.plan import Plan, resolve
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Machine
from twinrun.workloads import load_workload
from twinrun.workloads.sweep import refuse
from twinrun.workloads.workload import Choice, Hardware, PlanRequest, Point, Workload

NO_SITE = "default when no --cluster is given"
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

    request: Request
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

    @property
    def site(self) -> LoadedSite | None:
        """Where the scheduler is, None for this machine."""
        return self.scheduler.site


def select(project: Project, request: Request) -> Selection:
    """Choose what the request leaves open and resolve the plan; starts nothing.

    Raises:
        InputError: a name or setting that does not exist.
        MachineError: this machine cannot run it.
    """
    recipe = project.recipe(request.recipe)
    workload = load_workload(recipe.workload)
    require_known(request.scale or SCALES[0], SCALES, "unknown scale", place="--scale")
    site = load_site(project.root, request.cluster) if request.cluster else None
    if site:
        require_known(site.site.engine, ENGINES, "unknown engine", place=f"{site.place}.engine")
        require_known(site.site.launcher, LAUNCHERS, "unknown launcher", place=f"{site.place}.launcher")
    machine, vendor = _machine(project, request, recipe, site)
    why = f"the nodes of {site.name} have GPUs" if site else "the machine has GPUs"
    usual, why = ("node", why) if (site.site.gpu if site else machine.devices) else ("smoke", "no GPU in use")
    scale = chosen("scale", request.scale, default=usual, why=why)
    stack, stack_choice = stack_for_run(
        project, recipe, asked=request.stack, vendor=vendor.value, machine=machine
    )
    if request.image:
        stack = stack.model_copy(update={"own_image": request.image})
    engine = _engine(project, request, stack, machine, site)
    launcher = chosen("launcher", request.launcher, site, default="torchrun")
    scheduler = chosen("scheduler", request.scheduler, site, default="local")
    module, giver = load_engine(engine.value), load_scheduler(scheduler.value, site=site)
    # In a plan a site has all its nodes, in a run those that are up.
    nodes = [*([site.site.nodes] if site else []), *([] if request.dry else [giver.size()])]
    hardware = _hardware(project, recipe, machine, site, scale=scale.value).model_copy(
        update={"nodes": min(nodes, default=None), "vendor": stack.stack.vendor}
    )
    asked = PlanRequest(
        recipe=recipe,
        scale=scale.value,
        overrides=parse_settings(request.set),
        stack=stack,
        hardware=hardware,
        node_devices=site.site.devices_per_node if site else None,
        leg=request.leg,
    )
    plan, planned = resolve(asked, engine=engine.value, launcher=launcher.value, scheduler=scheduler.value)
    starter = load_launcher(plan.launcher)
    if reason := starter.unusable(giver.abilities):
        raise MachineError(reason, place=f"--launcher {plan.launcher}", found=plan.scheduler)
    # The engine first: it changes when somebody builds an image.
    decided = (engine, vendor, scale, stack_choice, launcher, scheduler)
    selection = Selection(
        request=request,
        plan=plan,
        workload=workload,
        engine=module,
        launcher=starter,
        scheduler=giver,
        choices=(*decided, *planned, *_estimates(plan, site)),
        recipe=recipe,
        stack=stack,
        vendor=project.vendors[stack.stack.vendor],
        machine=machine,
        hardware=hardware,
    )
    if not request.dry:
        demand_runnable(selection)
    return selection


def demand_runnable(selection: Selection) -> None:
    """Raise a TwinrunError where the hardware, or the scheduler, cannot run a plan that was resolved."""
    plan, site, hardware = selection.plan, selection.site, selection.hardware
    described = plan.description.points
    refuse(selection.workload, described, plan.points, scale=plan.scale, hardware=hardware, here=site is None)
    nodes, most = max(point.nodes for point in plan.points), site.site.nodes if site else 1
    reason = selection.scheduler.unusable(nodes=nodes)
    if reason or nodes > most:
        place = f"{site.place}.nodes" if site else f"--scheduler {plan.scheduler}"
        allowed = f"points of up to {plural(most, 'node')}"
        hint = "choose fewer with --set nodes=..., use --scale node, or print the plan with --dry"
        message = reason or "no job gets so many nodes"
        raise MachineError(message, place=place, found=nodes, allowed=allowed, hint=hint)


def chosen(
    name: str, asked: str | None, site: LoadedSite | None = None, *, default: str = "", why: str = NO_SITE
) -> Choice:
    """Return what was asked for, else what the site has under that name, else the default; each with why."""
    if asked:
        return Choice(name=name, value=asked, because=ASKED)
    if site:
        return Choice(name=name, value=getattr(site.site, name), because=f"the site {site.name} has it")
    return Choice(name=name, value=default, because=why)


def _machine(
    project: Project, request: Request, recipe: LoadedRecipe, site: LoadedSite | None
) -> tuple[Machine, Choice]:
    """Return this machine, and the vendor; a site and a plan of paper scale may be of another one."""
    root, asked = project.root, request.vendor
    only_a_plan = request.scale == "paper" and request.dry
    if named := site.site.vendor if site else asked if only_a_plan else None:
        require_vendor(named, project.vendors)
    if site:
        message = "the site is of another vendor"
        require_equal(asked or site.site.vendor, site.site.vendor, message, place="--vendor")
        return detect(root, vendor=processor(root)), chosen("vendor", None, site)
    machine = detect(root, vendor=None if only_a_plan else asked)
    found, why = machine.vendor, machine.probe
    if machine.devices:
        why = f"{len(machine.devices)} x {machine.devices[0].name}"
    elif only_a_plan and not asked and (published := _published_gpu(recipe)):
        found, why = project.gpus[published].vendor, "the published hardware; this is only a plan"
    return machine, chosen("vendor", asked, default=found, why=why)


def _hardware(
    project: Project, recipe: LoadedRecipe, machine: Machine, site: LoadedSite | None, *, scale: str
) -> Hardware:
    """Return what the plan is made for: the site's, this machine's, else at paper scale the published."""
    devices, own = machine.devices, site.site if site else None
    published = _published_gpu(recipe) if scale == "paper" and not devices and not own else None
    named = own.gpu if own else devices[0].gpu if devices else published
    if site and named:
        require_known(named, project.gpus, "no such GPU", place=f"{site.place}.gpu")
    gpu = project.gpus[named] if named else None
    probed = [one.memory_bytes for one in devices if one.memory_bytes]
    return Hardware(
        gpu=gpu,
        device_memory_bytes=min(probed, default=gpu.device_memory_bytes if gpu else None),
        devices=own.nodes * own.devices_per_node if own and gpu else len(devices),
        cores=own.cores_per_node if own else machine.cpu_count,
        network_gbit_s=own.network_gbit_s if own else None,
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
        return chosen("engine", request.engine, site)
    image, built, unfit = stack.image(), stack.stack.archs, _unfit(project, stack, machine)
    if request.engine:
        if load_engine(request.engine).RUNS_IMAGES:
            refuse_misfit(image=image, built=built, unfit=unfit)
        return chosen("engine", request.engine)
    reason = load_engine("docker").unusable(stack=stack, vendor=project.vendors[stack.stack.vendor])
    if reason is None and unfit:
        reason = f"{image} is built for {', '.join(built)}, not for {unfit}"
    why = reason or f"the daemon answers and has {image}"
    return chosen("engine", None, default="venv" if reason else "docker", why=why)


def _unfit(project: Project, stack: LoadedStack, machine: Machine) -> str | None:
    """Return which devices of a machine cannot run the code of a stack, or None."""
    vendor = project.vendors[stack.stack.vendor]
    return misfit(built=stack.stack.archs, machine=machine, vendor=vendor, gpus=project.gpus)


def _published_gpu(recipe: LoadedRecipe) -> str | None:
    named = [claim.hardware.gpu for claim in recipe.published.claim if claim.hardware]
    named += [claim.over.gpu for claim in recipe.published.between_records]
    return named[0] if named else None


def stack_for_run(
    project: Project, recipe: LoadedRecipe, *, asked: str | None, vendor: str, machine: Machine
) -> tuple[LoadedStack, Choice]:
    """Return the stack that a run uses, and why: as asked for, else the vendor's that is built for its GPUs.

    Raises:
        InputError: the recipe has no stack for the vendor, or the one that is asked for does not serve it.
        MachineError: no stack that serves the recipe is built for the GPUs of this machine.
    """
    stacks, name, why = recipe.recipe.stacks, asked, ""
    if not name:
        place = f"{recipe.folder}/recipe.toml:stacks.current"
        require_known(vendor, sorted(stacks.current), "the recipe has no stack for this vendor", place=place)
        current, why = stacks.current[vendor], f"the recipe's current stack for {vendor}"
        also = [one for one in stacks.also if project.stack(one).stack.vendor == vendor]
        unfit = {one: _unfit(project, project.stack(one), machine) for one in (current, *also)}
        name = next((one for one in unfit if not unfit[one]), None)
        if name is None:
            message, found = "no stack of this recipe is built for this GPU", unfit[current]
            built = [f"{one}: {', '.join(project.stack(one).stack.archs)}" for one in unfit]
            hint = "name one with --stack to try it all the same, or take --vendor cpu"
            raise MachineError(message, place="--stack", found=found, allowed=built, hint=hint)
        why = why if name == current else f"{current} is not built for this GPU"
    stack = project.stack(name)
    there = (one for one in stacks.published if (project.root / "images" / "stacks" / one).is_dir())
    serving = [*stacks.current.values(), *stacks.also, *there]
    require_known(name, serving, "the stack does not serve this recipe", place="--stack")
    own, hint = stack.stack.vendor, f"add --vendor {stack.stack.vendor}, or leave --stack out"
    require_equal(own, vendor, "the stack is for another vendor", place="--stack", hint=hint)
    return stack, chosen("stack", asked, default=name, why=why)


def _most(point: Point) -> float | None:
    """Return the seconds of a point at the upper end of the interval of a step, None where nobody knows."""
    first = point.predicted[0] if point.predicted else None
    if point.seconds is None or first is None or not first.seconds or not first.covers:
        return point.seconds
    return point.seconds * max(1.0, first.covers[1] / first.seconds)


def _estimates(plan: Plan, site: LoadedSite | None) -> Iterator[Choice]:
    """Yield time and node-hours, as far as known; of a site, what stands against its limit and network."""
    known = {one.id: (one.seconds, _most(one) or 0.0) for one in plan.points if one.seconds is not None}
    unknown = ", ".join(one.id for one in plan.points if one.id not in known)
    start = LATER_START if bytecode_folder().is_dir() else FIRST_START
    if known:
        total, most = (start + sum(several) for several in zip(*known.values(), strict=True))
        value = f"about {duration(total)}" + (f", at most {duration(most)}" if most > 1.02 * total else "")
        value += f" for {len(known)} of {len(plan.points)} points" if unknown else ""
        each = [f"start {duration(start)}", *(f"{name} {duration(one)}" for name, (one, _) in known.items())]
        because = ", ".join(each) + (f"; not estimated: {unknown}" if unknown else "")
        yield Choice(name="time", value=value, because=because)
        if max(point.nodes for point in plan.points) > 1 and not unknown:
            spent = (sum(one.nodes * (start + known[one.id][end]) for one in plan.points) for end in (0, 1))
            hours, worst = (seconds / 3600 for seconds in spent)
            value, because = f"{number(hours)}, at most {number(worst)}", "nodes of each point by its time"
            yield Choice(name="node hours", value=value, because=because)
    if site is None:
        return
    limit, ends = site.site.minutes, {name: most + FIRST_START for name, (_, most) in known.items()}
    longer = [f"{name} takes up to {duration(end)}" for name, end in ends.items() if end > limit * 60]
    if longer:
        because = f"{', '.join(longer)}: raise `minutes` of {site.place}"
        yield Choice(name="limit", value=f"{limit} min is too short", because=because)
    measured = qualification_of(site)
    if measured and is_slow(site.site, measured):
        value = f"{measured.transport} carries the messages, where a fast link is declared"
        because = f"measured {measured.created:%Y-%m-%d}; {site.place} declares the link"
        yield Choice(name=NETWORK, value=value, because=because)
