"""Whether a vendor's devices are there and open to this user."""

from __future__ import annotations

import grp
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from twinrun.checks import Check
from twinrun.hardware import Device, Gpu, Search, Vendor
from twinrun.probe import matching


def check_devices(vendor: Vendor, result: Search, gpus: dict[str, Gpu]) -> Check:
    """Say which GPUs of `vendor` the probes name, or why none."""
    name, needed = f"GPUs ({vendor.name})", f"devices for --vendor {vendor.name}"
    if result.devices:
        strange = ", ".join(sorted({device.name for device in result.devices if device.gpu is None}))
        return Check(
            name=name,
            status="warn" if strange else "ok",
            found="; ".join([_inventory(result.devices, gpus), *result.hidings]),
            needed="models of images/gpus.toml",
            hint=f"no row, or more than one, fits {strange}: its peak is not known" if strange else None,
        )
    status, hint = (
        "unknown",
        "run the probe by hand; if it fails there too, `dmesg` shows the driver's messages",
    )
    if result.hidings:
        status, hint = "warn", "unset the variable, or let it name devices"
    elif all(attempt.understood for attempt in result.attempts) and not _own_files(vendor):
        status, hint = "warn", f"only needed for --vendor {vendor.name}"
    return Check.model_validate(
        {"name": name, "status": status, "found": f"none; {result}", "needed": needed, "hint": hint}
    )


def check_device_files(vendor: Vendor, result: Search) -> Iterable[Check]:
    """Say whether this user may open the device files; nothing if the driver is not loaded."""
    if not _own_files(vendor) and not result.devices:
        return
    name, needed = f"device files ({vendor.name})", "readable and writable: " + ", ".join(vendor.device_files)
    files = [path for pattern in vendor.device_files for path in matching(pattern)]
    missing = [pattern for pattern in vendor.device_files if not matching(pattern)]
    closed = [path for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if missing:
        yield Check(
            name=name,
            status="warn" if result.devices else "fail",
            found=f"missing: {', '.join(missing)}",
            needed=needed,
            hint="load the driver, or give the container the devices",
        )
    if closed:
        yield Check(name=name, status="fail", found=_owners(closed), needed=needed, hint=_join_groups(closed))
    if not missing and not closed:
        yield Check(name=name, status="ok", found=f"{len(files)} files open to this user", needed=needed)


def _own_files(vendor: Vendor) -> list[Path]:
    """Return the files only this vendor's driver makes; the others exist for any display adapter."""
    return matching(vendor.device_files[0]) if vendor.device_files else []


def _inventory(devices: tuple[Device, ...], gpus: dict[str, Gpu]) -> str:
    parts = []
    for (name, row), count in Counter((device.name, device.gpu) for device in devices).items():
        cards = f"{row}, {count / gpus[row].devices_per_card:g} cards" if row else "no row"
        parts.append(f"{count} x {name} ({cards})")
    return f"{', '.join(parts)}; driver {devices[0].driver or 'not told'}"


def _owners(files: list[Path]) -> str:
    told = ", ".join(f"{path} of group {path.stat().st_gid}" for path in files)
    own = ", ".join(map(str, sorted({os.getgid(), *os.getgroups()})))
    return f"closed to this user: {told}; the user's groups: {own}"


def _join_groups(files: list[Path]) -> str:
    groups = sorted({path.stat().st_gid for path in files})
    commands = [f"`sudo usermod -aG {_group_name(group)} $USER`" for group in groups]
    return f"{' and '.join(commands)}, then sign in again"


def _group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)
