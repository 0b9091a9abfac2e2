"""The device of this rank and the software that drives it, as found."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from twinrun.protocol.job import Job, PowerReading, PowerSource
from twinrun.train import node, rank, ranks

# The name that a record uses, by those of distributions.
DISTRIBUTIONS = {
    "mosaicml": "composer",
    "mosaicml-streaming": "streaming",
    **dict.fromkeys(("triton", "pytorch-triton-rocm", "triton-rocm"), "triton"),
    **{name: name for name in ("deepspeed", "torchao", "numpy")},
}


def device_of(job: Job) -> torch.device:
    """Return this rank's device and make it the current one."""
    if not job.accelerator:
        return torch.device("cpu")
    device = torch.device("cuda", rank.variable("LOCAL_RANK", 0))
    torch.cuda.set_device(device)
    return device


def synchronise(device: torch.device) -> None:
    """Wait until `device` has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def name(device: torch.device) -> str:
    """Return the device's model name."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return node.processor()


def memory_bytes(device: torch.device) -> int:
    """Return the memory `device` has, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory this process has held so far, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(device: torch.device) -> dict[str, Any]:
    """Return what a result says of the device; every rank must call it."""
    (peak,) = ranks.largest([peak_memory_bytes(device)], device)
    found = {"device_name": name(device), "device_memory_bytes": memory_bytes(device)}
    return found | {"peak_memory_bytes": int(peak), "libraries": libraries(device)}


def libraries(device: torch.device) -> dict[str, str]:
    """Return the versions of what computes and communicates; absent packages are left out."""
    found = {"python": platform.python_version(), "collectives": collectives(device)}
    for distribution, label in DISTRIBUTIONS.items():
        with contextlib.suppress(PackageNotFoundError):
            found.setdefault(label, version(distribution))
    found["torch"] = torch.__version__
    return found


def collectives(device: torch.device) -> str:
    """Return name and version of the library ranks would exchange gradients with."""
    if device.type == "cpu":
        return f"Gloo of PyTorch {torch.__version__}"
    library = "RCCL" if torch.version.hip else "NCCL"
    numbers: object = torch.cuda.nccl.version()
    return f"{library} {'.'.join(map(str, numbers)) if isinstance(numbers, tuple) else numbers}"


# Power and engine clock of this rank's device, and the power of each step, sampled beside the rank.
PERIOD_SECONDS = 0.125
# A step that is shorter than the time between two samples has the power of the newest one before its end.
FRESH_SECONDS = 3 * PERIOD_SECONDS
DEVICES = Path("/sys/bus/pci/devices")
# What the driver has: the mean power or, for later cards, the power now; in microwatts and in hertz.
FILES = {"power": ("power1_average", "power1_input"), "clock": ("freq1_input",)}

Quantity = Literal["power", "clock"]
Sensor = tuple[str, Callable[[], float]]
"""The name of a sensor, and what reads watts or MHz now."""


class NoPowerError(Exception):
    """Nothing says this quantity here, and why."""


def pci_address(device: int) -> str | None:
    """Return where a device is on the PCI bus, None where PyTorch does not say, as before 2.7."""
    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        return None
    found = torch.cuda.get_device_properties(device)
    if not hasattr(found, "pci_bus_id"):
        return None
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def sensor_of(device: int, quantity: Quantity) -> Sensor:
    """Return what reads a quantity of a device; raises NoPowerError."""
    if not torch.version.hip:
        return by_nvml(device, quantity)
    if (address := pci_address(device)) is None:
        raise NoPowerError("PyTorch does not say where the device is on the PCI bus")
    return by_files(address, quantity)


def by_nvml(device: int, quantity: Quantity) -> Sensor:
    """Return the sensor that PyTorch reads by nvidia-ml-py; from Ampere on it has the mean of a second."""

    def read() -> float:
        asked = torch.cuda.power_draw(device) / 1e3 if quantity == "power" else torch.cuda.clock_rate(device)
        return float(asked)

    try:
        read()
    except Exception as error:
        raise NoPowerError(f"NVML: {error}") from None
    return "NVML", read


def by_files(address: str, quantity: Quantity) -> Sensor:
    """Return the sensor of the kernel's driver; of a card with two dies the first has the power of both."""
    for name in FILES[quantity]:
        for file in DEVICES.glob(f"{address}/hwmon/hwmon*/{name}"):

            def read(file: Path = file) -> float:
                return float(file.read_text(encoding="ascii")) / 1e6

            with contextlib.suppress(OSError, ValueError):
                if read() > 0:
                    return f"hwmon, {name}", read
    raise NoPowerError(f"no number in {DEVICES / address}/hwmon/hwmon*/{', '.join(FILES[quantity])}")


class PowerMeter:
    """What this rank knows of the power of its device."""

    def __init__(self, job: Job, reading: PowerReading | None) -> None:
        cards = reading.devices_per_card if reading else 1
        self.needed = -(-job.world_size // cards)
        """How many ranks must have read something before the power of all devices is known."""
        self._samples: deque[tuple[float, float]] = deque()
        self._counted, self._seconds = 0, 0.0
        self._over = threading.Event()
        self._known = PowerSource(sensor=None, reason="a processor's power is not read")
        if job.accelerator and reading:
            try:
                name, self._read = sensor_of(rank.variable("LOCAL_RANK", 0), "power")
                self._known = PowerSource(sensor=name)
                threading.Thread(target=self._sample, daemon=True).start()
            except NoPowerError as error:
                self._known = PowerSource(sensor=None, reason=str(error))

    def watts(self, began: float, ended: float, *, timed: bool) -> float | None:
        """Return the mean power between two times of the monotonic clock, None where there is no sample."""
        oldest = min(began, ended - FRESH_SECONDS)
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()
        kept = tuple(self._samples)
        found = [watts for moment, watts in kept if began <= moment <= ended]
        if timed:
            self._counted += len(found)
            self._seconds += ended - began
        found = found or [watts for moment, watts in kept if moment <= ended][-1:]
        return sum(found) / len(found) if found else None

    def source(self) -> PowerSource:
        """Return where the samples come from, or why there are none."""
        rate = self._counted / self._seconds if self._known.sensor and self._seconds else None
        return self._known.model_copy(update={"samples_per_second": rate})

    def end(self) -> None:
        """Sample no more."""
        self._over.set()

    def _sample(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            # A driver that is busy, or a device that is reset, is no reason to end.
            with contextlib.suppress(Exception):
                watts = self._read()
                self._samples.append((time.monotonic(), watts))
