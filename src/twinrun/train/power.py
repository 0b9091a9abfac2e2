"""The power of this rank's device, sampled by a process beside it (`power_sampler`), step by step."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import signal
import sys
from collections import deque
from pathlib import Path

from twinrun.protocol.job import Job
from twinrun.protocol.power import AddressFunction, PowerReading, PowerSource, SampledDevice
from twinrun.train import rank
from twinrun.train.power_sampler import MODULE, NOTHING, PERIOD_SECONDS, SENSOR

# Half an hour of samples: so long a step may take before the sampler has to wait for its reader.
PIPE_BYTES = 1 << 20
# A step that is shorter than the time between two samples has the power of the newest one before its end.
FRESH_SECONDS = 3 * PERIOD_SECONDS
NO_SENSOR = "the vendor's manifest names no sensor for this device"


class PowerMeter:
    """What this rank knows of power; at most one process beside it."""

    def __init__(self, job: Job, reading: PowerReading | None) -> None:
        self._job, self._reading = job, reading or PowerReading()
        self._first = rank.variable("LOCAL_RANK", 0) == 0
        self._pid = self._writer = self._reader = -1
        self._text = b""
        self._sensor: str | None = None
        self._reason = "the sampler has not said anything yet"
        self._samples: deque[tuple[float, float]] = deque()
        self._counted, self._seconds = 0, 0.0
        wanted = tuple(one for one in self._reading.sensor if one.of == "card" or self._first)
        if not self._reading.sensor:
            self._reason = NO_SENSOR
        elif wanted:
            asked = self._reading.address if job.accelerator else None
            address = pci_address(asked, rank.variable("LOCAL_RANK", 0))
            self._start(SampledDevice(pid=os.getpid(), address=address, sensor=wanted))

    @property
    def needed(self) -> int:
        """How many ranks must have read something before the power of all devices is known."""
        world = self._job.world_size
        if self._reading.sensor and self._reading.sensor[0].of == "node":
            return -(-world // rank.variable("LOCAL_WORLD_SIZE", 1))
        return -(-world // self._reading.devices_per_card)

    def watts(self, began: float, ended: float, *, timed: bool) -> float | None:
        """Return the mean power between two times of the monotonic clock, None where there is no sample."""
        self._read()
        oldest = min(began, ended - FRESH_SECONDS)
        while self._samples and self._samples[0][0] < oldest:
            self._samples.popleft()
        found = [watts for moment, watts in self._samples if began <= moment <= ended]
        if timed:
            self._counted += len(found)
            self._seconds += ended - began
        if not found:
            found = [watts for moment, watts in self._samples if moment <= ended][-1:]
        return sum(found) / len(found) if found else None

    def source(self) -> PowerSource:
        """Return where the samples come from, or why there are none."""
        self._read()
        if self._sensor is None:
            return PowerSource(sensor=None, reason=self._reason)
        rate = self._counted / self._seconds if self._seconds else 0.0
        return PowerSource(sensor=self._sensor, samples_per_second=rate)

    def end(self) -> None:
        """End the process beside the rank, at once."""
        if self._pid < 0:
            return
        self._read()
        os.close(self._writer)
        os.close(self._reader)
        # A driver that hangs must not keep it: nobody waits for what it would still say.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._pid = -1

    def _start(self, device: SampledDevice) -> None:
        theirs, self._writer = os.pipe()
        self._reader, output = os.pipe()
        with contextlib.suppress(OSError):
            # The kernel's limit may be lower.
            fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._reader, False)
        self._pid = os.posix_spawn(
            sys.executable,
            [sys.executable, "-m", MODULE, device.model_dump_json()],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, theirs, 0), (os.POSIX_SPAWN_DUP2, output, 1)],
            # They are for the rank, which may go on to a step's end.
            setsigmask=(signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        )
        os.close(theirs)
        os.close(output)

    def _read(self) -> None:
        """Take what the sampler has said since the last time."""
        if self._pid < 0:
            return
        with contextlib.suppress(BlockingIOError):
            # One call takes all that the pipe holds.
            *lines, self._text = (self._text + os.read(self._reader, PIPE_BYTES)).split(b"\n")
            for line in lines:
                self._hear(line.decode())

    def _hear(self, line: str) -> None:
        first, _, second = line.partition("\t")
        if first == SENSOR:
            self._sensor = second
        elif first == NOTHING:
            self._reason = second
        else:
            self._samples.append((float(first), float(second)))


def pci_address(asked: AddressFunction | None, device: int) -> str | None:
    """Return the PCI address of a device, None where the runtime that was loaded does not say."""
    if asked is None:
        return None
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    files = dict.fromkeys(line.split(maxsplit=5)[-1] for line in maps if "/" in line)
    loaded = [name for name in files if re.fullmatch(asked.library, Path(name).name)]
    text = ctypes.create_string_buffer(32)
    for name in loaded:
        with contextlib.suppress(OSError, AttributeError):
            if ctypes.CDLL(name)[asked.function](text, len(text), device) == 0:
                return text.value.decode().lower()
    return None
