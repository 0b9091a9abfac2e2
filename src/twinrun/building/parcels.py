"""What an image is made of: every file that its locks name, and where the build expects it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from packaging.markers import Marker
from pydantic import Field

from twinrun.apt import SystemPackage
from twinrun.building.tags import machine
from twinrun.errors import InputError
from twinrun.manifest import Frozen
from twinrun.stack import Alternative, LoadedStack, Stack, matches, normalise

_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_COMMENT = re.compile(r"^#.*", re.MULTILINE)
_HEAD = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!-]+)(?: ; (?P<marker>[^\\\n]+?))?"
    r"(?P<hashes>(?:\s*\\\n\s+--hash=sha256:[0-9a-f]{64})*)\s*"
)
_HASH = re.compile(r"[0-9a-f]{64}")


class Parcel(Frozen):
    """One file, or one of several that may stand for the same entry."""

    lock: str
    """File that names it."""
    entry: str
    """As the lock has it, for example `torch==2.7.0`."""
    kind: Literal["wheel", "archive", "commit", "package"]
    """A built Python package, its source archive, a checkout, a package of the distribution."""
    folder: str
    """Where the build expects it, inside its context."""
    digests: tuple[str, ...] = Field(repr=False)
    """SHA-256 of every file that may stand for it, or the commit; empty where nobody knows."""

    def name(self) -> str:
        """Return the name without the version."""
        return normalise(self.entry.partition("==")[0])

    def version(self) -> str:
        """Return the version."""
        return self.entry.partition("==")[2]


def wheels_of(root: Path, loaded: LoadedStack, *, chosen: tuple[Alternative, ...] = ()) -> tuple[Parcel, ...]:
    """Return the Python packages of the image.

    Args:
        chosen: second-hand wheels that take the place of locked ones.
    """
    lock = f"{loaded.folder}/requirements.lock"
    instead = {normalise(pin.package()): pin for pin in chosen}
    second = {pin.sha256 for pin in loaded.stack.alternative}
    needless = tuple(pattern for pin in chosen for pattern in pin.replaces)
    found = []
    for parcel in _locked(root / lock, loaded.stack, lock=lock, folder="python"):
        if matches(parcel.name(), needless):
            continue
        pin = instead.get(parcel.name())
        digests = (pin.sha256,) if pin else tuple(one for one in parcel.digests if one not in second)
        found.append(parcel.model_copy(update={"digests": digests}))
    unhashed = [
        Parcel(lock=f"{loaded.folder}/stack.toml", entry=entry, kind="wheel", folder="python", digests=())
        for entry in loaded.unhashed(root)
    ]
    return (*found, *unhashed)


def tools_of(root: Path, loaded: LoadedStack) -> tuple[Parcel, ...]:
    """Return the Python packages of the build stage."""
    lock = f"{loaded.folder}/build.lock"
    if not (root / lock).is_file():
        return ()
    return tuple(_locked(root / lock, loaded.stack, lock=lock, folder="tools"))


def sources_of(root: Path, loaded: LoadedStack) -> tuple[Parcel, ...]:
    """Return what is built from source, by commit or by archive."""
    pins = loaded.image_lock(root)
    lock = f"{loaded.folder}/image.lock"
    found = []
    for source in loaded.stack.sources:
        pin = pins.source(source.name) if pins else None
        digest = pin and (pin.commit or pin.sha256)
        found.append(
            Parcel(
                lock=lock,
                entry=(pin and pin.requirement) or source.name,
                kind="archive" if pin and pin.requirement else "commit",
                folder=f"sources/{source.name}",
                digests=(digest,) if digest else (),
            )
        )
    return tuple(found)


def system_parcels(
    loaded: LoadedStack, packages: tuple[SystemPackage, ...], folder: str
) -> tuple[Parcel, ...]:
    """Return packages of the distribution as parcels."""
    lock = f"{loaded.folder}/apt.lock"
    return tuple(
        Parcel(lock=lock, entry=str(package), kind="package", folder=folder, digests=(package.sha256,))
        for package in packages
    )


def _locked(path: Path, stack: Stack, *, lock: str, folder: str) -> Iterator[Parcel]:
    """Yield the entries of a hashed lock that count on the stack's platform; raises InputError."""
    environment = _environment(stack)
    text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
    for part in filter(str.strip, _ENTRY.split(text)):
        head = _HEAD.fullmatch(part)
        if head is None:
            line = text[: text.index(part)].count("\n") + 1
            raise InputError(
                "not a locked package",
                place=f"{path}:{line}",
                found=part.strip().partition("\n")[0][:120],
                hint=f"run `invoke lock --stack {stack.name}`",
            )
        if head["marker"] is None or Marker(head["marker"]).evaluate(environment):
            entry = f"{normalise(head['name'])}=={head['version']}"
            digests = tuple(_HASH.findall(head["hashes"]))
            yield Parcel(lock=lock, entry=entry, kind="wheel", folder=folder, digests=digests)


def _environment(stack: Stack) -> dict[str, str]:
    """Return what the markers of a lock are evaluated in: the image, not this machine."""
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
