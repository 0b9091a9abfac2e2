"""Whether code that was compiled for some GPU architectures runs on the devices of a machine."""

from __future__ import annotations

import re
from collections.abc import Sequence

from twinrun.foundation.errors import MachineError
from twinrun.manifests.vendor import Gpu, Vendor
from twinrun.protocol.allocation import Device, Machine

Version = tuple[int, int]


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
        raise MachineError(
            "the image is not built for this GPU",
            place=image,
            found=unfit,
            allowed=f"built for {', '.join(built)}",
            hint="add the architecture to `archs` of the stack and build it, or use --engine venv",
        )


def runs_on(built: str, found: str, vendor: Vendor) -> bool:
    """Return whether code compiled for `built` runs on a device of architecture `found`."""
    device = next((version for _, version in _read(found, vendor)), None)
    return built == found or any(
        device is not None and _allows(rule, version, device) for rule, version in _read(built, vendor)
    )


def _read(arch: str, vendor: Vendor) -> list[tuple[str, Version]]:
    """Return the rules that hold for `arch`, each with the version it reads in the name."""
    matches = ((entry.rule, re.fullmatch(entry.built, arch)) for entry in vendor.runs_on)
    return [(rule, (int(match[1]), int(match[2]))) for rule, match in matches if match]


def _allows(rule: str, built: Version, found: Version) -> bool:
    if rule == "same":
        return found == built
    return found >= built and (rule == "no-lower" or found[0] == built[0])
