"""Checks of the machine: its devices, their files, and what runs need beside GPUs."""

from __future__ import annotations

import contextlib
import grp
import os
import shlex
import shutil
import socket
import stat
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from uv import find_uv_bin

from twinrun.foundation.errors import MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import GIB
from twinrun.machine import daemon
from twinrun.machine.devices import Discovery
from twinrun.machine.probes import matching_files
from twinrun.manifests.vendor import Gpu, Vendor
from twinrun.protocol.allocation import Device

# Two ranks that import the framework, and the file cache; an estimate, so that less is only a warning.
MEMORY_BYTES = 8 * GIB
# Collective libraries and data loaders exchange through it; container engines give 64 MiB unless told more.
SHARED_MEMORY_BYTES = 1 * GIB
SHARED_MEMORY = Path("/dev") / "shm"
UV_TIMEOUT_S = 10


class HostCheck(Frozen):
    """The result of one check."""

    name: str
    status: Literal["ok", "absent", "warn", "fail", "unknown"]
    """`absent` is needed only for what `needed` names; `unknown` means that the check could not be made."""
    found: str
    needed: str
    hint: str | None = None


def check_devices(vendor: Vendor, discovery: Discovery, gpus: dict[str, Gpu]) -> HostCheck:
    """Say which GPUs of `vendor` the probes name, or why none."""
    name, needed = f"GPUs ({vendor.name})", f"only for --vendor {vendor.name}"
    if discovery.devices:
        unknown = ", ".join(sorted({device.name for device in discovery.devices if device.gpu is None}))
        return HostCheck(
            name=name,
            status="warn" if unknown else "ok",
            found="; ".join([_summary(discovery.devices, gpus), *discovery.masks, *discovery.partitions]),
            needed="a row of images/gpus.toml for each model",
            hint=_hint_for(unknown, vendor, discovery) if unknown else None,
        )
    found = f"none; {discovery}"
    failed = {result.probe for result in discovery.probes if result.status in ("failed", "timeout")}
    if discovery.masks:
        hint = "unset the variable, or let it name devices"
        return HostCheck(name=name, status="warn", found=found, needed=needed, hint=hint)
    if failed:
        commands = [
            f"`{shlex.join(one.command)}`" for one in vendor.probe if one.name in failed and one.command
        ]
        hint = f"run {' and '.join(commands)} by hand; if it fails too, `dmesg` shows the driver's messages"
        return HostCheck(name=name, status="unknown", found=found, needed=needed, hint=hint)
    if _driver_files(vendor):
        hint = "install the vendor's tools beside its driver: the device files are there"
        return HostCheck(name=name, status="unknown", found=found, needed=needed, hint=hint)
    return HostCheck(name=name, status="absent", found="none", needed=needed)


def _hint_for(unknown: str, vendor: Vendor, discovery: Discovery) -> str:
    if discovery.partitions:
        return f"`{vendor.undivide}` makes whole cards; of a part no peak is known, nor how long a run takes"
    return f"add a row for {unknown}; without one its peak is not known, nor how long a run takes"


def check_device_files(vendor: Vendor, discovery: Discovery, *, grouped: bool = False) -> Iterable[HostCheck]:
    """Say whether this user may open the device files; nothing if the driver is not loaded.

    Args:
        grouped: ranks get the groups of the files that the vendor names, which the user need not have.
    """
    if not _driver_files(vendor) and not discovery.devices:
        return
    name, needed = f"device files ({vendor.name})", "readable and writable: " + ", ".join(vendor.device_files)
    patterns = vendor.device_files
    if not _found(patterns) and _found(vendor.other_device_files):
        patterns = vendor.other_device_files
    files = _found((*patterns, *vendor.later_device_files))
    missing = [pattern for pattern in patterns if not matching_files(pattern)]
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if grouped:
        given = [path for path in _found(vendor.container.groups_of) if path.stat().st_mode & 0o060 == 0o060]
        closed = [path for path in closed if path not in given]
    if missing:
        yield HostCheck(
            name=name,
            status="fail",
            found=f"missing: {', '.join(missing)}",
            needed=needed,
            hint="load the driver; in a container, start it with the devices: "
            + (" ".join(f"--device={one}" for one in vendor.container.devices) or "--gpus all"),
        )
    if closed:
        hint = f"{' and '.join(_remedies(closed))}, then sign in again"
        yield HostCheck(name=name, status="fail", found=_owners(closed), needed=needed, hint=hint)
    if not missing and not closed:
        yield HostCheck(name=name, status="ok", found=f"{len(files)} files open to this user", needed=needed)


def demand_device_files(vendor: Vendor, devices: tuple[Device, ...], *, grouped: bool) -> None:
    """Raise MachineError, with what `invoke doctor` advises, where ranks of this user may not open the GPUs.

    Probes see a GPU through the driver's own files, where a run needs those that it computes through.
    """
    found = Discovery(devices=devices, probes=())
    for check in check_device_files(vendor, found, grouped=grouped) if devices else ():
        if check.status == "fail":
            raise MachineError(
                "this user cannot compute on the GPUs",
                place=check.name,
                found=check.found,
                allowed=check.needed,
                hint=check.hint,
            )


def _found(patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in matching_files(pattern)]


def _driver_files(vendor: Vendor) -> list[Path]:
    """Return the files only this vendor's driver makes; the others exist for any display adapter."""
    return matching_files(vendor.device_files[0]) if vendor.device_files else []


def _summary(devices: tuple[Device, ...], gpus: dict[str, Gpu]) -> str:
    parts = []
    for (name, row), count in Counter((device.name, device.gpu) for device in devices).items():
        cards = f"{row}, {count / gpus[row].devices_per_card:g} cards" if row else "no row"
        parts.append(f"{count} x {name} ({cards})")
    return f"{', '.join(parts)}; driver {devices[0].driver or 'unknown'}"


def _owners(files: list[Path]) -> str:
    groups = ", ".join(f"{path} of group {path.stat().st_gid}" for path in files)
    own = ", ".join(map(str, sorted({os.getgid(), *os.getgroups()})))
    return f"closed to this user: {groups}; the user's groups: {own}"


def _remedies(files: list[Path]) -> Iterator[str]:
    """Return the commands that open `files` to this user."""
    shut = [path for path in files if path.stat().st_mode & (stat.S_IRGRP | stat.S_IWGRP) != 0o060]
    if shut:
        yield f"`sudo chmod g+rw {shlex.join(map(str, shut))}`"
    for number in sorted({path.stat().st_gid for path in files} - {os.getgid(), *os.getgroups()}):
        try:
            name = grp.getgrgid(number).gr_name
        except KeyError:
            # usermod takes only groups that the system knows; in a container those of the host are not.
            name = f"gpu{number}"
            yield f"`sudo groupadd -g {number} {name}`"
        yield f"`sudo usermod -aG {name} $USER`"


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
        found, needed = f"{existing} cannot be written", f"a folder with {needed_bytes / GIB:.3g} GiB free"
        return HostCheck(name=name, status="fail", found=found, needed=needed, hint=remedy)
    free = _size(name, shutil.disk_usage(existing).free, needed_bytes, f"free some space, or {remedy}")
    return free.model_copy(update={"found": f"{free.found} free in {folder}"})


def _size(name: str, found: int, needed: int, hint: str) -> HostCheck:
    enough = found >= needed
    return HostCheck(
        name=name,
        status="ok" if enough else "warn",
        found=f"{found / GIB:.1f} GiB",
        needed=f"{needed / GIB:.3g} GiB",
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
            removed = daemon.remove_abandoned(client)
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
