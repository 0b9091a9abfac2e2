"""The disk that an offload writes to, as both the host and the ranks look at it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError

# Master weights and the two moments of Adam.
BYTES_PER_PARAMETER = 12


@dataclass(frozen=True, kw_only=True)
class StorageNeed:
    """A folder that takes the optimizer state of so many parameters."""

    folder: str
    parameters: int


def check_storage(folder: str, *, parameters: int, place: str) -> None:
    """Refuse a folder that does not take the optimizer state of so many parameters.

    Raises:
        InputError: it is no place to write to; names the setting at `place`.
        MachineError: the disk is too small.
    """
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK):
        raise InputError(
            "no folder that can be written",
            place=place,
            found=folder,
            allowed="a folder on a disk of the machine that trains",
        )
    free, needed = shutil.disk_usage(folder).free, BYTES_PER_PARAMETER * parameters
    if free < needed:
        raise MachineError(
            "the disk is too small for what is offloaded",
            place=folder,
            found=f"{free / 1e9:.1f} GB free",
            allowed=f"{needed / 1e9:.1f} GB or more: {BYTES_PER_PARAMETER} bytes for each parameter",
        )
