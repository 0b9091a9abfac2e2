"""Lock files of a stack: Python packages as pip writes them, system packages, and the root file system.

Packages that a stack has otherwise than an index offers them are named with what takes their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen, load_toml, read_text

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
Pattern = Annotated[str, Field(pattern=r"^[a-z0-9*][a-z0-9*-]*$")]
# A package is in the first of these that needs it.
STAGES = ("root", "build")
_LINE = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9+.-]+)=(?P<version>[A-Za-z0-9.+:~-]+)  (?P<sha256>[0-9a-f]{64})"
    r"  (?P<size>[0-9]+)  (?P<path>[a-z0-9-]+/(?!.*\.\./)[A-Za-z0-9_.+~/%-]+\.deb)"
)
# Name, version and marker to the SHA-256 of each file, in the order of the lock.
PythonLock = dict[str, frozenset[str]]
_PIN_START = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_COMMENT = re.compile(r"^#.*", re.MULTILINE)
_LOCKED = re.compile(
    r"(?P<pin>[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!-]+(?: ; [^\\\n]+?)?)"
    r"(?P<hashes>(?:\s*\\\n\s+--hash=sha256:[0-9a-f]{64})+)\s*"
)
_HASH = re.compile(r"[0-9a-f]{64}")


class PinnedPackage(Frozen):
    """A package in one version."""

    requirement: Requirement
    """Package and exact version."""

    def package(self) -> str:
        """Return the name of the package."""
        return self.requirement.partition("==")[0]


class SourcePackage(PinnedPackage):
    """A package that the index has as source alone: wherever wheels are fetched, one is built of it."""

    requires: tuple[Line, ...]
    """What its metadata asks for; to find out would run its code."""
    backend: tuple[Requirement, ...]
    """What builds it, by version, so that the wheel is the same everywhere."""
    wheel: Sha256
    """SHA-256 of that wheel; the lock has it beside the source's."""


class ReducedPackage(PinnedPackage):
    """A package that is installed without a part of what its metadata asks for."""

    requires: tuple[Line, ...]
    """What is installed with it, in place of what it asks for."""
    because: Line
    """Why it works without the rest."""


class LiftedBound(PinnedPackage):
    """A requirement beyond the bound that another package declares; it is installed all the same."""

    because: Line
    """Who was seen to work with it."""


class EnvironmentSize(Frozen):
    """What the lock takes as a virtual environment."""

    download_mib: Annotated[int, Field(gt=0)] | None = None
    """Wheels of more than a MiB, as uv announces them; null where nobody has seen how large one is."""
    disk_mib: Annotated[int, Field(gt=0)]
    source: Line
    """How it was measured, or what it is estimated from."""


class SystemPackage(Frozen):
    """One file of a Debian archive; whoever has these bytes has the package."""

    name: str
    version: str
    sha256: str
    size: int
    """Bytes of the .deb file."""
    path: str
    """Address below a mirror: the archive, and the file's place in its pool."""

    def __str__(self) -> str:
        return f"{self.name}={self.version}"


class AptLock(Frozen):
    """Packages of the image's root file system, and those that the build stage has beside them."""

    root: tuple[SystemPackage, ...] = ()
    build: tuple[SystemPackage, ...] = ()

    def all(self) -> tuple[SystemPackage, ...]:
        """Return the packages of both."""
        return (*self.root, *self.build)


def _not_locked(place: str, line: str, allowed: str) -> InputError:
    hint = "run `invoke lock` for this stack"
    return InputError("not a locked package", place=place, found=line[:120], allowed=allowed, hint=hint)


def load_apt_lock(folder: Path) -> AptLock:
    """Read apt.lock of the stack in `folder`; raises InputError as `parse_apt_lock` does."""
    return parse_apt_lock(read_text(folder / "apt.lock"), place=str(folder / "apt.lock"))


def parse_apt_lock(text: str, *, place: str) -> AptLock:
    """Read the text of an apt.lock, whose first line is its stamp.

    Raises:
        InputError: a line that is no package, named by its number.
    """
    found: dict[str, list[SystemPackage]] = {stage: [] for stage in STAGES}
    stage = ""
    for number, line in enumerate(text.splitlines()[1:], start=2):
        entry = _LINE.fullmatch(line)
        if line.removeprefix("# ") in STAGES:
            stage = line.removeprefix("# ")
        elif entry and stage:
            found[stage].append(SystemPackage.model_validate(entry.groupdict(), strict=False))
        elif not line.startswith("# "):
            allowed = "`name=version  sha256  bytes  archive/pool/...deb` below `# root` or `# build`"
            raise _not_locked(f"{place}:{number}", line, allowed)
    return AptLock(**{name: tuple(packages) for name, packages in found.items()})


def apt_lock_text(stamp: str, lock: AptLock) -> str:
    """Return the text of apt.lock, packages sorted by name within their stage."""
    lines = [stamp]
    for stage in STAGES:
        packages = sorted(getattr(lock, stage), key=lambda package: package.name)
        lines += [f"# {stage}", *(f"{one}  {one.sha256}  {one.size}  {one.path}" for one in packages)]
    return "\n".join([*lines, ""])


def parse_python_lock(text: str, *, place: str) -> PythonLock:
    """Read a requirements file in which each package has a hash; raises InputError."""
    found: PythonLock = {}
    text = _COMMENT.sub("", text)
    for part in filter(str.strip, _PIN_START.split(text)):
        entry = _LOCKED.fullmatch(part)
        if entry is None:
            line = text[: text.index(part)].count("\n") + 1
            allowed = "name==version with a --hash=sha256: or more"
            raise _not_locked(f"{place}:{line}", part.strip().partition("\n")[0], allowed)
        found[entry["pin"]] = frozenset(_HASH.findall(entry["hashes"]))
    return found


def python_lock_text(stamp: str, lock: PythonLock) -> str:
    """Return a lock of Python packages as pip reads it."""
    return "\n".join([stamp, *(_entry(pin, hashes) for pin, hashes in lock.items()), ""])


def _entry(pin: str, hashes: Iterable[str]) -> str:
    return " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])


class ImageLock(Frozen):
    """image.lock."""

    epoch: Annotated[int, Field(gt=0)]
    """SOURCE_DATE_EPOCH of the build: when the packages were published, in seconds since 1970."""
    root: Sha256
    """SHA-256 of the root file system's tar, which mmdebstrap makes of the packages of apt.lock."""


def load_image_lock(folder: Path) -> ImageLock:
    """Read image.lock of the stack in `folder`; raises InputError."""
    return load_toml(folder / "image.lock", ImageLock)


def image_lock_text(stamp: str, lock: ImageLock) -> str:
    """Return the text of image.lock."""
    return f'{stamp}\nepoch = {lock.epoch}\nroot = "{lock.root}"\n'
