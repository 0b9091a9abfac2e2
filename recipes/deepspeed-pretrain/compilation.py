"""What stands in the way of operations that are compiled when first used, and of disks that they use."""

from __future__ import annotations

import os
from pathlib import Path

from twinrun.foundation.errors import MachineError
from twinrun.protocol.layout import check_storage
from twinrun.protocol.training import TrainingJob

# Where PyTorch compiles extensions, and the file that it waits for.
VARIABLE, LOCK = "TORCH_EXTENSIONS_DIR", "lock"


def check(job: TrainingJob) -> None:
    """Refuse what would hang or fail long after the start; only what writes to a disk compiles anything.

    Raises:
        MachineError: a compilation that was killed left its lock, or the disk is too small.
        InputError: the folder is no place to write to.
    """
    if job.layout is None or job.layout.storage is None:
        return
    check_locks(extensions_folder())
    check_storage(job.layout.storage, parameters=job.shape.parameters(), place=f"layouts.{job.point}.storage")


def extensions_folder() -> Path:
    """Return the folder that extensions are compiled in."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(VARIABLE) or cache / "torch_extensions")


def check_locks(folder: Path) -> None:
    """Name the first lock below `folder`: whoever compiles there waits until it is gone."""
    lock = next(iter(sorted(folder.rglob(LOCK))), None)
    if lock is not None:
        raise MachineError(
            "a compilation is under way, or was killed and left its lock: ranks would wait for it for ever",
            place=str(lock),
            hint="remove this file if nothing compiles",
        )
