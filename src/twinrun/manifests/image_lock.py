"""image.lock: base image and sources of an image, by digest and commit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field

from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.manifests.lock_checksum import with_checksums

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Pin(Frozen):
    """Keys that every entry has."""

    name: str
    """As stack.toml has it."""
    verified: bool
    """The digest was read from its origin."""
    source: str
    """Who states the digest: the origin itself, or a document."""


class BasePin(Pin):
    """Base image or root file system."""

    sha256: Sha256 | None = None
    """Of the registry's manifest for the platform, or of the root file system's tar; None when unknown."""


class SourcePin(Pin):
    """Source that the build stage builds, at one commit or as one source distribution."""

    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    requirement: str | None = None
    """Package and version whose source distribution an index has."""
    sha256: Sha256 | None = None
    """Of the source distribution."""


class ImageLock(Frozen):
    """image.lock."""

    epoch: Annotated[int, Field(gt=0)]
    """SOURCE_DATE_EPOCH of the build: when the newest pin was published, in seconds since 1970."""
    base: BasePin
    sources: tuple[SourcePin, ...] = ()

    def unverified(self) -> tuple[str, ...]:
        """Return the names of the unverified pins."""
        base = () if self.base.verified else (self.base.name,)
        return (*base, *(source.name for source in self.sources if not source.verified))

    def source(self, name: str) -> SourcePin:
        """Return the pin of the source called `name`."""
        return next(source for source in self.sources if source.name == name)


def load_image_lock(folder: Path) -> ImageLock:
    """Read image.lock of the stack in `folder`; raises InputError."""
    return load_toml(folder / "image.lock", ImageLock)


def image_lock_text(stamp: str, lock: ImageLock) -> str:
    """Return the text of image.lock."""
    lines = [stamp, f"epoch = {lock.epoch}", "", "[base]", *_keys(lock.base)]
    for source in lock.sources:
        lines += ["", "[[sources]]", *_keys(source)]
    return with_checksums("\n".join([*lines, ""]))


def _keys(pin: Pin) -> list[str]:
    # A JSON string without characters above the basic plane is a TOML string.
    values = pin.model_dump(exclude_none=True)
    order = sorted(values, key=lambda key: (key != "name", key in Pin.model_fields))
    return [f"{key} = {json.dumps(values[key], ensure_ascii=False)}" for key in order]
