"""Python packages that a stack has otherwise than an index offers them, each with what takes its place."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from twinrun.foundation.manifest import Frozen

Line = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.+!_-]*$")]
Pattern = Annotated[str, Field(pattern=r"^[a-z0-9*][a-z0-9*-]*$")]


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
    wheel: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
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
