"""Free space that a build needs, at the engine and in the cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import MachineError
from twinrun.images.building.context import installed_bytes
from twinrun.images.building.progress import megabytes

if TYPE_CHECKING:
    from docker import DockerClient

# Unpacked by a stage, read in as finished layers, and those unpacked.
_COPIES_IN_ENGINE = 3


class Space:
    """Space that is there, and about how much one build needs."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._needed_bytes = 0

    def require(self, files: dict[str, list[Path]]) -> None:
        """Refuse to begin what cannot end; raises MachineError."""
        packed = sum(path.stat().st_size for paths in files.values() for path in paths)
        self._needed_bytes = packed + (_COPIES_IN_ENGINE + 1) * installed_bytes(files)
        if min(self._free_bytes().values()) < self._needed_bytes:
            raise self.exhausted()

    def exhausted(self) -> MachineError:
        """Return the error that says how much is free and how much is needed."""
        free = self._free_bytes()
        return MachineError(
            "not enough space on the disk",
            place=str(min(free, key=lambda folder: free[folder])),
            found=", ".join(f"{megabytes(size)} free in {folder}" for folder, size in free.items()),
            allowed=f"about {megabytes(self._needed_bytes)} needed",
            hint="nothing was tagged; `docker builder prune` and `docker image prune` free space",
        )

    def _free_bytes(self) -> dict[Path, int]:
        """Return the free space at the engine's folder, where this machine can see it, and at the cache."""
        engine = Path(self._client.info()["DockerRootDir"])
        folders = [*([engine] if engine.is_dir() else []), cache_root()]
        return {folder: shutil.disk_usage(folder).free for folder in folders}
