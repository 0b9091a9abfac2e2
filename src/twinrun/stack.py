"""Stacks: pinned software environments, found by scanning `images/stacks/`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from twinrun.errors import InputError, closest
from twinrun.files import is_file_in, sha256_of_file
from twinrun.manifest import Frozen, load_toml

_STAMP = "# requirements.in sha256: "
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)", re.MULTILINE)


class Unverified(Frozen):
    """A pin whose hash could not be taken where the lock was made."""

    requirement: str
    """Package and exact version, with the local label of the framework's own index."""
    source: str
    """Who says that it exists."""

    def package(self) -> str:
        """Return the name of the package."""
        return self.requirement.partition("==")[0]


class Stack(Frozen):
    """stack.toml."""

    name: str
    vendor: str
    """Folder of images/vendors/."""
    title: str
    python: Annotated[str, Field(pattern=r"^[<>=!~0-9., ]+$")]
    """Interpreters it runs on, for example `>=3.11,<3.13`."""
    image: str
    """Repository of the built image; the tag is the lock hash."""
    replaces: tuple[str, ...] = ()
    """Patterns of packages left out of the lock because an unverified pin takes their place."""
    unverified: tuple[Unverified, ...] = ()


class LoadedStack(Frozen):
    """A stack with the state of its lock."""

    stack: Stack
    folder: str
    lock_sha256: str

    def lock(self, root: Path) -> Path:
        """Return the path of the hashed Python lock."""
        return root / self.folder / "requirements.lock"

    def locked(self, root: Path) -> dict[str, tuple[str, ...]]:
        """Return the locked versions of every package."""
        return pins(self.lock(root).read_text(encoding="utf-8"))

    def unhashed(self, root: Path) -> tuple[str, ...]:
        """Return the requirements that stack.toml calls unverified and the lock has no hash for."""
        locked = self.locked(root)
        return tuple(
            pin.requirement for pin in self.stack.unverified if pins(pin.requirement).items() - locked.items()
        )

    def image(self) -> str:
        """Return the image reference that belongs to this lock."""
        return f"{self.stack.image}:{self.lock_sha256[:12]}"


def find_stacks(root: Path) -> dict[str, LoadedStack]:
    """Load every folder of `root/images/stacks`; a broken one is an InputError, never skipped."""
    folders = sorted(path for path in (root / "images" / "stacks").iterdir() if path.is_dir())
    return {folder.name: load_stack(root, folder.name) for folder in folders}


def load_stack(root: Path, name: str) -> LoadedStack:
    """Load the stack called `name` and check that its lock belongs to its requirements.

    Raises:
        InputError: no such stack, a broken manifest, or a lock out of date.
    """
    folder = root / "images" / "stacks" / name
    if not is_file_in(folder, "stack.toml"):
        known = sorted(path.parent.name for path in folder.parent.glob("*/stack.toml"))
        raise InputError("unknown stack", found=name, allowed=known, hint=closest(name, known))
    stack = load_toml(folder / "stack.toml", Stack)
    if stack.name != name:
        raise InputError(
            "the name is not the folder's",
            place=f"{folder / 'stack.toml'}:name",
            found=stack.name,
            allowed=name,
        )
    _check_lock(folder)
    return LoadedStack(
        stack=stack,
        folder=folder.relative_to(root).as_posix(),
        lock_sha256=sha256_of_file(folder / "requirements.lock"),
    )


def stamp(requirements: Path) -> str:
    """Return the line that ties a lock to the requirements it was resolved from."""
    return f"{_STAMP}{sha256_of_file(requirements)}"


def pins(text: str) -> dict[str, tuple[str, ...]]:
    """Return the versions of every package that a lock or requirements file pins, names normalised.

    Most have one; a package that has ended support for an interpreter has one for each marker.
    """
    found: dict[str, tuple[str, ...]] = {}
    for match in _PIN.finditer(text):
        name = normalise(match["name"])
        found[name] = (*found.get(name, ()), match["version"])
    return found


def normalise(name: str) -> str:
    """Return a package name as PEP 503 compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _check_lock(folder: Path) -> None:
    lock, requirements = folder / "requirements.lock", folder / "requirements.in"
    for path in (requirements, lock):
        if not path.is_file():
            raise InputError("missing", place=str(path), hint=f"run `invoke lock --stack {folder.name}`")
    with lock.open(encoding="utf-8", errors="replace") as stream:
        found = stream.readline().strip()
    expected = stamp(requirements)
    if found != expected:
        raise InputError(
            "the lock does not belong to requirements.in",
            place=str(lock),
            found=found[:90] or "(no stamp)",
            allowed=expected,
            hint=f"run `invoke lock --stack {folder.name}` and commit both files",
        )
