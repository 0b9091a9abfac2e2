"""Whether the host has what runs need beside GPUs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

from uv import find_uv_bin

from twinrun.foundation.errors import MachineError
from twinrun.machine import daemon
from twinrun.machine.abandoned import remove_abandoned
from twinrun.machine.checks import GIB, HostCheck

# Two ranks that import the framework, and the file cache; an estimate, so that less is only a warning.
MEMORY_BYTES = 8 * GIB
# Collective libraries and data loaders exchange through it; container engines give 64 MiB unless told more.
SHARED_MEMORY_BYTES = 1 * GIB
SHARED_MEMORY = Path("/dev") / "shm"
UV_TIMEOUT_S = 10


def check_memory() -> HostCheck:
    """Compare the host's memory with what a smoke run needs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _size("memory", memory, MEMORY_BYTES, "use --scale smoke, or a machine with more memory")


def check_shared_memory() -> HostCheck:
    """Compare the size of the shared-memory file system with what ranks exchange through it."""
    hint = f"start the container with --shm-size=8g, or `sudo mount -o remount,size=8g {SHARED_MEMORY}`"
    return _size("shared memory", shutil.disk_usage(SHARED_MEMORY).total, SHARED_MEMORY_BYTES, hint)


def check_disk(name: str, folder: Path, needed_bytes: int, remedy: str) -> HostCheck:
    """Say whether `folder` can be written and has room; it need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found, needed = f"{existing} cannot be written", f"a folder with {needed_bytes / GIB:g} GiB free"
        return HostCheck(name=name, status="fail", found=found, needed=needed, hint=remedy)
    free = _size(name, shutil.disk_usage(existing).free, needed_bytes, f"free some space, or {remedy}")
    return free.model_copy(update={"found": f"{free.found} free in {folder}"})


def _size(name: str, found: int, needed: int, hint: str) -> HostCheck:
    enough = found >= needed
    return HostCheck(
        name=name,
        status="ok" if enough else "warn",
        found=f"{found / GIB:.1f} GiB",
        needed=f"{needed / GIB:g} GiB",
        hint=None if enough else hint,
    )


def check_docker() -> HostCheck:
    """Ask the container engine for its version."""
    name, needed = "docker", "only for --engine docker and `invoke build`"
    if not daemon.expected():
        found = f"no container engine at {daemon.SOCKET}"
        return HostCheck(name=name, status="absent", found=found, needed=needed)
    engine = os.environ.get("DOCKER_HOST") or f"unix://{daemon.SOCKET}"
    try:
        _connect(engine)
        with contextlib.closing(daemon.connect()) as client:
            version = client.version()["Version"]
            removed = remove_abandoned(client)
    except (MachineError, OSError) as error:
        cause = error.found if isinstance(error, MachineError) else error.strerror or error
        found = f"{engine}: {cause}"
        hint = "start the engine, point DOCKER_HOST at it, join its socket's group, or use --engine venv"
        return HostCheck(name=name, status="warn", found=found, needed=needed, hint=hint)
    cleared = f"; removed what a killed run had left: {', '.join(removed)}" if removed else ""
    return HostCheck(name=name, status="ok", found=f"engine {version}{cleared}", needed=needed)


def _connect(engine: str) -> None:
    """Raise the system's own error when a local engine cannot be reached; its SDK wraps it in others."""
    if engine.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as attempt:
            attempt.settimeout(daemon.ANSWER_SECONDS)
            attempt.connect(engine.removeprefix("unix://"))


def check_uv() -> HostCheck:
    """Ask uv for its version."""
    name, needed = "uv", "for --engine venv and `invoke lock`"
    command = [os.fspath(find_uv_bin()), "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=UV_TIMEOUT_S)
    return HostCheck(name=name, status="ok", found=answer.stdout.strip(), needed=needed)
