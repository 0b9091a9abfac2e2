"""Build plan: the stack, and everything that decides what its image is, before anything is fetched or run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinrun.foundation.cache import tracked_files
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.images.wheels import requirements
from twinrun.manifests.image_identity import rfc3339
from twinrun.manifests.locks import AptLock
from twinrun.manifests.stack import INPUTS_LABEL, LoadedStack, find_stacks, load_stack
from twinrun.manifests.vendor import load_vendors, require_vendor


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """Options of `invoke build`."""

    stack: str | None = None
    """folder of images/stacks"""
    vendor: str | None = None
    """folder of images/vendors; alone it means the stack that the recipes use there"""
    pull: str | None = None
    """repository@sha256:DIGEST of a registry to take the image from instead"""
    push: str | None = None
    """repository of a registry to push the image to"""
    save: Path | None = None
    """FILE.tar to write the image to, or a folder for it and all that a build needs"""
    base: Path | None = None
    """tar of the locked root file system, where mmdebstrap cannot make it"""
    wheelhouse: Path | None = None
    """folder with all packages; nothing is downloaded then"""
    index: str | None = None
    """URL in place of the framework's own package index; $TWINRUN_INDEX when left out"""
    context: Path | None = None
    """new folder to write for `docker build`; nothing is built then"""


class BuildPlan(Frozen):
    """One image and the build that makes it."""

    stack: LoadedStack
    image: str
    """Reference, name and tag; the tag is the checksum of all inputs."""
    epoch: int
    """SOURCE_DATE_EPOCH: modification time of every file and creation time of the image."""
    root: str
    """Checksum of the root file system's tar."""
    system: AptLock
    python: dict[str, tuple[str, ...]]
    """Entries of requirements.lock that the image takes, with their hashes."""
    tools: dict[str, tuple[str, ...]]
    """Those of build.lock."""
    kernels: tuple[str, ...]
    """Kernel folders of this checkout that are compiled into the image."""
    labels: dict[str, str]

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers of the image, the lowest first."""
        return ("root", "python", *(("kernels",) if self.kernels else ()))

    def variables(self) -> dict[str, str]:
        """Return what the Dockerfile's steps are told."""
        return {
            "PYTHON": self.stack.stack.interpreter(),
            "ARCHS": " ".join(self.stack.stack.archs),
            "SOURCE_DATE_EPOCH": str(self.epoch),
        }

    def summary(self) -> dict[str, object]:
        """Return what `--dry` prints."""
        files = {"system": len(self.system.root), "system to compile": len(self.system.build)}
        files |= {"python": len(self.python), "python to compile": len(self.tools)}
        return {
            "image": self.image,
            "platform": self.stack.stack.platform,
            "archs": list(self.stack.stack.archs),
            "root": self.root,
            "layers": list(self.layers),
            "files": files,
            "kernels": list(self.kernels),
            "labels": self.labels,
            "command": ["docker", *build_arguments("{context}", archive="-")],
        }


def build_arguments(context: str, *, archive: str) -> list[str]:
    """Return the options of an engine's client that write the image of a context as an archive."""
    output = f"type=tar,dest={archive}"
    return ["build", "--network", "none", "--target", "archive", "--output", output, context]


def plan_build(root: Path, loaded: LoadedStack) -> BuildPlan:
    """Resolve the build of a stack; reads files of the checkout and nothing else.

    Raises:
        InputError: kernels that git does not track, or that are links.
    """
    stack, lock, system = loaded.stack, loaded.image_lock(root), loaded.system_packages(root)
    assert lock is not None
    assert system is not None
    kernels = stack.kernel_folders()
    for folder in kernels:
        tracked_files(root, folder)
    tools = loaded.build_lock(root) if stack.kernels else None
    labels = {
        "org.opencontainers.image.title": stack.title,
        # The clock of a build would make each image another one.
        "org.opencontainers.image.created": rfc3339(lock.epoch),
        "dev.twinrun.stack": stack.name,
        "dev.twinrun.archs": " ".join(stack.archs),
        "dev.twinrun.lock-sha256": loaded.lock_sha256,
        INPUTS_LABEL: loaded.inputs_sha256,
    }
    return BuildPlan(
        stack=loaded,
        image=loaded.image(),
        epoch=lock.epoch,
        root=lock.root,
        system=system,
        python=requirements(loaded.lock(root), stack),
        tools=requirements(tools, stack) if tools else {},
        kernels=kernels,
        labels={name: value for name, value in sorted(labels.items()) if value},
    )


def choose_stack(root: Path, vendor: str | None, stack: str | None) -> LoadedStack:
    """Return the stack called `stack`, or the one that the recipes use on `vendor`.

    Raises:
        InputError: neither is named, one is unknown, the stack is of another vendor or has no image, or the
            recipes use none or several on the vendor.
    """
    known = {one.stack.name: one.stack.vendor for one in find_stacks(root).values() if one.stack.base}
    if vendor:
        require_vendor(vendor, load_vendors(root))
    if not stack and vendor:
        # Every workload's models are slow to import, and `--stack` needs none of them.
        from twinrun.planning.project import Project

        names = {one.recipe.stacks.current.get(vendor) for one in Project(root).recipes().values()} - {None}
        stack = str(names.pop()) if len(names) == 1 else None
    allowed = sorted(name for name, of in known.items() if vendor in (None, of))
    if not stack:
        hint = f"or --vendor, for the stack that the recipes use: {', '.join(sorted(load_vendors(root)))}"
        raise InputError("which stack?", place="--stack", allowed=allowed, hint=hint)
    loaded = load_stack(root, stack)
    if stack not in allowed:
        message = "the stack is another vendor's" if loaded.stack.base else "the stack has no table [base]"
        raise InputError(message, place="--stack", found=stack, allowed=allowed)
    return loaded
