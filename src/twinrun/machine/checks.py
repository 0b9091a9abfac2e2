"""Checks of the machine: its devices, their files, what their vendor advises, and what else runs need."""

from __future__ import annotations

import contextlib
import grp
import os
import re
import shlex
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from packaging.version import Version

from twinrun.foundation.errors import MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import GIB
from twinrun.machine import daemon
from twinrun.machine.devices import Discovery, matching_files
from twinrun.manifests.vendor import Advice, Gpu, Vendor
from twinrun.protocol.allocation import Device

# Two ranks that import the framework, and the file cache; an estimate, so that less is only a warning.
MEMORY_BYTES = 8 * GIB
# Collective libraries and data loaders exchange through it; container engines give 64 MiB unless told more.
SHARED_MEMORY_BYTES = 1 * GIB
SHARED_MEMORY = Path("/dev") / "shm"
_VERSION = re.compile(r"[0-9]+(?:\.[0-9]+)+")


class HostCheck(Frozen):
    """The result of one check."""

    name: str
    status: Literal["ok", "absent", "warn", "fail", "unknown"]
    """`absent` is needed only for what `needed` names; `unknown` means that the check could not be made."""
    found: str
    needed: str
    hint: str | None = None


def check_devices(vendor: Vendor, discovery: Discovery, gpus: dict[str, Gpu]) -> HostCheck:
    """Say which GPUs of `vendor` its driver names, or why none."""
    status: Literal["ok", "absent", "warn", "unknown"] = "absent"
    found, needed, hint = f"none; {discovery}", f"only for --vendor {vendor.name}", None
    if discovery.devices:
        needed = "a row of images/gpus.toml for each model"
        unknown = ", ".join(sorted({device.name for device in discovery.devices if device.gpu is None}))
        found = "; ".join([_summary(discovery.devices, gpus), *discovery.masks, *discovery.partitions])
        status, hint = "warn" if unknown else "ok", None
        if unknown and discovery.partitions:
            hint = f"`{vendor.undivide}` makes whole cards; the peak of a part is not known"
        elif unknown:
            hint = f"add a row for {unknown}; without one its peak is not known, nor how long a run takes"
    elif discovery.masks:
        status, hint = "warn", "unset the variable, or let it name devices"
    elif discovery.status == "failed":
        status, hint = "unknown", "`dmesg` shows the driver's messages"
    elif _driver_files(vendor):
        status, hint = "unknown", "install the vendor's libraries; the device files are there"
    else:
        found = "none"
    return HostCheck(name=f"GPUs ({vendor.name})", status=status, found=found, needed=needed, hint=hint)


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
    status: Literal["ok", "fail"] = "fail" if missing or closed else "ok"
    found, hint = f"{len(files)} files open to this user", None
    if missing:
        options = " ".join(f"--device={one}" for one in vendor.container.devices) or "--gpus all"
        hint = f"load the driver; in a container, start it with the devices: {options}"
        found = f"missing: {', '.join(missing)}"
    elif closed:
        found, hint = _owners(closed), f"{' and '.join(_remedies(closed))}, then sign in again"
    yield HostCheck(name=name, status=status, found=found, needed=needed, hint=hint)


def demand_device_files(vendor: Vendor, devices: tuple[Device, ...], *, grouped: bool) -> None:
    """Raise MachineError, with what `invoke doctor` advises, where ranks of this user may not open the GPUs.

    Probes see a GPU through the driver's own files, where a run needs those that it computes through.
    """
    for check in check_device_files(vendor, Discovery(devices=devices), grouped=grouped) if devices else ():
        if check.status == "fail":
            message, found, allowed = "this user cannot compute on the GPUs", check.found, check.needed
            raise MachineError(message, place=check.name, found=found, allowed=allowed, hint=check.hint)


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
    hint = f"start the container with --shm-size=8g, or `sudo mount -o remount,rw,size=8g {SHARED_MEMORY}`"
    check = _size("shared memory", shutil.disk_usage(SHARED_MEMORY).total, SHARED_MEMORY_BYTES, hint)
    if os.access(SHARED_MEMORY, os.W_OK):
        return check
    return check.model_copy(update={"status": "fail", "found": f"{check.found}, read-only", "hint": hint})


def check_disk(name: str, folder: Path, needed_bytes: int, remedy: str) -> HostCheck:
    """Say whether `folder` can be written and has room; it need not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        found, needed = f"{existing} cannot be written", f"a folder with {needed_bytes / GIB:.3g} GiB free"
        return HostCheck(name=name, status="fail", found=found, needed=needed, hint=remedy)
    free = _size(name, shutil.disk_usage(existing).free, needed_bytes, f"free some space, or {remedy}")
    return free.model_copy(update={"found": f"{free.found} free in {folder}"})


def _size(name: str, found: int, needed: int, hint: str) -> HostCheck:
    sizes = {"found": f"{found / GIB:.1f} GiB", "needed": f"{needed / GIB:.3g} GiB"}
    if found < needed:
        return HostCheck(name=name, status="warn", hint=hint, **sizes)
    return HostCheck(name=name, status="ok", **sizes)


def check_docker() -> HostCheck:
    """Ask the container engine for its version."""
    name, needed = "docker", "only for --engine docker and `invoke build`"
    # Importing the engine's SDK takes longer than a whole plan.
    if not os.environ.get("DOCKER_HOST") and not Path(daemon.SOCKET).exists():
        found = f"no container engine at {daemon.SOCKET}"
        return HostCheck(name=name, status="absent", found=found, needed=needed)
    try:
        with contextlib.closing(daemon.connect()) as client:
            version = client.version()["Version"]
    except (MachineError, OSError) as error:
        found = f"{daemon.place()}: {error.found if isinstance(error, MachineError) else error}"
        hint = "start the engine, point DOCKER_HOST at it, join its socket's group, or use --engine venv"
        return HostCheck(name=name, status="warn", found=found, needed=needed, hint=hint)
    return HostCheck(name=name, status="ok", found=f"engine {version}", needed=needed)


def check_advice(vendor: Vendor, discovery: Discovery, stacks: Iterable[str]) -> Iterator[HostCheck]:
    """Hold the machine against what the vendor advises; where its driver has made no files nothing is said.

    Args:
        stacks: names of the vendor's stacks.
    """
    if discovery.devices and any(matching_files(pattern) for pattern in vendor.device_files):
        yield from _driver(vendor, discovery.devices[0].driver or "", stacks)
        for advice in vendor.advice:
            if any(advice.gpus.search(device.gpu or "") for device in discovery.devices):
                yield from _setting(advice)


def _driver(vendor: Vendor, driver: str, stacks: Iterable[str]) -> Iterator[HostCheck]:
    needs = [(name, need) for name in stacks for need in vendor.driver if need.stacks.fullmatch(name)]
    # A driver of the kernel itself has the kernel's number, which says nothing here.
    if needs and _VERSION.fullmatch(driver):
        old = [(name, need) for name, need in needs if Version(driver) < Version(need.least)]
        told = ", ".join(f"{name} needs {need.least}" for name, need in old)
        yield HostCheck(
            name=f"driver ({vendor.name})",
            status="warn" if old else "ok",
            found=f"{driver}: {told}" if old else driver,
            needed="as new as the stacks that are run need",
            hint=old[0][1].source if old else None,
        )


def _setting(advice: Advice) -> Iterator[HostCheck]:
    if advice.file:
        if not Path(advice.file).is_file():
            return
        value = Path(advice.file).read_text(encoding="utf-8", errors="replace").strip()
    else:
        value = os.environ.get(str(advice.variable), "")
    fine = advice.wanted.search(value) is not None
    wrong: Literal["warn", "absent"] = "warn" if advice.file else "absent"
    hint = f"{advice.hint}; {advice.changes} ({advice.source})"
    yield HostCheck(
        name=advice.name,
        status="ok" if fine else wrong,
        found=value[:80] or "not set",
        needed=advice.hint if advice.variable else advice.wanted.pattern,
        hint=None if fine else hint,
    )
