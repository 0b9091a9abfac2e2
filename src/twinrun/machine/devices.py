"""The devices of a vendor on this machine, as its driver tells of them, and which models they are."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from twinrun.foundation.manifest import Frozen
from twinrun.machine.memory import kernel_text
from twinrun.manifests.vendor import Gpu, Probe, Vendor
from twinrun.protocol.allocation import Device

# Probed over nominal memory: 1.006 (48 GB less error correction) to 1.074 (a GB taken as 2^30 bytes).
MEMORY_RATIO = (0.97, 1.09)
# Parts that a card of either vendor can be divided into.
_PARTS = range(2, 9)


class ProbedDevice(NamedTuple):
    """A device as its driver tells of it; None is what that does not say."""

    name: str
    memory_bytes: int | None = None
    arch: str | None = None
    driver: str | None = None
    unique_id: str | None = None
    compute_units: int | None = None


class Discovery(Frozen):
    """What a vendor's probe found."""

    devices: tuple[Device, ...]
    """Those this process may use."""
    status: Literal["answered", "absent", "failed"] = "answered"
    """After `failed` the machine may have devices all the same."""
    message: str = ""
    masks: tuple[str, ...] = ()
    """Variables that hide devices, and how many they leave."""
    partitions: tuple[str, ...] = ()
    """Devices that are equal parts of a card of a known model, as its partition modes make them."""

    def __str__(self) -> str:
        return "; ".join([self.message, *self.masks])


def discover(vendor: Vendor, gpus: dict[str, Gpu]) -> Discovery:
    """Ask the vendor's driver for its devices."""
    probe = vendor.probe
    assert probe is not None
    found: list[ProbedDevice] | None = None
    fault: str | None = f"no answer within {probe.timeout_s:g} s"

    def ask() -> None:
        nonlocal found, fault
        try:
            found, fault = _from_folders(probe, probe.folders) if probe.folders else _from_library(), None
        except Exception as error:  # whatever a driver's library or files hold
            fault = f"answer not understood: {error!r}"

    # A driver that is stuck answers never, and cannot be ended.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(probe.timeout_s)
    if fault or found is None:
        message = f"{probe.name}: {fault or 'not on this machine'}"
        return Discovery(devices=(), status="failed" if fault else "absent", message=message)
    devices = [_device(index, one, vendor, gpus) for index, one in enumerate(found)]
    indices, masks = visible_devices([one.unique_id for one in devices], vendor.hidden_by, os.environ)
    parts = (_partition(one, vendor, gpus) for one in found)
    return Discovery(
        devices=tuple(devices[index] for index in indices),
        message=f"{probe.name}: {len(devices)} devices",
        masks=tuple(masks),
        partitions=tuple(dict.fromkeys(part for part in parts if part)),
    )


def _from_library() -> list[ProbedDevice] | None:
    """Return what NVML says; None where there is no such library."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return None
    driver, found = nvml.nvmlSystemGetDriverVersion(), []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        arch = ".".join(map(str, nvml.nvmlDeviceGetCudaComputeCapability(handle)))
        memory, unique = nvml.nvmlDeviceGetMemoryInfo(handle).total, nvml.nvmlDeviceGetUUID(handle)
        found.append(ProbedDevice(nvml.nvmlDeviceGetName(handle), memory, arch, driver, unique))
    return found


def matching_files(pattern: str) -> list[Path]:
    """Return the files that the absolute shell `pattern` finds, 2 before 10."""
    return sorted(Path("/").glob(pattern.lstrip("/")), key=lambda path: (len(path.name), path.name))


def _from_folders(probe: Probe, pattern: str) -> list[ProbedDevice] | None:
    """Return what the kernel's files say, a folder each device; None where there is none."""
    driver = kernel_text(Path(probe.driver_file)).strip() or None if probe.driver_file else None
    found, folders = [], matching_files(pattern)
    for folder in folders:
        text = ""
        # Devices that a container or job may not use are listed, but refuse to be read.
        with contextlib.suppress(OSError):
            text = "\n".join((folder / part).read_text(encoding="utf-8") for part in probe.parts)
        facts = dict(re.findall(r"^(\w+) (\d{1,20})$", text, re.MULTILINE))
        if all(one.fullmatch(facts.get(key, "")) for key, one in probe.where.items()):
            units = int(facts["simd_count"]) // int(facts["simd_per_cu"])
            unique, memory = f"0x{int(facts['unique_id']):x}", int(facts["size_in_bytes"])
            number, arch = f"0x{int(facts['device_id']):x}", facts["gfx_target_version"]
            found.append(ProbedDevice(number, memory, arch, driver, unique, units))
    return found if folders else None


def _device(index: int, probed: ProbedDevice, vendor: Vendor, gpus: dict[str, Gpu]) -> Device:
    row = identify(probed, vendor, gpus)
    return Device(
        index=index,
        # The kernel knows a model by its number alone.
        name=gpus[row].name if row and probed.name.startswith("0x") else probed.name,
        gpu=row,
        arch=_arch(probed, vendor),
        memory_bytes=probed.memory_bytes,
        driver=probed.driver,
        unique_id=probed.unique_id,
    )


def _arch(device: ProbedDevice, vendor: Vendor) -> str | None:
    return None if device.arch is None else vendor.arch_names.get(device.arch, device.arch)


def identify(device: ProbedDevice, vendor: Vendor, gpus: dict[str, Gpu]) -> str | None:
    """Return the identifier of the only row that `device` fits, None if none or several do."""
    fitting = [gpu.id for gpu in gpus.values() if _named(device, gpu, vendor) and _fits(device, gpu)]
    return fitting[0] if len(fitting) == 1 else None


def _fits(device: ProbedDevice, gpu: Gpu) -> bool:
    alike = None in (device.compute_units, gpu.compute_units) or device.compute_units == gpu.compute_units
    return alike and _has_memory(device, gpu, parts=1)


def _named(device: ProbedDevice, gpu: Gpu, vendor: Vendor) -> bool:
    named = gpu.vendor == vendor.name and any(pattern.search(device.name) for pattern in gpu.match)
    return named and _arch(device, vendor) in (None, gpu.arch)


def _has_memory(device: ProbedDevice, gpu: Gpu, *, parts: int) -> bool:
    low, high = (ratio * gpu.device_memory_bytes / parts for ratio in MEMORY_RATIO)
    return device.memory_bytes is None or low <= device.memory_bytes <= high


def _partition(device: ProbedDevice, vendor: Vendor, gpus: dict[str, Gpu]) -> str | None:
    """Return which part of a known card a device is; None for a whole one and for an unknown model.

    Parts of a card have equal shares of its compute units, and share its memory or have equal shares of it.
    """
    own = [gpu for gpu in gpus.values() if _named(device, gpu, vendor)]
    if any(_fits(device, gpu) for gpu in own):
        return None
    for gpu in own:
        for parts in _PARTS:
            units = gpu.compute_units and device.compute_units
            if (not units or units * parts == gpu.compute_units) and (
                _has_memory(device, gpu, parts=parts) or (units and _has_memory(device, gpu, parts=1))
            ):
                name = gpu.name if device.name.startswith("0x") else device.name
                return f"{name} is one of {parts} parts of {gpu.id}"
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
