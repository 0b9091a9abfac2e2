"""The inventory of this machine: its processor, its memory and the devices of one vendor."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError
from twinrun.machine.devices import discover
from twinrun.manifests.cluster import known_gpus
from twinrun.manifests.vendor import Vendor, load_vendors, require_vendor
from twinrun.protocol.allocation import Device, Machine


def detect(root: Path, *, vendor: str | None = None) -> Machine:
    """Describe this machine with its devices of `vendor`, or of the first vendor that it has devices of.

    Raises:
        InputError: no such vendor, or broken hardware data.
        MachineError: this machine has no device of `vendor`.
    """
    vendors, gpus = load_vendors(root), known_gpus(root)
    if vendor is not None:
        require_vendor(vendor, vendors)
    own = _processor(root, vendors)
    if vendor == own:
        return _machine(own, (), "none asked")
    results = []
    for candidate in [vendors[vendor]] if vendor else [one for one in vendors.values() if one.probe]:
        discovery = discover(candidate, gpus)
        if discovery.devices:
            return _machine(candidate.name, discovery.devices, str(discovery))
        results.append(f"{candidate.name}: {discovery}")
    if vendor:
        raise MachineError(
            "this machine has no such GPU, or none that this process may use",
            place=f"--vendor {vendor}",
            found="".join(results),
            allowed=vendors[vendor].title,
            hint="run `invoke doctor`; without --vendor the run takes what the machine has",
        )
    return _machine(own, (), " | ".join(results))


def processor(root: Path) -> str:
    """Return the vendor that every machine is, whatever GPUs it has."""
    return _processor(root, load_vendors(root))


def _processor(root: Path, vendors: dict[str, Vendor]) -> str:
    """Return the vendor that a machine without GPUs has: the only one without a probe."""
    names = [vendor.name for vendor in vendors.values() if not vendor.probe]
    if len(names) != 1:
        place = str(root / "images" / "vendors")
        raise InputError("exactly one vendor must have no probe: the processor", place=place, found=names)
    return names[0]


def _machine(vendor: str, devices: tuple[Device, ...], probe: str) -> Machine:
    return Machine(
        vendor=vendor,
        devices=devices,
        driver=devices[0].driver if devices else None,
        host=platform.node(),
        cpu=_cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        probe=probe,
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.machine()
