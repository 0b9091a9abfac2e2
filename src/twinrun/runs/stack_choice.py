"""Which stack a run uses, and why."""

from __future__ import annotations

from pathlib import Path

from twinrun.foundation.errors import InputError, closest
from twinrun.machine.architecture import misfit
from twinrun.machine.inventory import Machine
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.stack import LoadedStack
from twinrun.planning.project import Project
from twinrun.workloads.workload import Choice


def choose_stack(
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
    return stack, _reason(loaded, stack, asked=asked, root=project.root)


def _fitting(project: Project, loaded: LoadedRecipe, vendor: str, machine: Machine) -> str | None:
    """Return the vendor's current stack, or the first further one where that is not built for the GPUs."""
    stacks = loaded.recipe.stacks
    current = stacks.current.get(vendor)
    further = (name for name in stacks.also if project.stack(name).stack.vendor == vendor)
    for name in (current, *further) if current else ():
        built = project.stack(name).stack.archs
        if not misfit(built=built, machine=machine, vendor=project.vendors[vendor], gpus=project.gpus):
            return name
    return current


def _reason(loaded: LoadedRecipe, stack: LoadedStack, *, asked: str | None, root: Path) -> Choice:
    vendor, name = stack.stack.vendor, stack.stack.name
    because = "asked for" if asked else f"the recipe's current stack for {vendor}"
    if not asked and name != (current := loaded.recipe.stacks.current[vendor]):
        because = f"{current} is not built for this GPU"
    if attested := stack.attested(root):
        because += f"; hashes of {', '.join(attested)} are attested by public lock files"
    if unhashed := stack.unhashed(root):
        because += f"; {', '.join(unhashed)} unverified"
    return Choice(name="stack", value=stack.stack.name, because=because)
