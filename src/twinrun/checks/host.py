"""Whether the host has what runs need beside GPUs."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from twinrun.cache import environment_folder
from twinrun.checks import GIB, Check
from twinrun.errors import InputError
from twinrun.stack import load_stack

MINIMUM_PYTHON = (3, 11)
# Two ranks that import the framework, and the file cache; an estimate, so that less is only a warning.
MEMORY_BYTES = 8 * GIB
# Collective libraries and data loaders exchange through it; container engines give 64 MiB unless told more.
SHARED_MEMORY_BYTES = 1 * GIB
SHARED_MEMORY = Path("/dev") / "shm"
ENGINE = "unix:///var/run/docker.sock"
DOCKER_TIMEOUT_S = 3
UV_TIMEOUT_S = 10


def check_interpreter() -> Check:
    """Compare the running interpreter with the oldest supported."""
    needed = ".".join(map(str, MINIMUM_PYTHON))
    good = sys.version_info[:2] >= MINIMUM_PYTHON
    return Check(
        name="interpreter",
        status="ok" if good else "fail",
        found=f"{platform.python_implementation()} {platform.python_version()}",
        needed=f"{needed} or newer",
        hint=None if good else f"install Python {needed} or newer and run twinrun with it",
    )


def check_memory() -> Check:
    """Compare the host's memory with what a smoke run needs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _size("memory", memory, MEMORY_BYTES, "lower the microbatch with --set microbatch=1")


def check_shared_memory() -> Check:
    """Compare the size of the shared-memory file system with what ranks exchange through it."""
    hint = "start the container with --shm-size=8g, or remount /dev/shm larger"
    return _size("shared memory", shutil.disk_usage(SHARED_MEMORY).total, SHARED_MEMORY_BYTES, hint)


def check_disk(name: str, folder: Path, needed_bytes: int, remedy: str) -> Check:
    """Say whether `folder` can be written and has room; it need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    needed = f"{needed_bytes / GIB:g} GiB free in {folder}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found = f"{existing} cannot be written"
        return Check(name=name, status="fail", found=found, needed=needed, hint=remedy)
    free = _size(name, shutil.disk_usage(existing).free, needed_bytes, f"free some space, or {remedy}")
    return free.model_copy(update={"found": f"{free.found} free", "needed": needed})


def _size(name: str, found: int, needed: int, hint: str) -> Check:
    return Check(
        name=name,
        status="ok" if found >= needed else "warn",
        found=f"{found / GIB:.1f} GiB",
        needed=f"{needed / GIB:g} GiB",
        hint=None if found >= needed else hint,
    )


def check_docker() -> Check:
    """Ask the container engine for its version."""
    name, needed = "docker", "a reachable engine, for --engine docker"
    try:
        _connect(os.environ.get("DOCKER_HOST") or ENGINE)
        # Imported here because it takes longer than all other checks together.
        docker = importlib.import_module("docker")
    except OSError as error:
        return _no_engine(name, needed, error)
    except ImportError:
        found, hint = "the docker package is not installed", "`pip install docker`"
        return Check(name=name, status="unknown", found=found, needed=needed, hint=hint)
    try:
        client = docker.from_env(timeout=DOCKER_TIMEOUT_S)
        try:
            version = client.version()["Version"]
        finally:
            client.close()
    except docker.errors.DockerException as error:
        return _no_engine(name, needed, error)
    return Check(name=name, status="ok", found=f"engine {version}", needed=needed)


def _connect(engine: str) -> None:
    """Raise an OSError that says why a local engine cannot be reached; the package hides it."""
    if engine.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as attempt:
            attempt.settimeout(DOCKER_TIMEOUT_S)
            attempt.connect(engine.removeprefix("unix://"))


def _no_engine(name: str, needed: str, error: Exception) -> Check:
    hint = "start the engine, point DOCKER_HOST at it, join its socket's group, or use --engine venv"
    return Check(name=name, status="warn", found=f"not reachable: {error}", needed=needed, hint=hint)


def check_uv() -> Check:
    """Look for uv beside the interpreter, then on the PATH."""
    name, needed = "uv", "for --engine venv and `invoke lock`"
    beside = Path(sys.executable).with_name("uv")
    program = str(beside) if beside.is_file() else shutil.which("uv")
    if program is None:
        return Check(name=name, status="warn", found="not installed", needed=needed, hint="`pip install uv`")
    command = [program, "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=UV_TIMEOUT_S)
    return Check(name=name, status="ok", found=answer.stdout.strip(), needed=needed)


def check_environment(root: Path, stack: str) -> Check:
    """Say whether the virtual environment of the stack's current lock stands in the cache."""
    name, needed = f"environment ({stack})", "made from the current lock"
    try:
        folder = environment_folder(stack, load_stack(root, stack).requirements_sha256(root))
    except InputError as error:
        found = f"{error.place}: {error.message}"
        return Check(name=name, status="fail", found=found, needed=needed, hint=error.hint)
    if folder.is_dir():
        return Check(name=name, status="ok", found=str(folder), needed=needed)
    older = ", ".join(sorted(path.name for path in folder.parent.glob(f"{stack}-*")))
    return Check(
        name=name,
        status="warn",
        found=f"only of other locks: {older}" if older else "not made yet",
        needed=needed,
        hint=f"the first `invoke run RECIPE --stack {stack} --engine venv` makes it",
    )
