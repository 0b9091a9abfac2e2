"""Engine clocks of a node's GPUs while all of them multiply matrices."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from peers import LEAST_NODES, slow

from twinrun.protocol.job import PowerReading
from twinrun.train.checks import CheckError

# A clock settles after power and temperature have: what is read before does not count.
SETTLED_SECONDS, SECONDS, PERIOD_SECONDS = 2.0, 5.0, 0.05
# Each device has some rounds queued, which take longer than the time between two readings.
SIDE, PRODUCTS, ROUNDS = 8192, 32, 4
REMEDY = "see its temperature, power limit and throttle reasons; exclude the node until then"


def clocks_under_load(reading: PowerReading | None, count: int) -> str:
    """Say the clock of each device while all are busy; raises CheckError for one below its peers."""
    from twinrun.train.device import NoPowerError, sensor_of  # noqa: PLC0415 - only in the check's own process

    try:
        sensors = {f"device {device}": sensor_of(device, "clock")[1] for device in range(count)}
        clocks = medians(sensors, Products(count).refill)
    except NoPowerError as error:
        return f"clocks under load were not read: {error}"
    if silent := [name for name in sensors if name not in clocks]:
        return f"clocks under load were not read: no number from {', '.join(silent)}"
    return judged(clocks, reading or PowerReading())


def medians(sensors: Mapping[str, Callable[[], float]], refill: Callable[[], None]) -> dict[str, float]:
    """Return by device the median of its clock in MHz, of those that say one.

    Args:
        refill: keeps all devices busy until it is called again.
    """
    found: dict[str, list[float]] = {name: [] for name in sensors}
    # Libraries are loaded at the first.
    refill()
    began = time.monotonic()
    while (spent := time.monotonic() - began) < SETTLED_SECONDS + SECONDS:
        refill()
        if spent >= SETTLED_SECONDS:
            for name, read in sensors.items():
                # A driver may be busy.
                with contextlib.suppress(Exception):
                    found[name].append(read())
        time.sleep(PERIOD_SECONDS)
    return {name: statistics.median(values) for name, values in found.items() if values}


def judged(clocks: Mapping[str, float], reading: PowerReading) -> str:
    """Say clocks beside the table's; raises CheckError for a device that is clocked below its peers."""
    peak = reading.clock_mhz
    shown = ", ".join(
        f"{name} {mhz:.0f} MHz" + (f" ({mhz / peak:.0%} of the peak)" if peak else "")
        for name, mhz in clocks.items()
    )
    row = (
        f"row {reading.gpu} of images/gpus.toml" if reading.gpu else "no row of images/gpus.toml is this GPU"
    )
    table = f"{row} has {peak:.0f} MHz" if peak else f"{row} names no clock" if reading.gpu else row
    said = f"clocks under load: {shown}; {table}"
    if len(clocks) < LEAST_NODES:
        return f"{said}; {len(clocks)} of the {LEAST_NODES} devices that a comparison needs"
    if found := slow({name: [mhz] for name, mhz in clocks.items()}):
        raise CheckError(f"clocked below its peers: {', '.join(found)}; {said}", remedy=REMEDY)
    if peak and max(clocks.values()) < peak:
        # A power limit makes any fixed threshold a guess: arXiv 2512.08242.
        return f"{said}; all are below it and alike, as under a power limit"
    return said


class Products:
    """Matrix products on every device, by a queue for each, so that a slow one lets no other idle."""

    def __init__(self, count: int) -> None:
        import torch  # noqa: PLC0415 - only in the check's own process

        # Random numbers: a product of equal ones takes less power.
        self._parts = [
            torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=f"cuda:{device}") for device in range(count)
        ]
        self._products = [torch.empty_like(part) for part in self._parts]
        self._queues: list[deque[Any]] = [deque() for _ in self._parts]

    def refill(self) -> None:
        """Queue products until each device has enough."""
        import torch  # noqa: PLC0415

        for part, product, queue in zip(self._parts, self._products, self._queues, strict=True):
            while queue and queue[0].query():
                queue.popleft()
            while len(queue) < ROUNDS:
                with torch.cuda.device(part.device):
                    for _ in range(PRODUCTS):
                        torch.matmul(part, part, out=product)
                    queue.append(torch.cuda.Event())
                    queue[-1].record()
