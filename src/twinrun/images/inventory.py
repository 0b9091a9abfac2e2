"""Package inventory of an image: the data and its differences from the locks."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from twinrun.foundation.manifest import Frozen, load_json
from twinrun.images.wheels import image_packages
from twinrun.manifests.image_identity import COMMITTED
from twinrun.manifests.stack import LoadedStack, normalise


class PackageInventory(Frozen):
    """Output of images/contents.py in a container of the image."""

    system: str
    distribution: str
    release: str
    processor: str
    user: str
    """User that the image names, UID and GID."""
    python: str
    toolkit: dict[str, str]
    """Compiler or toolkit to its version line."""
    torch: dict[str, str]
    collectives: dict[str, str]
    libraries: dict[str, str] = Field(default_factory=dict)
    """Vendor's library to the version in its file name."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables that the image sets."""
    kernels: dict[str, tuple[str, ...]]
    """Compiled extension to the GPU architectures of its code objects."""
    python_packages: dict[str, str]
    system_packages: dict[str, str]
    """Package to version and architecture."""
    python_licences: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Package to what its metadata names, an expression or names."""
    system_licences: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Package to the short names in its copyright file; none where that file is free text."""


class ImageInventory(Frozen):
    """One image: its identity in the engine, and the packages measured in a container of it."""

    stack: str
    image: str
    digest: str
    lock_sha256: str
    platform: str
    created: str
    size_bytes: int
    """Size of all layers, uncompressed."""
    layers: tuple[str, ...] = ()
    """`sha256:` and the checksum of each layer's tar, the lowest first."""
    labels: dict[str, str]
    measured: PackageInventory


def committed_inventory(root: Path, stack: LoadedStack) -> ImageInventory | None:
    """Return the committed inventory of the stack's image, None when the image was not built yet."""
    path = root / stack.folder / COMMITTED
    return load_json(path, ImageInventory) if path.is_file() else None


def differences_from_lock(inventory: ImageInventory, stack: LoadedStack, root: Path) -> list[str]:
    """Return what the image has in another version than locks and stack.toml, absent and unknown too.

    Kernels are in no lock of packages.
    """
    locked = image_packages(root, stack)
    measured = inventory.measured
    installed = {normalise(name): version for name, version in measured.python_packages.items()}
    if stack.stack.kernels:
        installed = {name: version for name, version in installed.items() if name in locked}
    differences = _version_differences(installed, locked)
    if system := stack.system_packages(root):
        packages = {name: value.partition(" ")[0] for name, value in measured.system_packages.items()}
        differences += _version_differences(packages, {one.name: one.version for one in system.root})
    declared = stack.stack.collectives
    found = declared and measured.collectives.get(declared.library)
    if declared and found not in (None, declared.version):
        differences.append(f"{declared.library} {found}, stack.toml has {declared.version}")
    return differences


def _version_differences(found: dict[str, str], locked: dict[str, str]) -> list[str]:
    return [
        f"{name} {found.get(name, 'absent')}, lock has {locked.get(name, 'none')}"
        for name in sorted({*found, *locked})
        if found.get(name) != locked.get(name)
    ]
