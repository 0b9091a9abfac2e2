"""apt.lock: every system package of an image with its version and the checksum of its .deb file."""

from __future__ import annotations

import re
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.manifests.lock_checksum import with_checksums

# A package is in the first of these that needs it.
STAGES = ("base", "runtime", "build")
_NAME = r"[a-z0-9][a-z0-9+.-]+"
_LINE = re.compile(rf"(?P<name>{_NAME})=(?P<version>[A-Za-z0-9.+:~-]+)  (?P<sha256>[0-9a-f]{{64}})")


class SystemPackage(Frozen):
    """One system package."""

    name: str
    version: str
    sha256: str
    """Of the .deb file."""

    def __str__(self) -> str:
        return f"{self.name}={self.version}"


class AptLock(Frozen):
    """Packages of the root file system, of the image, and of the build stage."""

    base: tuple[SystemPackage, ...] = ()
    """Empty for a base image from a registry: its digest pins them."""
    runtime: tuple[SystemPackage, ...] = ()
    build: tuple[SystemPackage, ...] = ()

    def all(self) -> tuple[SystemPackage, ...]:
        """Return the packages of all stages."""
        return (*self.base, *self.runtime, *self.build)


def load_apt_lock(folder: Path) -> AptLock:
    """Read apt.lock of the stack in `folder`; raises InputError as `parse_apt_lock` does."""
    path = folder / "apt.lock"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot be read: {error}", place=str(path)) from None
    return parse_apt_lock(text, place=str(path))


def parse_apt_lock(text: str, *, place: str) -> AptLock:
    """Read the text of an apt.lock.

    Raises:
        InputError: a line that is no package, named by its number; the stamp is not checked.
    """
    found: dict[str, list[SystemPackage]] = {stage: [] for stage in STAGES}
    stage = ""
    for number, line in enumerate(text.splitlines()[1:], start=2):
        entry = _LINE.fullmatch(line)
        if line.removeprefix("# ") in STAGES:
            stage = line.removeprefix("# ")
        elif line.startswith("# "):
            continue
        elif entry and stage:
            found[stage].append(SystemPackage(**entry.groupdict()))
        else:
            raise InputError(
                "not a locked package",
                place=f"{place}:{number}",
                found=line[:120],
                allowed="`name=version  sha256` below one of # base, # runtime, # build",
                hint="run `invoke lock` for this stack",
            )
    return AptLock(**{name: tuple(packages) for name, packages in found.items()})


def apt_lock_text(stamp: str, lock: AptLock) -> str:
    """Return the text of apt.lock, packages sorted by name within their stage."""
    lines = [stamp]
    for stage in STAGES:
        lines.append(f"# {stage}")
        packages = sorted(getattr(lock, stage), key=lambda package: package.name)
        lines += [f"{package}  {package.sha256}" for package in packages]
    return with_checksums("\n".join([*lines, ""]))
