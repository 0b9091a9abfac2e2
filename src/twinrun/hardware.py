"""What this machine is: its processor, and the devices of one vendor."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from twinrun.devices import Device, Search, search
from twinrun.errors import InputError, MachineError, closest
from twinrun.manifest import Frozen
from twinrun.vendor import Gpu, Vendor, load_gpus, load_vendors

__all__ = ["Device", "Gpu", "Machine", "Search", "Vendor", "detect", "load_gpus", "load_vendors", "search"]


class Machine(Frozen):
    """One host, and the devices of one vendor on it."""

    vendor: str
    devices: tuple[Device, ...]
    driver: str | None
    host: str
    cpu: str
    cpu_count: int
    """Processors this process may run on."""
    memory_bytes: int
    kernel: str
    probe: str
    """Which probes were tried and what they answered."""


def detect(root: Path, *, vendor: str | None = None) -> Machine:
    """Describe this machine for `vendor`, or for the first vendor it has devices of.

    Raises:
        InputError: no such vendor, or broken hardware data.
        MachineError: this machine has no device of `vendor`.
    """
    vendors, gpus = load_vendors(root), load_gpus(root)
    tried = []
    for candidate in _candidates(vendors, vendor):
        result = search(candidate, gpus)
        if result.devices:
            return _machine(candidate, result.devices, str(result))
        tried.append(f"{candidate.name}: {result}" if candidate.probe else "none asked")
    told = " | ".join(tried)
    if vendor and vendors[vendor].probe:
        raise MachineError(
            "this machine has no such GPU, or none that this process may use",
            place=f"--vendor {vendor}",
            found=told,
            allowed=vendors[vendor].title,
            hint="run `invoke doctor`; without --vendor the run takes what the machine has",
        )
    return _machine(_without_probes(root, vendors), (), told)


def _candidates(vendors: dict[str, Vendor], name: str | None) -> list[Vendor]:
    if name is None:
        return [vendor for vendor in vendors.values() if vendor.probe]
    if name not in vendors:
        raise InputError(
            "unknown vendor",
            place="--vendor",
            found=name,
            allowed=list(vendors),
            hint=closest(name, vendors),
        )
    return [vendors[name]]


def _without_probes(root: Path, vendors: dict[str, Vendor]) -> Vendor:
    plain = [vendor for vendor in vendors.values() if not vendor.probe]
    if len(plain) != 1:
        raise InputError(
            "exactly one vendor must have no probe: the processor itself",
            place=str(root / "images" / "vendors"),
            found=[vendor.name for vendor in plain],
        )
    return plain[0]


def _machine(vendor: Vendor, devices: tuple[Device, ...], probe: str) -> Machine:
    return Machine(
        vendor=vendor.name,
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
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()
