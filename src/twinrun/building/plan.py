"""The whole build as data, before anything is fetched or run."""

from __future__ import annotations

import subprocess
from pathlib import Path

from twinrun import __version__
from twinrun.building.dockerfile import Dockerfile, read_dockerfile
from twinrun.building.engine import stage_arguments
from twinrun.building.image import labels_of, time_of
from twinrun.building.parcels import Parcel, sources_of, system_parcels, tools_of, wheels_of
from twinrun.errors import InputError, closest
from twinrun.files import canonical_json, sha256_of_bytes, sha256_of_file
from twinrun.image_lock import BasePin
from twinrun.manifest import Frozen
from twinrun.stack import Alternative, LoadedStack, find_stacks, load_stack
from twinrun.vendor import load_vendors

# Counts up when the same inputs give other layers than before.
_FORMAT = 1
DOCKERFILE = "images/Dockerfile"
CONTEXT = "{context}"
SOURCE_STAGE = "source"
_SOURCE = "src/twinrun"
# What nobody ships: compiled files depend on the interpreter that made them.
_LEFT_OUT = ("__pycache__", ".mypy_cache", ".ruff_cache", ".DS_Store")


class BuildPlan(Frozen):
    """Everything that decides what the image is."""

    stack: LoadedStack
    image: str
    """Name and tag; the tag is the lock's digest."""
    epoch: int
    """Time of every file and of the image, in seconds since 1970."""
    base: BasePin
    carried_base: str | None
    """SHA-256 of a base that was given as a file."""
    alternatives: tuple[Alternative, ...]
    stages: tuple[str, ...]
    """Stages of the Dockerfile that become layers above the base, in order."""
    dockerfile: Dockerfile
    parcels: tuple[Parcel, ...]
    kernels: tuple[str, ...]
    """Folders of this checkout that are built into the image."""
    unverified: tuple[str, ...]
    labels: dict[str, str]
    environment_sha256: str
    """Of all that the layers below the source depend on."""
    source_sha256: str

    def command(self, stage: str, base: str) -> list[str]:
        """Return the command that builds a stage on the base image of this name."""
        variables = {
            "BASE": base,
            "PYTHON": self.stack.stack.interpreter(),
            "ARCHS": " ".join(self.stack.stack.archs),
            "SOURCE_DATE_EPOCH": str(self.epoch),
        }
        return stage_arguments(stage=stage, context=CONTEXT, variables=variables, alone=self.alone(stage))

    def alone(self, stage: str) -> bool:
        """Say whether a stage comes without the root file system that it is put on."""
        return self.dockerfile.parents[stage] == "scratch"

    def summary(self) -> dict[str, object]:
        """Return what `--dry` prints."""
        counts: dict[str, int] = {}
        for parcel in self.parcels:
            folder = "sources" if parcel.folder.startswith("sources/") else parcel.folder
            counts[folder] = counts.get(folder, 0) + 1
        return {
            "image": self.image,
            "platform": self.stack.stack.platform,
            "archs": list(self.stack.stack.archs),
            "base": self.base.model_dump() | {"carried_in": self.carried_base},
            "layers": ["base", *self.stages],
            "files": counts,
            "kernels": list(self.kernels),
            "alternatives": [pin.requirement for pin in self.alternatives],
            "unverified": list(self.unverified),
            "labels": self.labels,
            "commands": {stage: self.command(stage, base_name(self)) for stage in self.stages},
        }


def choose_stack(root: Path, vendor: str, stack: str | None) -> LoadedStack:
    """Return the stack to build: the one asked for, or the one that the recipes use on the vendor.

    Raises:
        InputError: an unknown vendor or stack, a stack of another vendor, or more than one to choose from.
    """
    vendors = load_vendors(root)
    if vendor not in vendors:
        raise InputError(
            "unknown vendor",
            place="--vendor",
            found=vendor,
            allowed=sorted(vendors),
            hint=closest(vendor, vendors),
        )
    loaded = load_stack(root, stack) if stack else _current(root, vendor)
    if loaded.stack.vendor != vendor:
        raise InputError(
            "the stack is another vendor's", place="--stack", found=loaded.stack.name, allowed=vendor
        )
    if loaded.stack.base is None:
        raise InputError(
            "the stack has no image", place=f"{loaded.folder}/stack.toml", hint="give it a table [base]"
        )
    return loaded


def _current(root: Path, vendor: str) -> LoadedStack:
    from twinrun.recipe import find_recipes

    names = {recipe.recipe.stacks.current.get(vendor) for recipe in find_recipes(root).values()} - {None}
    if len(names) == 1:
        return load_stack(root, str(names.pop()))
    of_vendor = sorted(name for name, one in find_stacks(root).items() if one.stack.vendor == vendor)
    raise InputError("which stack?", place="--stack", allowed=of_vendor)


def plan_build(
    root: Path,
    loaded: LoadedStack,
    *,
    alternatives: tuple[Alternative, ...] = (),
    base_file: Path | None = None,
) -> BuildPlan:
    """Resolve the build of a stack; reads files of the checkout and nothing else.

    Args:
        alternatives: second-hand wheels that take the place of locked ones.
        base_file: a base that was carried in.
    """
    stack, lock, system = loaded.stack, loaded.image_lock(root), loaded.system_packages(root)
    assert lock is not None
    assert system is not None
    dockerfile = read_dockerfile(root / DOCKERFILE)
    carried = sha256_of_file(base_file) if base_file else None
    kernels = tuple(f"recipes/{name}/kernels" for name in stack.kernels)
    compiled = bool(kernels or stack.sources)
    foreign = carried is not None and carried != lock.base.sha256
    unverified = (*loaded.unverified_pins(root), *(pin.requirement for pin in alternatives))
    if foreign:
        unverified = (*(name for name in unverified if name != lock.base.name), f"base {carried}")
    inputs = {
        "format": _FORMAT,
        "dockerfile": sha256_of_file(root / DOCKERFILE),
        "lock": loaded.lock_sha256,
        "kernels": {folder: tree_sha256(root / folder) for folder in kernels},
        "alternatives": [pin.sha256 for pin in alternatives],
        "base": carried or lock.base.sha256,
    }
    environment, source = sha256_of_bytes(canonical_json(inputs).encode()), tree_sha256(root / _SOURCE)
    parcels = (
        *system_parcels(loaded, system.base, "packages/base"),
        *system_parcels(loaded, system.runtime, "packages/runtime"),
        *system_parcels(loaded, system.build, "packages/build"),
        *wheels_of(root, loaded, chosen=alternatives),
        *(tools_of(root, loaded) if compiled else ()),
        *sources_of(root, loaded),
    )
    return BuildPlan(
        stack=loaded,
        # An image of another base than the lock's must not pass for the lock's.
        image=loaded.image() + ("-unverified" if foreign else ""),
        epoch=lock.epoch,
        base=lock.base,
        carried_base=carried,
        alternatives=alternatives,
        stages=("system", "python", *(("kernels",) if compiled else ()), SOURCE_STAGE),
        dockerfile=dockerfile,
        parcels=parcels,
        kernels=kernels,
        unverified=unverified,
        labels=_labels(root, loaded, environment=environment, source=source, unverified=unverified),
        environment_sha256=environment,
        source_sha256=source,
    )


def base_name(plan: BuildPlan) -> str:
    """Return the name that the base has in the engine while the image is built."""
    return f"twinrun/base:{(plan.carried_base or plan.base.sha256 or 'unknown')[:12]}"


def source_files(folder: Path) -> list[Path]:
    """Return the files below `folder` that go into an image, sorted."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not set(path.relative_to(folder).parts) & set(_LEFT_OUT)
        and path.suffix != ".pyc"
    )


def tree_sha256(folder: Path) -> str:
    """Return the digest of names and contents below `folder`; raises InputError when there is none."""
    if not folder.is_dir():
        raise InputError("no such folder", place=str(folder))
    files = {path.relative_to(folder).as_posix(): sha256_of_file(path) for path in source_files(folder)}
    return sha256_of_bytes(canonical_json(files).encode())


def _labels(
    root: Path, loaded: LoadedStack, *, environment: str, source: str, unverified: tuple[str, ...]
) -> dict[str, str]:
    lock = loaded.image_lock(root)
    assert lock is not None
    return labels_of(
        {
            "org.opencontainers.image.title": loaded.stack.title,
            "org.opencontainers.image.source": f"pkg:generic/twinrun@{__version__}",
            "org.opencontainers.image.version": __version__,
            # When the newest pin was published: the clock of a build would make each image another one.
            "org.opencontainers.image.created": time_of(lock.epoch),
            "org.opencontainers.image.revision": _revision(root, loaded),
            "dev.twinrun.stack": loaded.stack.name,
            "dev.twinrun.archs": " ".join(loaded.stack.archs),
            "dev.twinrun.lock-sha256": loaded.lock_sha256,
            "dev.twinrun.environment-sha256": environment,
            "dev.twinrun.source-sha256": source,
            "dev.twinrun.unverified": ", ".join(unverified),
        }
    )


def _revision(root: Path, loaded: LoadedStack) -> str | None:
    """Return the last commit that changed what is in the image; a later one leaves the image as it is."""
    places = (
        _SOURCE,
        DOCKERFILE,
        loaded.folder,
        *(f"recipes/{name}/kernels" for name in loaded.stack.kernels),
    )
    commit = _git(root, "log", "-1", "--format=%H", "--", *places)
    if not commit:
        return None
    return commit + ("+changes" if _git(root, "status", "--porcelain", "--", *places) else "")


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
