"""stack.toml: what a software environment is made of, before anything is resolved."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen

STAMP = "# {} sha256: "


class Unverified(Frozen):
    """A pin whose hash could not be taken where the lock was made."""

    requirement: str
    """Package and exact version, with the local label of the framework's own index."""
    source: str
    """Who says that it exists."""

    def package(self) -> str:
        """Return the name of the package."""
        return self.requirement.partition("==")[0]


class Alternative(Unverified):
    """A second-hand wheel that may take the place of a locked one; the lock has its hash as well."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    replaces: tuple[str, ...] = ()
    """Patterns of locked packages that are not needed with this wheel."""


class Base(Frozen):
    """What an image starts from."""

    kind: Literal["registry", "debian"]
    """`registry`: an image by digest. `debian`: a root file system made from the packages of apt.lock."""
    suite: str
    """Release of the distribution, which the system packages are resolved in."""
    repository: Annotated[str | None, Field(pattern=r"^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+$")] = (
        None
    )
    """Registry and name, without a scheme."""
    tag: str | None = None

    @model_validator(mode="after")
    def _an_image_has_a_name(self) -> Self:
        if {self.repository is None, self.tag is None} != {self.kind != "registry"}:
            raise ValueError("`repository` and `tag` belong to the kind `registry`, and only to it")
        return self

    def reference(self) -> str:
        """Return the name of the base as people write it."""
        return f"{self.repository}:{self.tag}" if self.repository else f"debian {self.suite}"


class Collectives(Frozen):
    """What collectives run on."""

    library: str
    version: str
    source: str
    """A lock and its entry, as in `apt.lock: librccl1`, or the document that pairs it with the toolkit."""


class GitSource(Frozen):
    """What the build stage builds from a commit."""

    name: str
    repository: str
    """URL that git clones from."""
    ref: str
    """Branch, tag or commit; image.lock has the commit."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment of its build."""


class PackageSource(Frozen):
    """What the build stage builds from the source archive of a package index."""

    name: str
    package: str
    """Name on the package index."""
    version: str
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment of its build."""


class Stack(Frozen):
    """stack.toml."""

    name: str
    vendor: str
    """Folder of images/vendors/."""
    title: str
    python: Annotated[str, Field(pattern=r"^[<>=!~0-9., ]+$")]
    """Interpreters it runs on, for example `>=3.11,<3.13`; the image has the lowest."""
    image: str
    """Repository of the built image; the tag is the lock hash."""
    platform: Annotated[str, Field(pattern=r"^linux/[a-z0-9]+$")] = "linux/amd64"
    """Operating system and processor, as registries name them."""
    archs: tuple[str, ...] = ()
    """GPU architectures that the kernels are compiled for; none for a stack without GPU code."""
    kernels: tuple[str, ...] = ()
    """Recipes whose kernels are baked in."""
    packages: tuple[str, ...] = ()
    """System packages of the image, by name; apt.lock has the versions."""
    build_packages: tuple[str, ...] = ()
    """System packages of the build stage alone."""
    collectives: Collectives | None = None
    base: Base | None = None
    """None: the stack has no image."""
    sources: tuple[GitSource | PackageSource, ...] = ()
    """What the build stage builds from source."""
    replaces: tuple[str, ...] = ()
    """Patterns of packages left out of the lock because an unverified pin takes their place."""
    unverified: tuple[Unverified, ...] = ()
    alternative: tuple[Alternative, ...] = ()

    def interpreter(self) -> str:
        """Return the version of the interpreter in the image, for example `3.11`."""
        found = re.search(r"[0-9]+\.[0-9]+", self.python)
        assert found is not None
        return found[0]

    def architecture(self) -> str:
        """Return the processor as distributions name it."""
        return self.platform.partition("/")[2]

    def system_stamp(self) -> str:
        """Return the line that ties apt.lock to what it was resolved from."""
        return _stamped(
            "suite and packages",
            {
                "base": self.base and [self.base.kind, self.base.suite],
                "platform": self.platform,
                "packages": self.packages,
                "build_packages": self.build_packages,
            },
        )

    def image_stamp(self) -> str:
        """Return the line that ties image.lock to what it was resolved from."""
        base = self.base and self.base.model_dump()
        sources = [source.model_dump(exclude={"variables"}) for source in self.sources]
        return _stamped("base and sources", {"base": base, "platform": self.platform, "sources": sources})


def _stamped(what: str, data: object) -> str:
    return STAMP.format(what) + sha256_of_bytes(canonical_json(data).encode())
