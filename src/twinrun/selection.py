"""What a run uses where the user did not say, and why."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from twinrun import engines, launchers
from twinrun.architecture import misfit, refuse_misfit
from twinrun.discovery import load_part
from twinrun.errors import InputError, MachineError, closest
from twinrun.hardware import Gpu, Machine, Vendor, detect, load_gpus, load_vendors
from twinrun.job import BenchPlan, Plan, resolve, resolve_bench
from twinrun.manifest import Frozen
from twinrun.recipe import SCALES, LoadedBench, LoadedRecipe, load_any_recipe
from twinrun.stack import LoadedStack, load_stack


class Request(Frozen):
    """`invoke run` as typed; None where the user left the choice to us."""

    recipe: str
    vendor: str | None = None
    stack: str | None = None
    engine: str | None = None
    launcher: str | None = None
    scale: str | None = None
    settings: tuple[str, ...] = ()
    dry: bool = False


class Choice(Frozen):
    """One decision and its reason."""

    name: str
    value: str
    because: str


class Selection(Frozen):
    """A plan with everything it was chosen from."""

    plan: Plan | BenchPlan
    choices: tuple[Choice, ...]
    recipe: LoadedRecipe | LoadedBench
    stack: LoadedStack
    vendor: Vendor
    machine: Machine
    gpu: Gpu | None


def select(root: Path, request: Request) -> Selection:
    """Choose what the request leaves open and resolve the plan; starts nothing.

    Raises:
        InputError: a name or setting that does not exist.
        MachineError: this machine cannot run it.
    """
    loaded = load_any_recipe(root, request.recipe)
    scale_name = _known("scale", request.scale, list(SCALES))
    vendors, gpus = load_vendors(root), load_gpus(root)
    machine, vendor = _machine(root, request, vendors, gpus, loaded)
    scale = _scale(scale_name, machine)
    stack = _stack(root, request, loaded, machine.vendor if vendor is None else vendor.value)
    name = stack.stack.vendor
    engine = _engine(request, stack, vendors[name], machine, gpus)
    launcher = Choice(name="launcher", value=request.launcher or "local", because=_why(request.launcher))
    gpu = _gpu(machine, gpus, scale.value, loaded)
    plan = _plan(
        request, loaded, stack, machine, gpu, scale=scale.value, engine=engine.value, launcher=launcher.value
    )
    _startable(load_part(launchers, launcher.value), plan, request, machine)
    chosen = vendor or Choice(name="vendor", value=name, because=_seen(machine))
    return Selection(
        plan=plan,
        choices=(
            chosen,
            scale,
            _stack_choice(request, stack),
            engine,
            launcher,
            *_point_choices(plan, request),
        ),
        recipe=loaded,
        stack=stack,
        vendor=vendors[name],
        machine=machine,
        gpu=gpu,
    )


def _plan(
    request: Request,
    loaded: LoadedRecipe | LoadedBench,
    stack: LoadedStack,
    machine: Machine,
    gpu: Gpu | None,
    *,
    scale: str,
    engine: str,
    launcher: str,
) -> Plan | BenchPlan:
    if isinstance(loaded, LoadedBench):
        return resolve_bench(
            loaded=loaded,
            scale=scale,
            settings=request.settings,
            stack=stack,
            gpu=gpu,
            engine=engine,
            launcher=launcher,
        )
    return resolve(
        loaded=loaded,
        scale=scale,
        settings=request.settings,
        stack=stack,
        gpu=gpu,
        device_memory_bytes=_device_memory(machine, gpu),
        devices=len(machine.devices),
        engine=engine,
        launcher=launcher,
    )


def _machine(
    root: Path,
    request: Request,
    vendors: dict[str, Vendor],
    gpus: dict[str, Gpu],
    loaded: LoadedRecipe | LoadedBench,
) -> tuple[Machine, Choice | None]:
    """Probe the machine; a paper-scale plan that will not run may be for GPUs it lacks."""
    only_a_plan = request.scale == "paper" and request.dry
    if request.vendor is None:
        machine = detect(root)
        if machine.devices or not only_a_plan:
            return machine, None
        vendor = gpus[_published_gpu(loaded)].vendor
        return machine, Choice(
            name="vendor", value=vendor, because="the published hardware; this is only a plan"
        )
    if only_a_plan:
        _known("vendor", request.vendor, list(vendors))
        return detect(root), Choice(name="vendor", value=request.vendor, because=_why(request.vendor))
    machine = detect(root, vendor=request.vendor)
    return machine, Choice(name="vendor", value=request.vendor, because=_why(request.vendor))


def _known(option: str, value: str | None, allowed: list[str]) -> str | None:
    if value is not None and value not in allowed:
        raise InputError(
            f"unknown {option}",
            place=f"--{option}",
            found=value,
            allowed=allowed,
            hint=closest(value, allowed),
        )
    return value


def _scale(asked: str | None, machine: Machine) -> Choice:
    if asked:
        return Choice(name="scale", value=asked, because=_why(asked))
    if machine.devices:
        return Choice(name="scale", value="node", because="the machine has GPUs")
    return Choice(name="scale", value="smoke", because="no GPU in use")


def _stack(root: Path, request: Request, loaded: LoadedRecipe | LoadedBench, vendor: str) -> LoadedStack:
    stacks = loaded.recipe.stacks
    serving = [*stacks.current.values(), *stacks.published]
    name = request.stack or stacks.current.get(vendor)
    if name is None:
        raise InputError(
            "the recipe has no stack for this vendor",
            place=f"{loaded.folder}/recipe.toml:stacks.current",
            found=vendor,
            allowed=sorted(stacks.current),
        )
    stack = load_stack(root, name)
    if name not in serving:
        raise InputError(
            "the stack does not serve this recipe",
            place="--stack",
            found=name,
            allowed=serving,
            hint=closest(name, serving),
        )
    if stack.stack.vendor != vendor:
        raise InputError(
            "the stack is for another vendor",
            place="--stack",
            found=f"{name} is for {stack.stack.vendor}",
            allowed=f"a stack for {vendor}",
            hint=f"add --vendor {stack.stack.vendor}, or leave --stack out",
        )
    return stack


def _stack_choice(request: Request, stack: LoadedStack) -> Choice:
    because = _why(request.stack) if request.stack else f"the recipe's current stack for {stack.stack.vendor}"
    return Choice(name="stack", value=stack.stack.name, because=because)


def _engine(
    request: Request, stack: LoadedStack, vendor: Vendor, machine: Machine, gpus: dict[str, Gpu]
) -> Choice:
    built = stack.stack.archs
    unfit = misfit(built=built, machine=machine, vendor=vendor, gpus=gpus)
    if request.engine:
        if load_part(engines, request.engine).RUNS_IMAGES:
            refuse_misfit(image=stack.image(), built=built, unfit=unfit)
        return Choice(name="engine", value=request.engine, because=_why(request.engine))
    reason = load_part(engines, "docker").unusable(stack=stack, vendor=vendor)
    if reason is None and unfit:
        reason = f"{stack.image()} is built for {', '.join(built)}, not for {unfit}"
    if reason is None:
        return Choice(name="engine", value="docker", because=f"the daemon answers and has {stack.image()}")
    return Choice(name="engine", value="venv", because=reason)


def _gpu(
    machine: Machine, gpus: dict[str, Gpu], scale: str, loaded: LoadedRecipe | LoadedBench
) -> Gpu | None:
    if machine.devices:
        known = machine.devices[0].gpu
        return gpus[known] if known else None
    return gpus[_published_gpu(loaded)] if scale == "paper" else None


def _published_gpu(loaded: LoadedRecipe | LoadedBench) -> str:
    named = [claim.hardware.gpu for claim in loaded.published.claim if claim.hardware]
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


def _startable(launcher: ModuleType, plan: Plan | BenchPlan, request: Request, machine: Machine) -> None:
    if isinstance(plan, BenchPlan) and plan.scale != "smoke" and not (machine.devices or request.dry):
        raise MachineError(
            "this scale measures a GPU",
            found=f"no GPU in use: {machine.probe}",
            allowed="--scale smoke",
            hint="use --scale smoke, or print the plan with --dry",
        )
    reason = launcher.unusable(plan)
    if reason and not request.dry:
        raise MachineError(
            reason,
            place=f"--launcher {plan.launcher}",
            allowed="points of one node",
            hint="print the plan with --dry, or use --scale node",
        )


def _point_choices(plan: Plan | BenchPlan, request: Request) -> tuple[Choice, ...]:
    points = ", ".join(point.id for point in plan.points)
    if isinstance(plan, BenchPlan):
        timed = f"{plan.bench.repeats} timed calls each" if plan.bench.repeats else "checked, not timed"
        return (Choice(name="cases", value=points, because=timed),)
    asked = any(text.partition("=")[0].strip() == "model" for text in request.settings)
    because = (
        "asked for"
        if asked
        else "the recipe's, as far as it fits"
        if plan.gpu
        else "the recipe's for this scale"
    )
    return (
        Choice(name="model", value=plan.training.model, because=because),
        Choice(name="points", value=points, because=f"global batch {plan.training.global_batch} at each"),
    )


def _seen(machine: Machine) -> str:
    if not machine.devices:
        return machine.probe
    return f"{len(machine.devices)} x {machine.devices[0].name}"


def _why(asked: str | None) -> str:
    return "asked for" if asked else "the only one without a cluster"
