"""A probe's output: what its program prints, or what its kernel files hold."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from twinrun.foundation.errors import MachineError
from twinrun.manifests.vendor import Probe

FOLDER_MARK = "== "
"""Starts the line that names the folder of the properties after it."""


class ProbeTimeoutError(MachineError):
    """A probe's program did not end in time."""


def available(probe: Probe) -> bool:
    """Return whether this machine has the program or the files of `probe`."""
    if probe.folders is not None:
        return bool(matching_files(probe.folders))
    return shutil.which(probe.command[0]) is not None


def run_probe(probe: Probe) -> str:
    """Return the output of `probe` on this machine.

    Raises:
        MachineError: the program cannot be started, failed, or ran too long (ProbeTimeoutError).
    """
    return _run(probe) if probe.folders is None else _read_folders(probe.folders, probe.parts)


def matching_files(pattern: str) -> list[Path]:
    """Return the files that the absolute shell `pattern` finds, 2 before 10."""
    return sorted(Path("/").glob(pattern.lstrip("/")), key=lambda path: (len(path.name), path.name))


def _read_folders(pattern: str, parts: tuple[str, ...]) -> str:
    sections = []
    for folder in matching_files(pattern):
        sections.append(f"{FOLDER_MARK}{folder}\n")
        for part in parts:
            # Devices that a container or job may not use are listed, but refuse to be read.
            with contextlib.suppress(OSError):
                sections.append((folder / part).read_text(encoding="utf-8", errors="replace") + "\n")
    return "".join(sections)


def _run(probe: Probe) -> str:
    """Return what the probe's program prints; after its timeout it is killed with all its children."""
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
        raise ProbeTimeoutError(f"no answer within {probe.timeout_s:g} s", place=probe.name) from None
    finally:
        # Not poll(): the program may be gone and a child of it still hold the pipes.
        if process.returncode is None:
            _kill(process)
    if process.returncode:
        message = (err.strip() or out.strip() or "(no message)").splitlines()[0]
        raise MachineError(f"exit status {process.returncode}", place=probe.name, found=message)
    return out


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process stuck inside the driver survives the kill: it is left behind rather than waited for.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=1)
