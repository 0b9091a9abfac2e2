"""What this machine has, and whether code that was compiled for some GPU architectures runs on it."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError
from twinrun.machine.devices import discover
from twinrun.machine.memory import kernel_text
from twinrun.manifests.cluster import known_gpus
from twinrun.manifests.vendor import Gpu, Vendor, load_vendors, require_vendor
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
    own = processor(root)
    if vendor == own:
        return _machine(own, (), "none asked")
    results = []
    for candidate in [vendors[vendor]] if vendor else [one for one in vendors.values() if one.probe]:
        discovery = discover(candidate, gpus)
        results.append(f"{candidate.name}: {discovery}")
        if discovery.devices:
            return _machine(candidate.name, discovery.devices, str(discovery))
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
    """Return the vendor that a machine without GPUs has: the only one without a probe."""
    names = [vendor.name for vendor in load_vendors(root).values() if not vendor.probe]
    if len(names) != 1:
        place = str(root / "images" / "vendors")
        raise InputError("exactly one vendor must have no probe: the processor", place=place, found=names)
    return names[0]


def _machine(vendor: str, devices: tuple[Device, ...], probe: str) -> Machine:
    named = re.search(r"^model name\s*:\s*(.+)$", kernel_text(Path("/proc/cpuinfo")), re.MULTILINE)
    return Machine(
        vendor=vendor,
        devices=devices,
        driver=devices[0].driver if devices else None,
        host=platform.node(),
        cpu=named[1].strip() if named else platform.machine(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        probe=probe,
    )


def misfit(*, built: Sequence[str], machine: Machine, vendor: Vendor, gpus: dict[str, Gpu]) -> str | None:
    """Return which devices of `machine` cannot run code for the architectures `built`, or None.

    Code for no GPU runs anywhere. A device that neither a probe nor images/gpus.toml tells the
    architecture of is not held against it.
    """
    if not built or machine.vendor != vendor.name:
        return None
    found: dict[str, str] = {}
    for device in machine.devices:
        arch = _arch(device, gpus)
        if arch and not any(runs_on(one, arch, vendor) for one in built):
            found[arch] = device.name
    return ", ".join(f"{arch} ({name})" for arch, name in found.items()) or None


def architectures_needed(
    *, built: Sequence[str], machine: Machine, vendor: Vendor, gpus: dict[str, Gpu]
) -> tuple[str, ...]:
    """Return those of the architectures `built` that the devices of `machine` need, all if that is not known.

    A device whose own architecture is among them needs that one alone.
    """
    if machine.vendor != vendor.name or not machine.devices:
        return tuple(built)
    chosen: set[str] = set()
    for device in machine.devices:
        arch = _arch(device, gpus)
        fitting = [one for one in built if arch and runs_on(one, arch, vendor)]
        if not fitting:
            return tuple(built)
        chosen |= {arch} if arch in fitting else set(fitting)
    return tuple(one for one in built if one in chosen)


def _arch(device: Device, gpus: dict[str, Gpu]) -> str | None:
    return device.arch or (gpus[device.gpu].arch if device.gpu else None)


def refuse_misfit(*, image: str, built: Sequence[str], unfit: str | None) -> None:
    """Raise a MachineError when `misfit` found devices that the image is not built for."""
    if unfit:
        message, allowed = "the image is not built for this GPU", f"built for {', '.join(built)}"
        hint = "add the architecture to `archs` of the stack and build it, or use --engine venv"
        raise MachineError(message, place=image, found=unfit, allowed=allowed, hint=hint)


def runs_on(built: str, found: str, vendor: Vendor) -> bool:
    """Return whether code compiled for `built` runs on a device of architecture `found`."""
    device = next((version for _, version in _read(found, vendor)), None)
    return built == found or any(
        device is not None and _allows(rule, version, device) for rule, version in _read(built, vendor)
    )


def _read(arch: str, vendor: Vendor) -> list[tuple[str, tuple[int, int]]]:
    """Return the rules that hold for `arch`, each with the version it reads in the name."""
    matches = ((entry.rule, re.fullmatch(entry.built, arch)) for entry in vendor.runs_on)
    return [(rule, (int(match[1]), int(match[2]))) for rule, match in matches if match]


def _allows(rule: str, built: tuple[int, int], found: tuple[int, int]) -> bool:
    if rule == "same":
        return found == built
    return found >= built and (rule == "no-lower" or found[0] == built[0])
