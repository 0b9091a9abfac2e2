"""Which image a tag means: the ID committed beside the locks, and the one that this machine has built."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from twinrun.foundation.cache import cache_root
from twinrun.foundation.files import canonical_json, write_atomically
from twinrun.foundation.manifest import load_json

COMMITTED = "contents.json"
"""File of the committed package inventory, in the folder of a stack."""
_ID = re.compile(r"sha256:[0-9a-f]{64}")


class CommittedInventory(BaseModel):
    """The keys of a committed package inventory that identify the image."""

    image: str
    digest: str
    layers: tuple[str, ...] = ()


def image_configuration(
    *,
    platform: str,
    created: str,
    config: dict[str, Any],
    history: Iterable[tuple[str, str]],
    diff_ids: list[str],
) -> bytes:
    """Return the configuration of an image, whose checksum is the image ID.

    Args:
        config: of its containers.
        history: time and line of each layer, the lowest first.
        diff_ids: checksums of the layers' tars.
    """
    system, _, architecture = platform.partition("/")
    content = {
        "architecture": architecture,
        "os": system,
        "created": created,
        "config": config,
        "history": [{"created": time, "created_by": line} for time, line in history],
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    return canonical_json(content).encode()


def rfc3339(epoch: int) -> str:
    """Return seconds since 1970 as an RFC 3339 time."""
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def committed(folder: Path, image: str) -> CommittedInventory | None:
    """Return what the stack in `folder` has committed for the reference `image`."""
    path = folder / COMMITTED
    found = load_json(path, CommittedInventory) if path.is_file() else None
    return found if found and found.image == image else None


def built_id(image: str) -> str | None:
    """Return the ID of the image that was built under this reference on this machine."""
    path = _record(image)
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return text if _ID.fullmatch(text) else None


def record_built(image: str, image_id: str) -> None:
    """Keep the ID of an image that was built here under this reference."""
    write_atomically(_record(image), f"{image_id}\n")


def _record(image: str) -> Path:
    return cache_root() / "images" / re.sub(r"[/:]", "_", image)
