"""Programs and kernel files that name a machine's GPUs; which ones, the vendors' manifests say."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from twinrun.errors import MachineError
from twinrun.manifest import Frozen

Spellings = tuple[str, ...]

FOLDER_MARK = "== "
"""Starts the line that names the folder of the properties after it."""


class HangError(MachineError):
    """A probe's program hangs."""


class Fields(Frozen):
    """Where a probe's answer holds each fact: spellings in order, dots between nested keys."""

    name: Spellings = ("name",)
    memory: Spellings = ("memory",)
    arch: Spellings = ("arch",)
    driver: Spellings = ("driver",)
    unique_id: Spellings = ("unique_id",)
    compute_units: Spellings = ("compute_units",)


class Probe(Frozen):
    """One way to ask a machine for a vendor's devices."""

    name: str
    format: Literal["csv", "json", "properties"]
    """`properties`: files of `key value` lines, one folder for each device."""
    command: tuple[str, ...] = ()
    timeout_s: Annotated[float, Field(gt=0)] = 30
    columns: tuple[str, ...] = ()
    """csv: what the columns hold, by the names of `fields`."""
    devices: re.Pattern[str] = re.compile(".*")
    """json: expression of the top-level keys that hold devices; of a list all entries are."""
    folders: str | None = None
    """properties: shell pattern of the device folders."""
    parts: tuple[str, ...] = ()
    """properties: files to read in each folder."""
    where: dict[str, re.Pattern[str]] = Field(default_factory=dict)
    """What a row must match to be a device."""
    fields: Fields = Fields()
    memory_unit: Annotated[int, Field(gt=0)] = 1
    """Bytes in one unit of memory."""
    compute_unit_parts: Annotated[int, Field(gt=0)] = 1
    """How many of what is counted make a compute unit."""

    @model_validator(mode="after")
    def _complete(self) -> Probe:
        needed = {"csv": ("command", "columns"), "json": ("command",), "properties": ("folders", "parts")}
        missing = [key for key in needed[self.format] if not getattr(self, key)]
        if missing:
            raise ValueError(
                f"probe `{self.name}` of format `{self.format}` also needs: {', '.join(missing)}"
            )
        return self

    def available(self) -> bool:
        """Return whether this machine has what the probe asks."""
        if self.folders is not None:
            return bool(matching(self.folders))
        return shutil.which(self.command[0]) is not None


class Probed(Frozen):
    """A device as a probe tells it; what the probe does not tell is null."""

    name: str
    memory_bytes: int | None
    arch: str | None
    driver: str | None
    unique_id: str | None
    compute_units: int | None


def matching(pattern: str) -> list[Path]:
    """Return the files that the absolute shell `pattern` finds, 2 before 10."""
    return sorted(Path("/").glob(pattern.lstrip("/")), key=lambda path: (len(path.name), path.name))


def ask(probe: Probe) -> str:
    """Return what this machine answers to `probe`.

    Raises:
        MachineError: the program cannot be started, failed, or hangs (HangError).
    """
    return _run(probe) if probe.folders is None else _read_folders(probe.folders, probe.parts)


def _read_folders(pattern: str, parts: tuple[str, ...]) -> str:
    sections = []
    for folder in matching(pattern):
        sections.append(f"{FOLDER_MARK}{folder}\n")
        for part in parts:
            # Devices that a container or job may not use are listed, but refuse to be read.
            with contextlib.suppress(OSError):
                sections.append((folder / part).read_text(encoding="utf-8", errors="replace") + "\n")
    return "".join(sections)


def _run(probe: Probe) -> str:
    """Return what the probe's program prints; after its timeout it is ended with all its children."""
    try:
        process = subprocess.Popen(
            probe.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(f"cannot be started: {error.strerror}", place=probe.name) from None
    try:
        out, err = process.communicate(timeout=probe.timeout_s)
    except subprocess.TimeoutExpired:
        raise HangError(f"no answer within {probe.timeout_s:g} s", place=probe.name) from None
    finally:
        # Not poll(): the program may be gone and a child of it still hold the pipes.
        if process.returncode is None:
            _end(process)
    if process.returncode:
        message = (err.strip() or out.strip() or "(no message)").splitlines()[0]
        raise MachineError(f"exit status {process.returncode}", place=probe.name, found=message)
    return out


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process stuck inside the driver survives the kill: it is left behind rather than waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1)
