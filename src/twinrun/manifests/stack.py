"""Stacks: pinned software environments, each described by its stack.toml, found in `images/stacks/`."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.cache import tree_sha256
from twinrun.foundation.errors import InputError, require_equal, require_known
from twinrun.foundation.files import canonical_json, is_file_in, sha256_of_bytes, sha256_of_file
from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.manifests.image_identity import CommittedInventory, built_id, committed
from twinrun.manifests.locks import (
    AptLock,
    EnvironmentSize,
    ImageLock,
    LiftedBound,
    Line,
    Pattern,
    ReducedPackage,
    SourcePackage,
    load_apt_lock,
    load_image_lock,
)

STAMP = "# {} sha256: "
# A package that those of all kernels import.
SHARED_KERNELS = "kernels/shared"
# Counts up when the same packages give another root file system than before.
_ROOT_FORMAT = 3
DOCKERFILE = "images/Dockerfile"
INPUTS_LABEL = "dev.twinrun.inputs-sha256"
# Counts up when the same inputs give another image than before.
_IMAGE_FORMAT = 3
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)", re.MULTILINE)

# A name is nothing that a shell, an option parser or a path reads as more than a name.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$")]
DebianName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
Arch = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$")]
Repository = Annotated[
    str,
    Field(pattern=r"^([a-z0-9]+([.-][a-z0-9]+)*(:[0-9]+)?/)?[a-z0-9]+([._/-][a-z0-9]+)*$", max_length=200),
]


class Base(Frozen):
    """What an image starts from: a root file system that mmdebstrap makes of the packages of apt.lock."""

    suite: Literal["bookworm", "trixie"]
    """Release of Debian, which all system packages are resolved in."""


class Collectives(Frozen):
    """What collectives run on."""

    library: Line
    version: Line
    source: Line
    """A lock and its entry, as in `apt.lock: librccl1`, or the document that pairs it with the toolkit."""


class Stack(Frozen):
    """stack.toml."""

    name: Name
    vendor: Name
    """Folder of images/vendors/."""
    title: Line
    python: Annotated[str, Field(pattern=r"^[<>=!~0-9., ]+$")]
    """Interpreters it runs on, for example `>=3.11,<3.13`; the image has the lowest."""
    image: Repository
    """Repository of the built image; the tag is the lock hash."""
    platform: Annotated[str, Field(pattern=r"^linux/[a-z0-9]+$")] = "linux/amd64"
    """Operating system and processor, as registries name them."""
    archs: tuple[Arch, ...] = ()
    """GPU architectures that the stack and its kernels are for; none for a stack without GPU code."""
    kernels: tuple[Name, ...] = ()
    """Recipes whose kernels are baked in."""
    packages: tuple[DebianName, ...] = ()
    """System packages of the image, by name; apt.lock has the versions."""
    build_packages: tuple[DebianName, ...] = ()
    """System packages of the build stage alone."""
    collectives: Collectives | None = None
    base: Base | None = None
    """None: the stack has no image."""
    replaces: tuple[Pattern, ...] = ()
    """Patterns of packages of the general index in whose place framework.txt has the framework's own."""
    index: Annotated[str, Field(pattern=r"^https://[a-z0-9.-]+(/[A-Za-z0-9._-]+)*/?$")] | None = None
    """The framework's own package index, which has the wheels of framework.txt."""
    lifted: tuple[LiftedBound, ...] = ()
    reduced: tuple[ReducedPackage, ...] = ()
    source: tuple[SourcePackage, ...] = ()
    environment: EnvironmentSize | None = None
    """Null in the stacks of tests alone; a contract demands it of all others."""

    def interpreter(self) -> str:
        """Return the version of the interpreter in the image, for example `3.11`."""
        return str(re.findall(r"[0-9]+\.[0-9]+", self.python)[0])

    def architecture(self) -> str:
        """Return the processor as distributions name it."""
        return self.platform.partition("/")[2]

    def kernel_folders(self) -> tuple[str, ...]:
        """Return the folders of the kernels that are baked in, relative to the root."""
        folders = tuple(f"recipes/{name}/kernels" for name in self.kernels)
        return (*folders, SHARED_KERNELS) if folders else ()

    def system_stamp(self) -> str:
        """Return the line that ties apt.lock to what it was resolved from."""
        packages = self.model_dump(mode="json", include={"platform", "packages", "build_packages"})
        return _stamped("suite and packages", {"suite": self.base and self.base.suite, **packages})

    def image_stamp(self) -> str:
        """Return the line that ties image.lock to what it was resolved from."""
        suite = self.base and self.base.suite
        return _stamped("suite", {"suite": suite, "platform": self.platform, "format": _ROOT_FORMAT})


def _stamped(what: str, data: object) -> str:
    return STAMP.format(what) + sha256_of_bytes(canonical_json(data).encode())


class LoadedStack(Frozen):
    """A stack with the state of its lock."""

    stack: Stack
    folder: str
    lock_sha256: str
    """Over all lock files, and over the keys of stack.toml that the image depends on beside them."""
    inputs_sha256: str
    """Over all that goes into the image: the locks, the Dockerfile and the kernels of this checkout."""
    packages: frozenset[str] = frozenset()
    """Names of the Python packages that are locked."""
    committed: CommittedInventory | None = None
    """Image of these inputs, where it is committed beside the locks."""
    own_image: str | None = None
    """Image of a user or a vendor in place of the stack's: what it has is looked at, not demanded."""

    def lock(self, root: Path) -> Path:
        """Return the path of the hashed Python lock."""
        return root / self.folder / "requirements.lock"

    def build_lock(self, root: Path) -> Path | None:
        """Return the path of the hashed Python lock of the build stage, if it needs packages of its own."""
        path = root / self.folder / "build.lock"
        return path if path.is_file() else None

    def requirements_sha256(self, root: Path) -> str:
        """Return the digest of the Python lock alone, which is all that a virtual environment depends on."""
        return sha256_of_file(self.lock(root))

    def locked(self, root: Path) -> dict[str, tuple[str, ...]]:
        """Return the locked versions of every package."""
        return pins(self.lock(root).read_text(encoding="utf-8"))

    def image_lock(self, root: Path) -> ImageLock | None:
        """Return image.lock; None for a stack without an image."""
        return load_image_lock(root / self.folder) if self.stack.base else None

    def system_packages(self, root: Path) -> AptLock | None:
        """Return apt.lock; None for a stack without an image."""
        return load_apt_lock(root / self.folder) if self.stack.base else None

    def image(self) -> str:
        """Return the reference of the image that is made of exactly these inputs, or of the user's own."""
        return self.own_image or f"{self.stack.image}:{self.inputs_sha256[:12]}"

    def inputs_label(self) -> str:
        """Return the label of an image of these inputs, which anybody can put on another one too."""
        return f"{INPUTS_LABEL}={self.inputs_sha256}"

    def known_ids(self) -> list[str]:
        """Return the IDs of images of these inputs: the committed one, and the one that was built here."""
        return [one for one in (self.committed and self.committed.digest, built_id(self.image())) if one]

    def wrong_image(self, found: str) -> str | None:
        """Return why the image with the ID `found` is not the stack's, or None; both IDs are named."""
        known = self.known_ids()
        if self.own_image or found in known:
            return None
        expected = " or ".join(known) or "no image that was built here or is committed"
        return f"{self.image()} is {found}, not {expected}"


def framework_index(stack: Stack, *, asked: str | None = None) -> str | None:
    """Return the package index that has the framework's own wheels: as asked for, as set, or the stack's.

    Raises:
        InputError: no address of a server.
    """
    found = asked or os.environ.get("TWINRUN_INDEX") or stack.index
    if found and not found.startswith(("https://", "http://")):
        place = "--index" if asked else "TWINRUN_INDEX"
        raise InputError("no address", place=place, found=found, allowed="https://HOST/PATH")
    return found


def find_stacks(root: Path) -> dict[str, LoadedStack]:
    """Load every folder of `root/images/stacks`; a broken one is an InputError, never skipped."""
    folders = sorted(path for path in (root / "images" / "stacks").iterdir() if path.is_dir())
    return {folder.name: load_stack(root, folder.name) for folder in folders}


def load_stack(root: Path, name: str) -> LoadedStack:
    """Load the stack called `name` and check that its locks belong to what they were resolved from.

    Raises:
        InputError: no such stack, a broken manifest, or a lock out of date.
    """
    stack = load_manifest(root, name)
    folder = root / "images" / "stacks" / name
    for path, expected in expected_stamps(folder, stack).items():
        _check_lock(path, expected)
    lock_sha256 = _lock_sha256(folder, stack)
    loaded = LoadedStack(
        stack=stack,
        folder=folder.relative_to(root).as_posix(),
        lock_sha256=lock_sha256,
        inputs_sha256=_inputs_sha256(root, stack, lock_sha256),
        packages=frozenset(pins((folder / "requirements.lock").read_text(encoding="utf-8"))),
    )
    return loaded.model_copy(update={"committed": committed(folder, loaded.image())})


def load_manifest(root: Path, name: str) -> Stack:
    """Read stack.toml of the stack called `name`, whatever the state of its locks; raises InputError."""
    folder = root / "images" / "stacks" / name
    if not is_file_in(folder, "stack.toml"):
        known = sorted(path.parent.name for path in folder.parent.glob("*/stack.toml"))
        if name in known:
            raise InputError("not a manifest", place=str(folder / "stack.toml"), found="no regular file")
        require_known(name, known, "unknown stack", place="--stack")
    stack = load_toml(folder / "stack.toml", Stack)
    require_equal(stack.name, name, "the name is not the folder's", place=f"{folder / 'stack.toml'}:name")
    return stack


def expected_stamps(folder: Path, stack: Stack) -> dict[Path, str]:
    """Return the first line that each lock of a stack must have; raises InputError."""
    stamps = {folder / "requirements.lock": stamp(folder / "requirements.in")}
    if (folder / "build.in").is_file():
        stamps[folder / "build.lock"] = stamp(folder / "build.in")
    if stack.base:
        stamps |= {folder / "apt.lock": stack.system_stamp(), folder / "image.lock": stack.image_stamp()}
    return stamps


def stamp(requirements: Path) -> str:
    """Return the line that ties a lock to what it was resolved from; raises InputError."""
    if not requirements.is_file():
        raise InputError("missing", place=str(requirements), hint="it has the direct requirements")
    framework = framework_pins(requirements)
    names = [path.name for path in (requirements, *framework)]
    content = b"".join(path.read_bytes() for path in (requirements, *framework))
    return STAMP.format(", ".join(names)) + sha256_of_bytes(content)


def framework_pins(requirements: Path) -> list[Path]:
    """Return framework.txt beside the requirements of the image, where the stack has one.

    It is a part of the lock that is kept by hand: wheels that only the framework's own index has, their
    hashes, and in comments where each hash was found.
    """
    path = requirements.with_name("framework.txt")
    return [path] if requirements.name == "requirements.in" and path.is_file() else []


def first_line(path: Path) -> str:
    """Return the first line of a file: in a lock, the stamp."""
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.readline().strip()


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


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Say whether a package name matches one of the patterns."""
    return any(fnmatch.fnmatch(normalise(name), pattern) for pattern in patterns)


def _lock_sha256(folder: Path, stack: Stack) -> str:
    """Return the digest that names the image: of the locks, and of what else goes into it."""
    content: dict[str, object] = {path.name: sha256_of_file(path) for path in expected_stamps(folder, stack)}
    content |= stack.model_dump(mode="json", include={"python", "platform", "kernels", "archs"})
    return sha256_of_bytes(canonical_json(content).encode())


def _inputs_sha256(root: Path, stack: Stack, lock_sha256: str) -> str:
    """Return the digest of all inputs of the image; a folder that git does not track counts as absent."""
    dockerfile = root / DOCKERFILE
    content: dict[str, object] = {"lock": lock_sha256, "title": stack.title, "format": _IMAGE_FORMAT}
    content["dockerfile"] = sha256_of_file(dockerfile) if stack.base and dockerfile.is_file() else None
    for folder in stack.kernel_folders() if stack.base else ():
        with contextlib.suppress(InputError):
            content[folder] = tree_sha256(root, folder)
    return sha256_of_bytes(canonical_json(content).encode())


def _check_lock(lock: Path, expected: str) -> None:
    """Hold a lock against what it was resolved from; raises InputError."""
    hint = f"run `invoke lock --stack {lock.parent.name}` and commit what it writes"
    if not lock.is_file():
        raise InputError("missing", place=str(lock), hint=hint)
    found = first_line(lock)
    if found != expected:
        what = expected.removeprefix("# ").partition(" sha256")[0]
        message, found = f"the lock does not belong to {what}", found[:90] or "(no stamp)"
        raise InputError(message, place=str(lock), found=found, allowed=expected, hint=hint)
