"""Machines with GPUs, as a driver's library and the kernel's files tell of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.machine.stand_in import pynvml

# Model: devices, name, MiB, architecture and driver. The H200 was recorded, others are of public logs.
LIBRARY = {
    "a100-40gb": (8, "NVIDIA A100-SXM4-40GB", 40960, "8.0", "525.105.17"),
    "a100-80gb": (8, "NVIDIA A100-SXM4-80GB", 81920, "8.0", "535.129.03"),
    "a100-80gb-pcie": (2, "NVIDIA A100 80GB PCIe", 81920, "8.0", "535.129.03"),
    "a40": (1, "NVIDIA A40", 46068, "8.6", "535.129.03"),
    "l40s": (1, "NVIDIA L40S", 46068, "8.9", "580.95.05"),
    "rtx-4090": (1, "NVIDIA GeForce RTX 4090", 24564, "8.9", "550.54.14"),
    "h100-80gb": (8, "NVIDIA H100 80GB HBM3", 81559, "9.0", "535.216.03"),
    "h100-pcie": (2, "NVIDIA H100 PCIe", 81559, "9.0", "570.211.01"),
    "h200": (1, "NVIDIA H200", 143771, "9.0", "580.159.04"),
    "b200": (8, "NVIDIA B200", 183359, "10.0", "580.95.05"),
    "unknown": (1, "NVIDIA GeForce RTX 4080", 16376, "8.9", "550.54.14"),
    "h100-part": (1, "NVIDIA H100 80GB HBM3 MIG 2g.20gb", 20096, "9.0", "580.95.05"),
}
# Model: devices, SIMD units of four a compute unit, the architecture's and the PCI number, bytes.
KERNEL = {
    "mi100": (4, 480, 90008, 0x738C, 34342961152),
    "mi210": (2, 416, 90010, 0x740F, 68702699520),
    "mi250": (8, 416, 90010, 0x740C, 68702699520),
    "mi250x": (8, 440, 90010, 0x740C, 68702699520),
    "mi250x-cray": (8, 440, 90010, 0x7408, 68702699520),
    "mi300a": (4, 912, 90402, 0x74A0, 137438953472),
    "mi300x": (8, 1216, 90402, 0x74A1, 206141652992),
    # Mode CPX: an eighth of the compute units each, and in mode NPS1 the whole memory, else an eighth.
    "mi300x-cpx": (64, 152, 90402, 0x74A1, 206141652992),
    "mi300x-nps8": (64, 152, 90402, 0x74A1, 25753026560),
    "mi325x": (8, 1216, 90402, 0x74A5, 274861129728),
    "mi350x": (8, 1024, 90500, 0x75A0, 309220868096),
    "mi355x": (8, 1024, 90500, 0x75A3, 309220868096),
    "radeon": (1, 384, 110000, 0x744C, 25753026560),
    # The graphics of a desktop processor.
    "apu": (1, 8, 100306, 0x164E, 536870912),
}
STAND_IN = Path(__file__).with_name("stand_in")


def described(model: str) -> str:
    """Return the variable that tells the stand-in of NVML what it has."""
    keys = ("count", "name", "mebibytes", "arch", "driver")
    return json.dumps(dict(zip(keys, LIBRARY[model], strict=True)))


def variables(model: str) -> dict[str, str]:
    """Return the variables with which another process has GPUs that NVML knows."""
    return {"PLAYED_GPUS": described(model), "PYTHONPATH": str(STAND_IN)}


def play(root: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process the GPUs of a model, in a checkout whose kernel files are looked for at `root`."""
    if model in LIBRARY:
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)
        monkeypatch.setenv("PLAYED_GPUS", described(model))
    else:
        write_kernel_files(root, model)


def write_kernel_files(root: Path, model: str, driver: str = "6.12.12") -> None:
    """Write the kernel's topology: two processors, then the devices."""
    count, units, arch, number, memory = KERNEL[model]
    for node in range(count + 2):
        facts = {"cpu_cores_count": 64, "simd_count": 0, "gfx_target_version": 0, "device_id": 0}
        if (device := node - 2) >= 0:
            facts = {"cpu_cores_count": 0, "simd_count": units, "simd_per_cu": 4, "gfx_target_version": arch}
            facts |= {"device_id": number, "unique_id": 0x5A10C0DE00000000 + device * 0x11111111}
        bank = {"heap_type": 1, "size_in_bytes": memory}
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        for part, lines in (("properties", facts), ("mem_banks/0/properties", bank)):
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            (folder / part).write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
    (root / "sys/module/amdgpu").mkdir(parents=True, exist_ok=True)
    (root / "sys/module/amdgpu/version").write_text(f"{driver}\n")


def look_below(folder: Path, project: Path) -> None:
    """Let a project look for the kernel's files and devices below a folder, and wait little for a driver."""
    for manifest in (project / "images" / "vendors").glob("*/vendor.toml"):
        text = manifest.read_text(encoding="utf-8").replace('"/sys/', f'"{folder}/sys/')
        text = text.replace('"/dev/', f'"{folder}/dev/').replace("timeout_s = 30", "timeout_s = 0.3")
        manifest.write_text(text, encoding="utf-8")
