"""Power as vendors' manifests name it, read from files in the layout of sysfs and from a library in C."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("streaming")

from tests.train.small import ROOT, TRAINING, MakeJob, launch
from twinrun.foundation.manifest import load_json
from twinrun.manifests.vendor import load_vendors
from twinrun.protocol.power import PowerReading, PowerSensor, PowerSensors
from twinrun.protocol.training import TrainingResult
from twinrun.train.power import NO_SENSOR, PowerMeter

VENDORS = load_vendors(ROOT)
ADDRESS = "0000:c1:00.0"
# What a driver and a runtime answer; the power is what the file in $PLAYED_POWER holds.
LIBRARY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static int started;
int %(start)s(void) { started = 1; return 0; }
int %(address)s(char *text, int size, int device) {
    snprintf(text, size, "0000:%%02X:00.0", 0xC1 + device);
    return 0;
}
int %(open)s(const char *address, void **handle) {
    if (!started || strcmp(address, "0000:c1:00.0")) return 2;
    *handle = &started;
    return 0;
}
int %(read)s(void *handle, %(kind)s unsigned int *power) {
    FILE *file = fopen(getenv("PLAYED_POWER"), "r");
    if (!file || handle != &started || %(wrong)s) return 3;
    int found = fscanf(file, "%%u", power);
    fclose(file);
    return found != 1;
}
"""


def build_library(folder: Path, power: PowerSensors, *, kind: str = "sensor") -> Path:
    """Compile a library that offers what the manifest calls; return it, loaded as a runtime is."""
    sensor, folder = getattr(power, kind)[0], folder / "lib"
    folder.mkdir()
    assert sensor.library
    assert power.address
    source, file = folder / "played.c", folder / "libcudart.so.0"
    asks = sensor.library.asks
    names = sensor.library.model_dump() | {
        "address": power.address.function,
        "kind": "int kind," if asks else "",
        "wrong": f"kind != {asks[0]}" if asks else "0",
    }
    source.write_text(LIBRARY % names)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(file), str(source)], check=True)
    ctypes.CDLL(str(file))
    return file


def in_tree(root: Path, vendor: str) -> PowerSensors:
    """Return a vendor's sensors, whose files lie in a tree of the test."""
    power = VENDORS[vendor].power
    every = power.sensor + power.clock
    moved = [one.model_copy(update={"files": f"{root}{one.files}"}) for one in every if one.files]
    return PowerSensors(sensor=tuple(moved), address=power.address)


def placed(root: Path, name: str, text: object) -> Path:
    file = root / name.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")
    return file


def rewrite(file: Path, text: object) -> None:
    """Change a file in one piece and in place, as a kernel's file changes."""
    with file.open("r+") as stream:
        stream.write(f"{text:<16}\n")


@pytest.fixture
def play() -> Iterator[Callable[[Callable[[float], None]], None]]:
    """Call a function with the seconds since the start, a hundred times a second."""
    over, threads = threading.Event(), []

    def start(step: Callable[[float], None]) -> None:
        began = time.monotonic()

        def run() -> None:
            while not over.wait(0.01):
                step(time.monotonic() - began)

        threads.append(threading.Thread(target=run))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()


def sampled(meter: PowerMeter, *, seconds: float) -> list[float | None]:
    """Return the power of steps of that length, from the first sample on."""
    deadline = time.monotonic() + 20
    while meter.watts(time.monotonic() - 1, time.monotonic(), timed=False) is None:
        assert time.monotonic() < deadline, meter.source()
        time.sleep(0.05)
    found = []
    for _ in range(4):
        began = time.monotonic()
        time.sleep(seconds)
        found.append(meter.watts(began, time.monotonic(), timed=True))
    return found


def reading(power: PowerSensors, **changed: object) -> PowerReading:
    return PowerReading.model_validate(power.model_dump() | changed)


@pytest.mark.parametrize("power_file", ["power1_average", "power1_input", "freq1_input"])
def test_a_card_is_read_from_its_own_file_by_its_address(
    make_job: MakeJob, tmp_path: Path, power_file: str
) -> None:
    hwmon = "/sys/bus/pci/devices/{}/hwmon/hwmon{}/{}"
    placed(tmp_path, hwmon.format("0000:c2:00.0", 4, power_file), 999_000_000)
    file = placed(tmp_path, hwmon.format(ADDRESS, 3, power_file), 417_000_000)
    build_library(tmp_path, VENDORS["cuda"].power)
    power = in_tree(tmp_path, "rocm").model_copy(update={"address": VENDORS["cuda"].power.address})
    meter = PowerMeter(make_job().model_copy(update={"accelerator": True}), reading(power))
    assert sampled(meter, seconds=0.4) == [417.0] * 4
    rewrite(file, 300_000_000)
    time.sleep(0.25)
    assert sampled(meter, seconds=0.02) == [300.0] * 4
    source = meter.source()
    meter.end()
    assert source.sensor == f"amdgpu hwmon, {power_file}"
    assert meter.needed == 1


@pytest.mark.parametrize("kind", ["sensor", "clock"])
def test_a_library_is_called_as_the_manifest_says(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    power = VENDORS["cuda"].power
    file, played = build_library(tmp_path, power, kind=kind), placed(tmp_path, "power", 693_500)
    monkeypatch.setenv("PLAYED_POWER", str(played))
    sensor = getattr(power, kind)[0]
    assert sensor.library
    own = sensor.model_copy(update={"library": sensor.library.model_copy(update={"file": str(file)})})
    power = power.model_copy(update={"sensor": (own,)})
    meter = PowerMeter(make_job().model_copy(update={"accelerator": True}), reading(power))
    assert sampled(meter, seconds=0.5) == [693_500 * sensor.unit] * 4
    source = meter.source()
    meter.end()
    assert source.sensor == "NVML"
    assert source.samples_per_second is not None
    assert 5 < source.samples_per_second < 11


def test_energy_of_packages_becomes_power_over_its_wrap(
    make_job: MakeJob, tmp_path: Path, play: Callable[[Callable[[float], None]], None]
) -> None:
    wrap, files = 20_000_000, []
    for number, name in enumerate(("package-0", "package-1", "psys")):
        zone = f"/sys/class/powercap/intel-rapl:{number}"
        files.append(placed(tmp_path, f"{zone}/energy_uj", 0))
        placed(tmp_path, f"{zone}/max_energy_range_uj", wrap)
        placed(tmp_path, f"{zone}/name", name)
    placed(tmp_path, "/sys/class/powercap/intel-rapl:0:0/energy_uj", 7)

    def step(seconds: float) -> None:
        for file, watts in zip(files, (60, 40, 500), strict=True):
            rewrite(file, int(seconds * watts * 1e6) % wrap)

    play(step)
    meter = PowerMeter(make_job(), reading(in_tree(tmp_path, "cpu")))
    steps = sampled(meter, seconds=0.5)
    source = meter.source()
    meter.end()
    assert steps == pytest.approx([100.0] * 4, rel=0.25)
    assert source.sensor == "RAPL packages"


def test_two_ranks_of_a_node_share_what_one_of_them_reads(make_job: MakeJob, tmp_path: Path) -> None:
    placed(tmp_path, "watts", 90)
    sensor = PowerSensor(name="played", of="node", files=f"{tmp_path}/watts", unit=1)
    job = make_job(world_size=2, sharding="full", steps=60, warmup_steps=50, trainer="plain")
    done = launch(TRAINING, job.model_copy(update={"power": PowerReading(sensor=(sensor,))}))
    assert done.returncode == 0, done.stderr
    result = load_json(Path(job.out) / "result.json", TrainingResult)
    assert result.power.sensor == "played"
    assert {step.watts for step in result.steps} <= {None, 45.0}
    assert result.steps[-1].watts == 45.0


@pytest.mark.parametrize(
    ("sensors", "reason"),
    [
        ((), NO_SENSOR),
        (VENDORS["cpu"].power.sensor, "RAPL packages: no file"),
        (VENDORS["cuda"].power.sensor, "NVML: the runtime does not say where the device is on the PCI bus"),
        ((PowerSensor(name="die", of="node", files="{root}/zero", unit=1),), "die: it says 0"),
        ((PowerSensor(name="text", of="node", files="{root}/text", unit=1),), "text: could not convert"),
    ],
)
def test_without_a_sensor_the_reason_is_told(
    make_job: MakeJob, tmp_path: Path, sensors: tuple[PowerSensor, ...], reason: str
) -> None:
    placed(tmp_path, "zero", 0)
    placed(tmp_path, "text", "none")
    here = [
        one.model_copy(update={"files": one.files and one.files.replace("{root}", str(tmp_path))})
        for one in sensors
    ]
    meter = PowerMeter(make_job(), PowerReading.model_construct(sensor=tuple(here), address=None))
    deadline = time.monotonic() + 20
    while reason not in (meter.source().reason or "") and time.monotonic() < deadline:
        time.sleep(0.05)
    source = meter.source()
    meter.end()
    assert source.sensor is None
    assert reason in (source.reason or "")


RANK = """
import sys, time
from twinrun.protocol.power import PowerReading
from twinrun.protocol.training import TrainingJob
from twinrun.train.power import PowerMeter
job = TrainingJob.model_validate_json(sys.argv[1])
meter = PowerMeter(job, job.power)
print(meter._pid, flush=True)
while meter.watts(time.monotonic() - 1, time.monotonic(), timed=True) is None:
    time.sleep(0.05)
print("read", flush=True)
time.sleep(600)
"""


def test_the_sampler_costs_little_and_dies_with_its_rank(make_job: MakeJob, tmp_path: Path) -> None:
    """The share of one core that it takes bounds what a training loses by it."""
    placed(tmp_path, "watts", 90)
    sensor = PowerSensor(name="played", of="node", files=f"{tmp_path}/watts", unit=1)
    job = make_job().model_copy(update={"power": PowerReading(sensor=(sensor,))})
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    arguments = [sys.executable, "-c", RANK, job.model_dump_json()]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as rank:
        assert rank.stdout
        sampler = int(rank.stdout.readline())
        assert rank.stdout.readline() == "read\n"
        began, before = time.monotonic(), _processor_seconds(sampler)
        time.sleep(4)
        share = (_processor_seconds(sampler) - before) / (time.monotonic() - began)
        rank.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{sampler}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{sampler}/exe").exists()
    assert share < 0.002


def _processor_seconds(pid: int) -> float:
    schedstat = Path(f"/proc/{pid}/schedstat")
    if schedstat.exists():
        return int(schedstat.read_text().split()[0]) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
