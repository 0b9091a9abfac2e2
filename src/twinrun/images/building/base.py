"""Base of an image: the root file system of the locked packages, made once, kept by its digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.images.building.plan import BuildPlan
from twinrun.images.root_filesystem import make_root
from twinrun.manifests.locks import AptLock
from twinrun.manifests.stack import Stack


def check_base_file(file: Path, plan: BuildPlan) -> None:
    """Compare the base given as a file with the lock; raises InputError."""
    found = sha256_of_file(file)
    if found != plan.base:
        raise InputError(
            "not the locked base",
            place=str(file),
            found=f"sha256 {found}",
            allowed=plan.base,
            hint=f"{plan.stack.folder}/image.lock names it; a machine that has built it has it in its cache",
        )


def make_base(stack: Stack, system: AptLock, *, epoch: int) -> str:
    """Make the root file system of the base packages, keep it in the cache and return its digest."""
    assert stack.base is not None
    folder = cache_root() / "bases"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{stack.name}.new"
    make_root(fresh, lock=system, suite=stack.base.suite, architecture=stack.architecture(), epoch=epoch)
    digest = sha256_of_file(fresh)
    fresh.replace(folder / f"{digest}.tar")
    return digest


def root_file_system(plan: BuildPlan, *, root: Path, say: Callable[[str], None]) -> Path:
    """Return the tar of the locked base packages, made here or cached.

    Raises:
        MachineError: the base cannot be made, or is not the locked one.
    """
    system = plan.stack.system_packages(root)
    assert system is not None
    tar = cache_root() / "bases" / f"{plan.base}.tar"
    if not tar.is_file() or sha256_of_file(tar) != plan.base:
        say(f"making the base of {len(system.base)} packages")
        found = make_base(plan.stack.stack, system, epoch=plan.epoch)
        if found != plan.base:
            raise MachineError(
                "the base made here is not the locked one",
                place=f"{plan.stack.folder}/image.lock: base",
                found=found,
                allowed=plan.base,
                hint="another mmdebstrap makes other bytes; carry the base in with --base",
            )
    return tar
