"""What stands in the way of operations that are compiled when first used, and of disks that they use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError
from twinrun.protocol.training import TrainingJob

# Where PyTorch compiles extensions, and the file that it waits for.
VARIABLE, LOCK = "TORCH_EXTENSIONS_DIR", "lock"
# Master weights and the two moments of Adam, on this rank's part.
BYTES_PER_PARAMETER = 12


def check(job: TrainingJob) -> None:
    """Refuse what would hang or fail long after the start; only what writes to a disk compiles anything.

    Raises:
        MachineError: a compilation that was killed left its lock, or the disk is too small.
        InputError: the folder is no place to write to.
    """
    if job.layout is None or job.layout.storage is None:
        return
    check_locks(extensions_folder())
    _check_folder(Path(job.layout.storage), needed=BYTES_PER_PARAMETER * job.shape.parameters())


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


def _check_folder(folder: Path, *, needed: int) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            "no folder that can be written",
            place="layouts: storage",
            found=str(folder),
            allowed="a folder on a disk of this machine",
        )
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            "the disk is too small for what is offloaded",
            place=str(folder),
            found=f"{free / 1e9:.1f} GB free",
            allowed=f"{needed / 1e9:.1f} GB or more: {BYTES_PER_PARAMETER} bytes for each parameter",
        )
