"""What the vendors advise for a machine, as `invoke doctor` says it: nothing where their driver is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.records import ROOT
from twinrun.machine.checks import check_advice
from twinrun.machine.devices import Discovery
from twinrun.manifests.vendor import load_gpus, load_vendors
from twinrun.protocol.allocation import Device

STACKS = tuple(path.name for path in (ROOT / "images/stacks").iterdir())


def checked(
    vendor: str, gpu: str, driver: str, files: Path, **settings: str
) -> dict[str, tuple[str, str, str]]:
    """Return status, finding and hint of each check on a machine whose files lie below a folder."""
    loaded = load_vendors(ROOT)[vendor]
    advice = []
    for one in loaded.advice:
        path = files / one.name
        if one.file and one.name in settings:
            path.write_text(settings[one.name], encoding="utf-8")
        advice.append(one.model_copy(update={"file": str(path)} if one.file else {}))
    loaded = loaded.model_copy(update={"device_files": (f"{files}/kfd",), "advice": tuple(advice)})
    row = load_gpus(ROOT)[gpu]
    device = Device(
        name=row.name, gpu=gpu, memory_bytes=1, arch=row.arch, driver=driver, unique_id=None, index=0
    )
    found = check_advice(loaded, Discovery(devices=(device,)), STACKS)
    return {one.name: (one.status, one.found, one.hint or "") for one in found}


def test_settings_are_named_with_what_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kfd").touch()
    for name in ("HIP_FORCE_DEV_KERNARG", "NCCL_MIN_NCHANNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_TUNABLEOP_ENABLED", "1")
    settings = {"NUMA balancing": "1\n", "IOMMU": "quiet iommu=pt\n"}
    found = checked("rocm", "mi300x", "6.10.5", tmp_path, **settings)
    assert {name: status for name, (status, _, _) in found.items()} == {
        "driver (rocm)": "warn",
        "NUMA balancing": "warn",
        "IOMMU": "ok",
        "kernel arguments": "absent",
        "channels of RCCL": "absent",
        "TunableOp": "ok",
    }
    assert found["driver (rocm)"][1] == "6.10.5: rocm7.1-torch2.10 needs 6.12.12"
    assert "sysctl kernel.numa_balancing=0" in found["NUMA balancing"][2]
    assert "rocm.docs.amd.com" in found["NUMA balancing"][2]
    # Of an older model less is advised, and a kernel's own driver has no number of its own.
    older = checked("rocm", "mi250", "6.8.0-60-generic", tmp_path, **settings)
    assert older.keys() == found.keys() - {"driver (rocm)", "kernel arguments", "channels of RCCL"}


@pytest.mark.parametrize(
    ("driver", "status"), [("580.65.06", "ok"), ("570.124.06", "warn"), ("470.1", "warn")]
)
def test_each_stack_has_its_oldest_driver(tmp_path: Path, driver: str, status: str) -> None:
    (tmp_path / "kfd").touch()
    found = checked("cuda", "h100-80gb", driver, tmp_path)["driver (cuda)"]
    assert found[0] == status
    assert ("cuda12.6-torch2.7 needs" in found[1]) == (driver == "470.1")
