"""Checkpoints as files: format, stores, verification; needs no torch, so that hosts can check them too."""

from __future__ import annotations

from pathlib import Path

from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.s3 import ObjectStore, is_remote
from twinrun.checkpoints.store import Store


def store_at(place: str) -> Store:
    """Return the store at `place`: `s3://bucket/prefix`, or a folder; raises InputError, MachineError."""
    return ObjectStore(place) if is_remote(place) else FolderStore(Path(place))
