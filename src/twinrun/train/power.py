"""Power and engine clock of this rank's device, and the power of each step, sampled beside the rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from twinrun.protocol.job import Job, PowerReading, PowerSource
from twinrun.train import rank

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
    if (address := pci_address(device)) is None:
        raise NoPowerError("PyTorch does not say where the device is on the PCI bus")
    return (by_files if torch.version.hip else by_nvml)(address, quantity)


def by_nvml(address: str, quantity: Quantity) -> Sensor:
    """Return the sensor of the package nvidia-ml-py; from Ampere on it has the mean of the last second."""
    try:
        import pynvml
    except ImportError:
        raise NoPowerError("the package nvidia-ml-py is not installed") from None
    nvml: Any = pynvml

    def read() -> float:
        if quantity == "clock":
            return float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1e3

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        read()
    except nvml.NVMLError as error:
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
        self._sensor: str | None = None
        self._reason = "a processor's power is not read"
        if job.accelerator and reading:
            try:
                self._sensor, self._read = sensor_of(rank.variable("LOCAL_RANK", 0), "power")
                threading.Thread(target=self._sample, daemon=True).start()
            except NoPowerError as error:
                self._reason = str(error)

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
        if self._sensor is None:
            return PowerSource(sensor=None, reason=self._reason)
        rate = self._counted / self._seconds if self._seconds else 0.0
        return PowerSource(sensor=self._sensor, samples_per_second=rate)

    def end(self) -> None:
        """Sample no more."""
        self._over.set()

    def _sample(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            # A driver that is busy, or a device that is reset, is no reason to end.
            with contextlib.suppress(Exception):
                watts = self._read()
                self._samples.append((time.monotonic(), watts))
