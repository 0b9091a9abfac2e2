"""image.lock: the root file system of an image by its digest, and the time that all of its files carry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from twinrun.foundation.manifest import Frozen, load_toml
from twinrun.manifests.lock_checksum import with_checksums

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ImageLock(Frozen):
    """image.lock."""

    epoch: Annotated[int, Field(gt=0)]
    """SOURCE_DATE_EPOCH of the build: when the packages were published, in seconds since 1970."""
    base: Sha256
    """Of the root file system's tar, as mmdebstrap makes it from apt.lock."""


def load_image_lock(folder: Path) -> ImageLock:
    """Read image.lock of the stack in `folder`; raises InputError."""
    return load_toml(folder / "image.lock", ImageLock)


def image_lock_text(stamp: str, lock: ImageLock) -> str:
    """Return the text of image.lock."""
    return with_checksums(f'{stamp}\nepoch = {lock.epoch}\nbase = "{lock.base}"\n')
