"""From the name of a place to its store."""

from __future__ import annotations

from pathlib import Path

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.s3 import ObjectStore
from twinrun.checkpoints.store import Store


def store_at(place: str) -> Store:
    """Return the store at `place`: `s3://bucket/prefix`, or a folder."""
    return ObjectStore(place) if is_remote(place) else FolderStore(Path(place))


def is_remote(place: str) -> bool:
    """Say whether `place` is one that every machine sees."""
    return place.startswith("s3://")
