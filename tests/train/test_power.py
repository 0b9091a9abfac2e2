"""Power and clocks as the driver's files and nvidia-ml-py have them, and the power of each step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.train.small import MakeJob
from twinrun.protocol.job import PowerReading
from twinrun.train import device as power
from twinrun.train.device import NoPowerError, PowerMeter, sensor_of

ADDRESS = "0000:c1:00.0"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch with nvidia-ml-py, which knows the first device alone."""
    known = {"power_draw": {0: 693_500}, "clock_rate": {0: 1755}}
    for name, values in known.items():
        monkeypatch.setattr(f"torch.cuda.{name}", values.__getitem__)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The driver's folder of the device of this rank, which has no files yet."""
    monkeypatch.setattr(power, "pci_address", lambda number: ADDRESS if number == 0 else "0000:c2:00.0")
    monkeypatch.setattr(power, "DEVICES", tmp_path)
    monkeypatch.setattr("torch.version.hip", None)
    folder = tmp_path / ADDRESS / "hwmon" / "hwmon3"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("files", "quantity", "name", "value"),
    [
        ({"power1_average": 417_000_000}, "power", "hwmon, power1_average", 417.0),
        ({"power1_average": 0, "power1_input": 300_000_000}, "power", "hwmon, power1_input", 300.0),
        ({"freq1_input": 1_700_000_000}, "clock", "hwmon, freq1_input", 1700.0),
    ],
)
def test_a_card_is_read_from_its_own_file(
    device: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, int],
    quantity: Any,
    name: str,
    value: float,
) -> None:
    monkeypatch.setattr("torch.version.hip", "6.3")
    for file, number in files.items():
        (device / file).write_text(f"{number}\n")
    found, read = sensor_of(0, quantity)
    assert (found, read()) == (name, value)
    with pytest.raises(NoPowerError, match="no number in"):
        sensor_of(1, quantity)


@pytest.mark.usefixtures("device", "package")
def test_each_step_has_its_power_and_the_source_its_rate(make_job: MakeJob) -> None:
    job = make_job(world_size=4).model_copy(update={"accelerator": True})
    meter = PowerMeter(job, PowerReading(devices_per_card=2))
    deadline = time.monotonic() + 20
    while meter.watts(time.monotonic() - 1, time.monotonic(), timed=False) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    time.sleep(1)
    assert meter.watts(began, time.monotonic(), timed=True) == 693.5
    # Shorter than the time between two samples.
    assert meter.watts(time.monotonic() - 0.01, time.monotonic(), timed=True) == 693.5
    source = meter.source()
    meter.end()
    assert (source.sensor, meter.needed) == ("NVML", 2)
    assert 0 < (source.samples_per_second or 0) < 11
