"""Lock files of a stack: system packages, Python packages and the root file system, each with checksums."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.manifest import Frozen, load_toml, read_text
from twinrun.manifests.packages import Line

_PREFIX = "# entries: "
# Continued lines are indented.
_ENTRY_START = re.compile(r"^(?=\S)", re.MULTILINE)
# This many find an accidental change; only the file's history shows an intended one.
_DIGITS = 8
# A package is in the first of these that needs it.
STAGES = ("base", "runtime", "build")
_NAME = r"[a-z0-9][a-z0-9+.-]+"
_LINE = re.compile(rf"(?P<name>{_NAME})=(?P<version>[A-Za-z0-9.+:~-]+)  (?P<sha256>[0-9a-f]{{64}})")
# Name, version and marker to the SHA-256 of each file, in the order of the lock.
PythonLock = dict[str, frozenset[str]]
_VERIFIED = "# verified at the framework's index: "
_PIN_START = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
_COMMENT = re.compile(r"^#.*", re.MULTILINE)
_LOCKED = re.compile(
    r"(?P<pin>[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!-]+(?: ; [^\\\n]+?)?)"
    r"(?P<hashes>(?:\s*\\\n\s+--hash=sha256:[0-9a-f]{64})*)\s*"
)
_HASH = re.compile(r"[0-9a-f]{64}")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class EnvironmentSize(Frozen):
    """What the lock takes as a virtual environment."""

    download_mib: Annotated[int, Field(gt=0)] | None = None
    """Wheels of more than a MiB, as uv announces them; null where nobody has seen how large one is."""
    disk_mib: Annotated[int, Field(gt=0)]
    source: Line
    """How it was measured, or what it is estimated from."""

    @property
    def download(self) -> int | None:
        """Return the bytes to download."""
        return self.download_mib << 20 if self.download_mib else None

    @property
    def disk(self) -> int:
        """Return the bytes on the disk."""
        return self.disk_mib << 20


def with_checksums(text: str) -> str:
    """Return a lock file with its checksums; its first line, the stamp, has none."""
    return f"{text}{_PREFIX}{' '.join(map(_checksum, _entries(text)))}\n"


def first_changed_entry(text: str) -> str | None:
    """Return the first line of the first entry that does not match its checksum, or None."""
    body, prefix, line = text.rpartition(_PREFIX)
    if not prefix:
        return "the last line, with the digests of all entries, is missing"
    entries, checksums = _entries(body), line.removesuffix("\n").split(" ")
    for entry, checksum in zip(entries, checksums, strict=False):
        if _checksum(entry) != checksum:
            return entry.partition("\n")[0].rstrip(" \\")
    return None if with_checksums(body) == text else "an entry is missing, or one too many"


def _entries(text: str) -> list[str]:
    return _ENTRY_START.split(text.partition("\n")[2])[1:]


def _checksum(entry: str) -> str:
    return sha256_of_bytes(entry.encode("utf-8", "surrogateescape"))[:_DIGITS]


class SystemPackage(Frozen):
    """One system package."""

    name: str
    version: str
    sha256: str
    """SHA-256 of the .deb file."""

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
    return parse_apt_lock(read_text(path), place=str(path))


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


def parse_python_lock(text: str, *, place: str) -> PythonLock:
    """Read the text of a lock of Python packages; raises InputError for an entry that is none."""
    found: PythonLock = {}
    text = _COMMENT.sub("", text)
    for part in filter(str.strip, _PIN_START.split(text)):
        entry = _LOCKED.fullmatch(part)
        if entry is None:
            line = text[: text.index(part)].count("\n") + 1
            raise InputError(
                "not a locked package",
                place=f"{place}:{line}",
                found=part.strip().partition("\n")[0][:120],
                hint="run `invoke lock` for this stack",
            )
        found[entry["pin"]] = frozenset(_HASH.findall(entry["hashes"]))
    return found


def python_lock_text(stamp: str, lock: PythonLock, *, verified: Iterable[str] = ()) -> str:
    """Return the text of a lock of Python packages.

    Args:
        verified: attested pins whose hashes the framework's own index was seen to have.
    """
    marks = [f"{_VERIFIED}{pin}" for pin in sorted(verified)]
    entries = (_entry(pin, hashes) for pin, hashes in lock.items())
    return with_checksums("\n".join([stamp, *marks, *entries, ""]))


def verified_pins(text: str) -> frozenset[str]:
    """Return the attested pins that a lock says were verified at the framework's own index."""
    lines = text.splitlines()
    return frozenset(line.removeprefix(_VERIFIED) for line in lines if line.startswith(_VERIFIED))


def _entry(pin: str, hashes: Iterable[str]) -> str:
    return " \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in sorted(hashes))])


class ImageLock(Frozen):
    """image.lock."""

    epoch: Annotated[int, Field(gt=0)]
    """SOURCE_DATE_EPOCH of the build: when the packages were published, in seconds since 1970."""
    base: Sha256
    """SHA-256 of the root file system's tar, which mmdebstrap makes from apt.lock."""


def load_image_lock(folder: Path) -> ImageLock:
    """Read image.lock of the stack in `folder`; raises InputError."""
    return load_toml(folder / "image.lock", ImageLock)


def image_lock_text(stamp: str, lock: ImageLock) -> str:
    """Return the text of image.lock."""
    return with_checksums(f'{stamp}\nepoch = {lock.epoch}\nbase = "{lock.base}"\n')
