"""GPUs as a driver's library and the kernel's files tell of them, and the hardware tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.machine.played import KERNEL, LIBRARY, play
from tests.machine.stand_in import pynvml
from tests.machine.test_doctor import named
from twinrun.foundation.errors import InputError, MachineError
from twinrun.machine.devices import discover
from twinrun.machine.doctor import diagnose
from twinrun.machine.inventory import detect
from twinrun.manifests.vendor import load_gpus, load_vendors

ROOT = Path(__file__).parents[2]
GPUS = load_gpus(ROOT)
# Those that are no row, or that a row calls otherwise.
ROWS = {"mi250x-cray": "mi250x"} | dict.fromkeys(
    ("unknown", "h100-part", "mi300x-cpx", "mi300x-nps8", "radeon"), None
)


@pytest.mark.parametrize("model", sorted({*LIBRARY, *KERNEL} - {"apu"}))
def test_a_model_is_found(root: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    play(root, model, monkeypatch)
    machine, row = detect(root), ROWS.get(model, model)
    count = (LIBRARY.get(model) or KERNEL[model])[0]
    assert [one.gpu for one in machine.devices] == [row] * count
    assert machine.driver == (LIBRARY[model][4] if model in LIBRARY else "6.12.12")
    assert len({one.unique_id for one in machine.devices}) == count
    if row is not None:
        gpu, found = GPUS[row], machine.devices[0]
        assert found.arch == gpu.arch
        assert found.memory_bytes is not None
        assert found.memory_bytes >= gpu.device_memory_bytes


def test_machine_without_gpus_is_a_cpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(root, "apu", monkeypatch)
    machine = detect(root)
    assert (machine.vendor, machine.devices, machine.driver, machine.cpu != "") == ("cpu", (), None, True)
    assert machine.cpu_count >= 1
    assert machine.memory_bytes > 1 << 28
    assert machine.probe == "cuda: NVML: not on this machine | rocm: KFD topology: 0 devices"


def test_vendor_can_be_chosen_where_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MachineError, match="not on this machine") as caught:
        detect(root, vendor="cuda")
    assert caught.value.place == "--vendor cuda"
    with pytest.raises(InputError) as unknown:
        detect(root, vendor="rocn")
    assert (unknown.value.allowed, unknown.value.hint) == (["cpu", "cuda", "rocm"], "did you mean `rocm`?")
    for model in ("a100-80gb", "mi300x"):
        play(root, model, monkeypatch)
    assert detect(root).vendor == "cuda"
    assert detect(root, vendor="rocm").devices[7].gpu == "mi300x"
    assert (detect(root, vendor="cpu").devices, detect(root, vendor="cpu").probe) == ((), "none asked")


@pytest.mark.parametrize(
    ("fault", "seconds", "said"),
    [
        ("Driver Not Loaded", 0, "answer not understood: NVMLError('Driver Not Loaded')"),
        ("", 9, "no answer within 0.3 s"),
    ],
)
def test_a_driver_that_fails_or_hangs_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch, fault: str, seconds: int, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("PLAYED_GPUS", json.dumps({"fault": fault, "seconds": seconds}))
    assert detect(root).vendor == "cpu"
    assert f"cuda: NVML: {said}" in detect(root).probe
    # The doctor never calls that well.
    assert named(diagnose(root), "GPUs (cuda)").status == "unknown"


def test_devices_are_in_the_order_of_nodes_and_closed_ones_left_out(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(root, "mi300x", monkeypatch)
    (root / "sys/class/kfd/kfd/topology/nodes/5/mem_banks/0/properties").unlink()
    ids = [one.unique_id for one in detect(root).devices]
    assert ids == [f"0x{0x5A10C0DE00000000 + one * 0x11111111:x}" for one in (0, 1, 2, 4, 5, 6, 7)]


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "2,-1,3"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "GPU-5a10c0de33333333"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "GPU-5a10"}, []),
        ({"CUDA_VISIBLE_DEVICES": "4"}, [4]),
        ({"HIP_VISIBLE_DEVICES": "5", "CUDA_VISIBLE_DEVICES": "4"}, [5]),
        ({"ROCR_VISIBLE_DEVICES": "6,7", "HIP_VISIBLE_DEVICES": "1"}, [7]),
        ({"ROCR_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "6,7"}, []),
    ],
)
def test_environment_hides_devices(
    root: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], left: list[int]
) -> None:
    play(root, "mi250", monkeypatch)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    result = discover(load_vendors(root)["rocm"], GPUS)
    assert [device.index for device in result.devices] == left


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("gpus.toml", 'id = "mi250x"', 'id = "mi250"', "gpu.2.id: given twice"),
        ("gpus.toml", 'vendor = "rocm"', 'vendor = "rocq"', "gpu.0.vendor: no such vendor"),
        ("gpus.toml", "'MI210\\b'", "'MI210('", "gpu.0.match.0"),
        ("vendors/rocm/vendor.toml", 'name = "rocm"', 'name = "amd"', "name: the name is not the folder's"),
        ("vendors/rocm/vendor.toml", "parts = [", "rows = [", "unknown key"),
    ],
)
def test_broken_table_names_file_and_key(root: Path, file: str, old: str, new: str, expected: str) -> None:
    path = root / "images" / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        detect(root)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)
