"""Discovery of a vendor's devices on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from twinrun.foundation.errors import MachineError
from twinrun.foundation.manifest import Frozen
from twinrun.machine.probes import ProbedDevice, ProbeTimeoutError, available, parse_output, run_probe
from twinrun.manifests.vendor import Gpu, Probe, Vendor
from twinrun.protocol.allocation import Device

# Probed over nominal memory: 1.006 (48 GB less error correction) to 1.074 (a GB taken as 2^30 bytes).
MEMORY_RATIO = (0.97, 1.09)
# Parts that a card of either vendor can be divided into.
_PARTS = range(2, 9)


class ProbeResult(Frozen):
    """The result of one probe."""

    probe: str
    status: Literal["answered", "absent", "failed", "timeout"]
    """After `failed` and `timeout` the machine may have devices all the same."""
    message: str


class Discovery(Frozen):
    """The result of a vendor's probes."""

    devices: tuple[Device, ...]
    """Those this process may use."""
    probes: tuple[ProbeResult, ...]
    masks: tuple[str, ...] = ()
    """Variables that hide devices, and how many they leave."""
    partitions: tuple[str, ...] = ()
    """Devices that are equal parts of a card of a known model, as its partition modes make them."""

    def __str__(self) -> str:
        groups = groupby(self.probes, key=lambda result: result.message)
        messages = (f"{', '.join(one.probe for one in same)}: {message}" for message, same in groups)
        return "; ".join([*messages, *self.masks])


def discover(vendor: Vendor, gpus: dict[str, Gpu]) -> Discovery:
    """Run the vendor's probes, in order, until one names devices."""
    results: list[ProbeResult] = []
    timed_out: set[tuple[str, ...]] = set()
    for probe in vendor.probe:
        program = probe.command[:1]
        if program in timed_out:
            continue
        result, probed = _probe(probe)
        results.append(result)
        if result.status == "timeout":
            timed_out.add(program)
        if probed:
            devices = [_device(index, one, vendor, gpus) for index, one in enumerate(probed)]
            indices, masks = visible_devices([one.unique_id for one in probed], vendor.hidden_by, os.environ)
            return Discovery(
                devices=tuple(devices[index] for index in indices),
                probes=tuple(results),
                masks=tuple(masks),
                partitions=tuple(
                    dict.fromkeys(filter(None, (_partition(one, vendor, gpus) for one in probed)))
                ),
            )
    return Discovery(devices=(), probes=tuple(results))


def _probe(probe: Probe) -> tuple[ProbeResult, tuple[ProbedDevice, ...]]:
    if not available(probe):
        return ProbeResult(probe=probe.name, status="absent", message="not on this machine"), ()
    try:
        probed = parse_output(probe, run_probe(probe))
    except MachineError as error:
        message = f"{error.message} ({error.found})" if error.found else error.message
        timeout = isinstance(error, ProbeTimeoutError)
        return ProbeResult(probe=probe.name, status="timeout" if timeout else "failed", message=message), ()
    return ProbeResult(probe=probe.name, status="answered", message=f"{len(probed)} devices"), probed


def _device(index: int, probed: ProbedDevice, vendor: Vendor, gpus: dict[str, Gpu]) -> Device:
    return Device(
        index=index,
        gpu=identify(probed, vendor, gpus),
        arch=_arch(probed, vendor),
        **probed.model_dump(exclude={"arch", "compute_units"}),
    )


def _arch(device: ProbedDevice, vendor: Vendor) -> str | None:
    return None if device.arch is None else vendor.arch_names.get(device.arch, device.arch)


def identify(device: ProbedDevice, vendor: Vendor, gpus: dict[str, Gpu]) -> str | None:
    """Return the identifier of the only row that `device` fits, None if none or several do."""
    fitting = [gpu.id for gpu in gpus.values() if gpu.vendor == vendor.name and _fits(device, gpu, vendor)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(device: ProbedDevice, gpu: Gpu, vendor: Vendor) -> bool:
    return (
        _named(device, gpu, vendor)
        and _has_memory(device, gpu, parts=1)
        and (None in (device.compute_units, gpu.compute_units) or device.compute_units == gpu.compute_units)
    )


def _named(device: ProbedDevice, gpu: Gpu, vendor: Vendor) -> bool:
    named = any(pattern.search(device.name) for pattern in gpu.match)
    return named and _arch(device, vendor) in (None, gpu.arch)


def _has_memory(device: ProbedDevice, gpu: Gpu, *, parts: int) -> bool:
    low, high = (ratio * gpu.device_memory_bytes / parts for ratio in MEMORY_RATIO)
    return device.memory_bytes is None or low <= device.memory_bytes <= high


def _partition(device: ProbedDevice, vendor: Vendor, gpus: dict[str, Gpu]) -> str | None:
    """Return which part of a known card a device is; None for a whole one and for an unknown model.

    Parts of a card have equal shares of its compute units, and share its memory or have equal shares of it.
    """
    own = [gpu for gpu in gpus.values() if gpu.vendor == vendor.name and _named(device, gpu, vendor)]
    if any(_fits(device, gpu, vendor) for gpu in own):
        return None
    for gpu in own:
        for parts in _PARTS:
            units = gpu.compute_units and device.compute_units
            if (not units or units * parts == gpu.compute_units) and (
                _has_memory(device, gpu, parts=parts) or (units and _has_memory(device, gpu, parts=1))
            ):
                return f"{device.name} is one of {parts} parts of {gpu.id}"
    return None


def visible_devices(
    identifiers: Sequence[str | None], groups: Sequence[Sequence[str]], environment: Mapping[str, str]
) -> tuple[list[int], list[str]]:
    """Return the indices of the devices that `environment` leaves, and what each variable does.

    The rules are those of the vendors' runtimes.

    Args:
        identifiers: of the devices, in their order.
        groups: variables applied one group after the other, each to what the one before left;
            of a group only the first variable that is set counts.
    """
    indices, masks = list(range(len(identifiers))), []
    for group in groups:
        variable = next((name for name in group if name in environment), None)
        if variable is not None:
            value, count = environment[variable], len(indices)
            selected = _selected([identifiers[index] for index in indices], value)
            indices = [indices[position] for position in selected]
            masks.append(f"{variable}={value} leaves {len(indices)} of {count}")
    return indices, masks


def _selected(identifiers: Sequence[str | None], value: str) -> list[int]:
    """Return the positions that `value` names; the first entry that names nothing ends the list."""
    positions: list[int] = []
    for entry in value.split(","):
        position = _position(identifiers, entry.strip())
        if position is None or position in positions:
            break
        positions.append(position)
    return positions


def _position(identifiers: Sequence[str | None], entry: str) -> int | None:
    if re.fullmatch("[0-9]{1,4}", entry):
        return int(entry) if int(entry) < len(identifiers) else None
    prefix = _digits(entry)
    fitting = [index for index, one in enumerate(identifiers) if one and _digits(one).startswith(prefix)]
    return fitting[0] if prefix and len(fitting) == 1 else None


def _digits(identifier: str) -> str:
    """Return an identifier without its prefix, which tools and runtimes write differently."""
    return identifier.lower().removeprefix("gpu-").removeprefix("0x")
