"""Which image a tag means: the ID committed beside the locks, and the one that this machine has built."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from twinrun.foundation.cache import cache_root
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json

COMMITTED = "contents.json"
"""File of the committed package inventory, in the folder of a stack."""
_ID = re.compile(r"sha256:[0-9a-f]{64}")


class _Committed(BaseModel):
    """The keys of a package inventory that identify the image."""

    image: str
    digest: str


def committed_id(folder: Path, image: str) -> str | None:
    """Return the ID that the stack in `folder` has committed for the reference `image`."""
    path = folder / COMMITTED
    found = load_json(path, _Committed) if path.is_file() else None
    return found.digest if found and found.image == image else None


def built_id(image: str) -> str | None:
    """Return the ID of the image that was built under this reference on this machine."""
    path = _record(image)
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return text if _ID.fullmatch(text) else None


def record_built(image: str, image_id: str) -> None:
    """Keep the ID of an image that was built here under this reference."""
    path = _record(image)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, f"{image_id}\n")


def _record(image: str) -> Path:
    return cache_root() / "images" / re.sub(r"[/:]", "_", image)
