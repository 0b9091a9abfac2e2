"""Artifacts of an image: the wheels and .deb files that its locks name, and which wheels run in it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from pydantic import Field

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.locks import SystemPackage, parse_python_lock
from twinrun.manifests.packages import AlternativePin
from twinrun.manifests.stack import LoadedStack, Stack, matches, normalise

# Debian's architecture to Python's platform.machine().
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# The C library of the newest base runs wheels for older ones too.
_NEWEST_GLIBC_MINOR = 39
_OLD_PLATFORMS = ("manylinux2014", "manylinux2010", "manylinux1", "linux")


def machine(stack: Stack) -> str:
    """Return the `platform.machine()` of the image."""
    return _MACHINES.get(stack.architecture(), stack.architecture())


def platforms(stack: Stack) -> list[str]:
    """Return the platform tags of wheels that run in the image, best first."""
    new = [f"manylinux_2_{minor}" for minor in range(_NEWEST_GLIBC_MINOR, 4, -1)]
    return [f"{name}_{machine(stack)}" for name in (*new, *_OLD_PLATFORMS)]


def is_compatible(file_name: str, stack: Stack) -> bool:
    """Say whether the wheel of this file name runs in the image."""
    try:
        *_, tags = parse_wheel_filename(file_name)
    except InvalidWheelFilename:
        return False
    return not tags.isdisjoint(_supported(stack.interpreter(), tuple(platforms(stack))))


@cache
def _supported(interpreter: str, names: tuple[str, ...]) -> frozenset[Tag]:
    major, _, minor = interpreter.partition(".")
    version = (int(major), int(minor))
    own = cpython_tags(version, platforms=names)
    return frozenset((*own, *compatible_tags(version, f"cp{major}{minor}", names)))


class Artifact(Frozen):
    """One entry of a lock, satisfied by any one of the files that it has a digest of."""

    lock: str
    """Path of the lock."""
    entry: str
    """Text of the entry in the lock, for example `torch==2.7.0`."""
    kind: Literal["wheel", "deb"]
    folder: str
    """Folder of the build context."""
    digests: tuple[str, ...] = Field(repr=False)
    """SHA-256 of each file that satisfies the entry; empty when unknown."""

    def name(self) -> str:
        """Return the normalised name without the version."""
        return normalise(self.entry.partition("==")[0])

    def version(self) -> str:
        """Return the version."""
        return self.entry.partition("==")[2]

    def accepts(self, digest: str) -> bool:
        """Say whether a file with this SHA-256 satisfies the entry."""
        return not self.digests or digest in self.digests

    def requirement(self) -> str:
        """Return the line of a requirements file, with hashes."""
        return " ".join([self.entry, *(f"--hash=sha256:{digest}" for digest in self.digests)])


def wheel_artifacts(
    root: Path, loaded: LoadedStack, *, alternatives: tuple[AlternativePin, ...] = ()
) -> tuple[Artifact, ...]:
    """Return the Python packages of the image.

    Args:
        alternatives: wheels of stack.toml that replace locked ones.
    """
    lock = f"{loaded.folder}/requirements.lock"
    replacements = {normalise(pin.package()): pin for pin in alternatives}
    alternative_digests = {pin.sha256 for pin in loaded.stack.alternative}
    replaced = tuple(pattern for pin in alternatives for pattern in pin.replaces)
    locked = []
    for artifact in _read_lock(root / lock, loaded.stack, lock=lock, folder="python"):
        if matches(artifact.name(), replaced):
            continue
        pin = replacements.get(artifact.name())
        own = tuple(one for one in artifact.digests if one not in alternative_digests)
        locked.append(artifact.model_copy(update={"digests": (pin.sha256,) if pin else own}))
    unhashed = [
        Artifact(lock=f"{loaded.folder}/stack.toml", entry=entry, kind="wheel", folder="python", digests=())
        for entry in loaded.unhashed(root)
    ]
    return (*locked, *unhashed)


def build_tool_artifacts(root: Path, loaded: LoadedStack) -> tuple[Artifact, ...]:
    """Return the Python packages of the build stage."""
    path = loaded.build_lock(root)
    if path is None:
        return ()
    return tuple(_read_lock(path, loaded.stack, lock=f"{loaded.folder}/build.lock", folder="tools"))


def deb_artifact(stack: str, package: SystemPackage, folder: str) -> Artifact:
    """Return a package of the apt.lock of a stack."""
    lock = f"images/stacks/{stack}/apt.lock"
    return Artifact(lock=lock, entry=str(package), kind="deb", folder=folder, digests=(package.sha256,))


def _read_lock(path: Path, stack: Stack, *, lock: str, folder: str) -> Iterator[Artifact]:
    """Yield the entries of a hashed lock whose marker holds in the image; raises InputError."""
    environment = _marker_environment(stack)
    for pin, digests in parse_python_lock(path.read_text(encoding="utf-8"), place=str(path)).items():
        entry, _, marker = pin.partition(" ; ")
        name, _, version = entry.partition("==")
        if not marker or Marker(marker).evaluate(environment):
            yield Artifact(
                lock=lock,
                entry=f"{normalise(name)}=={version}",
                kind="wheel",
                folder=folder,
                digests=tuple(sorted(digests)),
            )


def _marker_environment(stack: Stack) -> dict[str, str]:
    """Return the environment of PEP 508 markers: the image's, not this machine's."""
    version = stack.interpreter()
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{version}.0",
        "os_name": "posix",
        "platform_machine": machine(stack),
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{version}.0",
        "python_version": version,
        "sys_platform": "linux",
    }
