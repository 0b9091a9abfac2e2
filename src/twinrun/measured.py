"""The contents of an image as data, and how they are held against the locks of its stack."""

from __future__ import annotations

from pathlib import Path

from twinrun.building.parcels import wheels_of
from twinrun.manifest import Frozen, load_json
from twinrun.stack import Alternative, LoadedStack, normalise

# Of a stack whose image was built: its committed contents.
COMMITTED = "contents.json"


class Measured(Frozen):
    """What images/contents.py prints inside the image."""

    system: str
    distribution: str
    release: str
    processor: str
    user: str
    """Number of user and group that the program ran as."""
    python: str
    toolkit: dict[str, str]
    """Compiler to the line in which it tells its version."""
    torch: dict[str, str]
    collectives: dict[str, str]
    kernels: dict[str, tuple[str, ...]]
    """Compiled extension to the GPU architectures it holds code for."""
    python_packages: dict[str, str]
    system_packages: dict[str, str]
    """Package to version and architecture."""


class Contents(Frozen):
    """One image: its identity as the engine tells it, and what was measured inside."""

    stack: str
    image: str
    digest: str
    lock_sha256: str
    platform: str
    created: str
    size_bytes: int
    """Of all layers, uncompressed."""
    labels: dict[str, str]
    measured_in: str | None = None
    """Digest of the image that was measured, where that differs from this one in the project's source."""
    measured: Measured


def committed_contents(root: Path, stack: LoadedStack) -> Contents | None:
    """Return the committed contents of the stack's image, None for a stack whose image was not built yet."""
    path = root / stack.folder / COMMITTED
    return load_json(path, Contents) if path.is_file() else None


def chosen_wheels(contents: Contents, stack: LoadedStack) -> tuple[Alternative, ...]:
    """Return the second-hand wheels of stack.toml that are in the image in place of locked ones."""
    installed = {
        f"{normalise(name)}=={version}" for name, version in contents.measured.python_packages.items()
    }
    return tuple(pin for pin in stack.stack.alternative if pin.requirement in installed)


def lock_differences(contents: Contents, stack: LoadedStack, root: Path) -> list[str]:
    """Return where the image is not what its locks say: another version, an absent or an unknown package.

    Packages that were built from source, kernels among them, are in no lock of packages.
    """
    chosen = chosen_wheels(contents, stack)
    wheels = {parcel.name(): parcel.version() for parcel in wheels_of(root, stack, chosen=chosen)}
    wheels |= {normalise(pin.package()): pin.requirement.partition("==")[2] for pin in chosen}
    installed = {normalise(name): version for name, version in contents.measured.python_packages.items()}
    if stack.stack.sources or stack.stack.kernels:
        installed = {name: version for name, version in installed.items() if name in wheels}
    return [*_between(installed, wheels), *_system_differences(contents, stack, root)]


def _system_differences(contents: Contents, stack: LoadedStack, root: Path) -> list[str]:
    """Compare the distribution's packages, where the lock names every one."""
    system = stack.system_packages(root)
    if system is None or not system.base:
        return []
    locked = {package.name: package.version for package in (*system.base, *system.runtime)}
    found = contents.measured.system_packages.items()
    return _between({name: value.partition(" ")[0] for name, value in found}, locked)


def _between(found: dict[str, str], locked: dict[str, str]) -> list[str]:
    return [
        f"{name} {found.get(name, 'absent')}, lock has {locked.get(name, 'none')}"
        for name in sorted({*found, *locked})
        if found.get(name) != locked.get(name)
    ]
