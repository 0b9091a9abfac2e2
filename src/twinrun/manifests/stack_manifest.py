"""stack.toml: what a software environment is made of, before anything is resolved."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen

STAMP = "# {} sha256: "
# Counts up when the same packages give another root file system than before.
_ROOT_FORMAT = 2


# What a name may be: nothing that a shell, an option parser or a path reads as more than a name.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+([._-][a-z0-9]+)*$")]
Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
DebianName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
Pattern = Annotated[str, Field(pattern=r"^[a-z0-9*][a-z0-9*-]*$")]
Arch = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$")]
Repository = Annotated[
    str,
    Field(pattern=r"^([a-z0-9]+([.-][a-z0-9]+)*(:[0-9]+)?/)?[a-z0-9]+([._/-][a-z0-9]+)*$", max_length=200),
]


class UnverifiedPin(Frozen):
    """A pin whose hash could not be taken where the lock was made."""

    requirement: Requirement
    """Package and exact version, with the local label of the framework's own index."""
    source: Line
    """Who says that it exists."""

    def package(self) -> str:
        """Return the name of the package."""
        return self.requirement.partition("==")[0]


class AlternativePin(UnverifiedPin):
    """A second-hand wheel that may take the place of a locked one; the lock has its hash as well."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    replaces: tuple[Pattern, ...] = ()
    """Patterns of locked packages that are not needed with this wheel."""


class SourcePackage(Frozen):
    """A package that the index has as source alone: wherever wheels are fetched, one is built of it."""

    requirement: Requirement
    requires: tuple[Line, ...]
    """What its metadata asks for; to find out would run its code."""
    backend: tuple[Requirement, ...]
    """What builds it, by version, so that the wheel is the same everywhere."""
    wheel: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of that wheel; the lock has it beside the source's."""

    def package(self) -> str:
        """Return the name of the package."""
        return self.requirement.partition("==")[0]


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
    """GPU architectures that the kernels are compiled for; none for a stack without GPU code."""
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
    """Patterns of packages left out of the lock because an unverified pin takes their place."""
    unverified: tuple[UnverifiedPin, ...] = ()
    alternative: tuple[AlternativePin, ...] = ()
    source: tuple[SourcePackage, ...] = ()

    def interpreter(self) -> str:
        """Return the version of the interpreter in the image, for example `3.11`."""
        found = re.search(r"[0-9]+\.[0-9]+", self.python)
        assert found is not None
        return found[0]

    def architecture(self) -> str:
        """Return the processor as distributions name it."""
        return self.platform.partition("/")[2]

    def kernel_folders(self) -> tuple[str, ...]:
        """Return the folders of the kernels that are baked in, relative to the root."""
        return tuple(f"recipes/{name}/kernels" for name in self.kernels)

    def system_stamp(self) -> str:
        """Return the line that ties apt.lock to what it was resolved from."""
        return _stamped(
            "suite and packages",
            {
                "suite": self.base and self.base.suite,
                "platform": self.platform,
                "packages": self.packages,
                "build_packages": self.build_packages,
            },
        )

    def image_stamp(self) -> str:
        """Return the line that ties image.lock to what it was resolved from."""
        return _stamped(
            "suite",
            {"suite": self.base and self.base.suite, "platform": self.platform, "format": _ROOT_FORMAT},
        )


def _stamped(what: str, data: object) -> str:
    return STAMP.format(what) + sha256_of_bytes(canonical_json(data).encode())
