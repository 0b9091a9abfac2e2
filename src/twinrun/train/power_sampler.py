"""Samples the power of one device: a program beside the rank, so that it waits for no kernel of the rank.

It prints the name of the sensor, and then the time and the watts of each sample; or why there is no sensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from twinrun.foundation.processes import end_with_parent
from twinrun.protocol.power import ADDRESS, PowerLibrary, PowerSensor, SampledDevice

MODULE = "twinrun.train.power_sampler"
PERIOD_SECONDS = 0.125
SENSOR, NOTHING = "sensor", "nothing"

ReadNumber = Callable[[], float]


class NoPowerError(Exception):
    """This sensor says nothing here, and why."""


class Sampler:
    """Reads one sensor, a number at a time."""

    def __init__(self, sensor: PowerSensor, *, address: str | None) -> None:
        if sensor.of == "card" and address is None:
            raise NoPowerError("the runtime does not say where the device is on the PCI bus")
        self._sensor = sensor
        if sensor.library:
            self._parts: list[tuple[ReadNumber, float]] = [(_library(sensor.library, address or ""), 0.0)]
        else:
            self._parts = [(_number_of(file), _limit(sensor, file)) for file in _files(sensor, address)]
        self._last: list[tuple[float, float]] = []
        self._last = self._numbers()

    def value(self) -> float:
        """Return the power or clock now or, where the sensor counts energy, since the last call."""
        before, self._last = self._last, self._numbers()
        if self._sensor.counts == "power":
            return sum(number for _, number in self._last) * self._sensor.unit
        spent = 0.0
        for (then, low), (now, high), (_, limit) in zip(before, self._last, self._parts, strict=True):
            spent += (high - low + (limit if high < low else 0.0)) / (now - then)
        return spent * self._sensor.unit

    def _numbers(self) -> list[tuple[float, float]]:
        return [(time.monotonic(), read()) for read, _ in self._parts]


def _files(sensor: PowerSensor, address: str | None) -> list[Path]:
    pattern = (sensor.files or "").replace(ADDRESS, address or "")
    found = sorted(Path("/").glob(pattern.lstrip("/")))
    if sensor.named:
        named = re.compile(sensor.named)
        found = [one for one in found if named.fullmatch((one.parent / "name").read_text("ascii").strip())]
    if not found:
        raise NoPowerError(f"no file {pattern}")
    return found


def _number_of(file: Path) -> ReadNumber:
    """Return what reads the number in `file`, which stays open: to open it takes as long as to read it."""
    descriptor = os.open(file, os.O_RDONLY)
    return lambda: float(os.pread(descriptor, 64, 0))


def _limit(sensor: PowerSensor, file: Path) -> float:
    return float((file.parent / sensor.wraps).read_text(encoding="ascii")) if sensor.wraps else 0.0


def _library(named: PowerLibrary, address: str) -> ReadNumber:
    library = ctypes.CDLL(named.file)
    device, found = ctypes.c_void_p(), ctypes.c_uint()

    def call(name: str, *arguments: object) -> None:
        if status := library[name](*arguments):
            raise NoPowerError(f"{name} returns {status}")

    def read() -> float:
        call(named.read, device, *named.asks, ctypes.byref(found))
        return float(found.value)

    call(named.start)
    call(named.open, address.encode(), ctypes.byref(device))
    return read


def choose(device: SampledDevice) -> tuple[PowerSensor, Sampler]:
    """Return the first sensor that says something; raises NoPowerError with what each lacks."""
    reasons = []
    for sensor in device.sensor:
        try:
            sampler = Sampler(sensor, address=device.address)
            # The second die of a card has a sensor that says 0. An energy needs time between two readings.
            time.sleep(PERIOD_SECONDS)
            if sampler.value() > 0:
                return sensor, sampler
            reasons.append(f"{sensor.name}: it says 0")
        except (NoPowerError, AttributeError, OSError, ValueError) as error:
            reasons.append(f"{sensor.name}: {error}")
    raise NoPowerError("; ".join(reasons))


def samples(sampler: Sampler, *, ended: Callable[[float], bool]) -> Iterator[tuple[float, float]]:
    """Yield time and watts eight times a second until `ended`, which waits for so many seconds, says so."""
    due = time.monotonic() + PERIOD_SECONDS
    while not ended(max(0.0, due - time.monotonic())):
        # A driver that is busy, or a device that is reset, is no reason to end.
        with contextlib.suppress(NoPowerError, OSError, ValueError):
            watts = sampler.value()
            yield time.monotonic(), watts
        due = max(due + PERIOD_SECONDS, time.monotonic())


def main(device: SampledDevice) -> None:
    """Sample until the rank ends, or closes its end of the pipe."""
    end_with_parent(signal.SIGKILL)

    rank = select.poll()
    rank.register(0, select.POLLIN)

    def ended(seconds: float) -> bool:
        # Processes that the rank has forked may hold its end of the pipe.
        return bool(rank.poll(seconds * 1000)) or os.getppid() != device.pid

    def say(first: object, second: object) -> None:
        os.write(1, f"{first}\t{second}\n".encode())

    try:
        sensor, sampler = choose(device)
    except NoPowerError as error:
        say(NOTHING, error)
        return
    say(SENSOR, sensor.name)
    for moment, watts in samples(sampler, ended=ended):
        say(moment, watts)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(SampledDevice.model_validate_json(sys.argv[1]))
