"""Stack that `invoke build` builds: the one named, or the one that the recipes use on a vendor."""

from __future__ import annotations

from pathlib import Path

from twinrun.foundation.errors import InputError, closest
from twinrun.manifests.stack import LoadedStack, find_stacks, load_stack
from twinrun.manifests.vendor import load_vendors


def choose_stack(root: Path, vendor: str | None, stack: str | None) -> LoadedStack:
    """Return the stack called `stack`, or the one that the recipes use on `vendor`.

    Raises:
        InputError: neither is named, one is unknown, the stack is of another vendor or has no image, or the
            recipes use none or several on the vendor.
    """
    if not vendor and not stack:
        hint = f"or --vendor, for the stack that the recipes use: {', '.join(sorted(load_vendors(root)))}"
        raise InputError("which stack?", place="--stack", allowed=_with_image(root), hint=hint)
    if vendor:
        _check_vendor(root, vendor)
    loaded = load_stack(root, stack) if stack else _recipes_stack(root, str(vendor))
    if vendor and loaded.stack.vendor != vendor:
        raise InputError(
            "the stack is another vendor's",
            place="--stack",
            found=loaded.stack.name,
            allowed=_with_image(root, vendor),
            hint=f"without --vendor the stack's own is taken, {loaded.stack.vendor}",
        )
    if loaded.stack.base is None:
        raise InputError(
            "the stack has no image", place=f"{loaded.folder}/stack.toml", hint="give it a table [base]"
        )
    return loaded


def _check_vendor(root: Path, vendor: str) -> None:
    vendors = load_vendors(root)
    if vendor not in vendors:
        hint = closest(vendor, vendors)
        raise InputError("unknown vendor", place="--vendor", found=vendor, allowed=sorted(vendors), hint=hint)


def _recipes_stack(root: Path, vendor: str) -> LoadedStack:
    # Every workload's models are slow to import, and `--stack` needs none of them.
    from twinrun.planning.project import Project

    names = {recipe.recipe.stacks.current.get(vendor) for recipe in Project(root).recipes().values()} - {None}
    if len(names) != 1:
        raise InputError("which stack?", place="--stack", allowed=_with_image(root, vendor))
    return load_stack(root, str(names.pop()))


def _with_image(root: Path, vendor: str | None = None) -> list[str]:
    """Return the stacks that have an image, of one vendor or of all."""
    stacks = [one.stack for one in find_stacks(root).values()]
    return [stack.name for stack in stacks if stack.base and vendor in (None, stack.vendor)]
