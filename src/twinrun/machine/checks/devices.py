"""Whether a vendor's devices are there and open to this user."""

from __future__ import annotations

import grp
import os
import shlex
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from twinrun.machine.checks import HostCheck
from twinrun.machine.devices import Device, Discovery
from twinrun.machine.probing import matching_files
from twinrun.manifests.vendor import Gpu, Vendor


def check_devices(vendor: Vendor, discovery: Discovery, gpus: dict[str, Gpu]) -> HostCheck:
    """Say which GPUs of `vendor` the probes name, or why none."""
    name, needed = f"GPUs ({vendor.name})", f"only for --vendor {vendor.name}"
    if discovery.devices:
        unknown = ", ".join(sorted({device.name for device in discovery.devices if device.gpu is None}))
        return HostCheck(
            name=name,
            status="warn" if unknown else "ok",
            found="; ".join([_summary(discovery.devices, gpus), *discovery.masks]),
            needed="a row of images/gpus.toml for each model",
            hint=f"add a row for {unknown}; without one its peak is not known" if unknown else None,
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


def check_device_files(vendor: Vendor, discovery: Discovery) -> Iterable[HostCheck]:
    """Say whether this user may open the device files; nothing if the driver is not loaded."""
    if not _driver_files(vendor) and not discovery.devices:
        return
    name, needed = f"device files ({vendor.name})", "readable and writable: " + ", ".join(vendor.device_files)
    files = [path for pattern in vendor.device_files for path in matching_files(pattern)]
    missing = [pattern for pattern in vendor.device_files if not matching_files(pattern)]
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if missing:
        yield HostCheck(
            name=name,
            status="warn" if discovery.devices else "fail",
            found=f"missing: {', '.join(missing)}",
            needed=needed,
            hint="load the driver, or give the container the devices",
        )
    if closed:
        hint = f"{' and '.join(_remedies(closed))}, then sign in again"
        yield HostCheck(name=name, status="fail", found=_owners(closed), needed=needed, hint=hint)
    if not missing and not closed:
        yield HostCheck(name=name, status="ok", found=f"{len(files)} files open to this user", needed=needed)


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
