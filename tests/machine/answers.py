"""What the probes of machines print: files of tests/hardware_probes, and composed answers of AMD machines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).parents[1] / "hardware_probes"
NODE = "== /sys/class/kfd/kfd/topology/nodes/"
# Model: devices, its name in amd-smi, its PCI number, compute units, architecture, MB and driver.
AMD_SMI: dict[str, tuple[int, str, str, int, str, int, str]] = {
    "mi210": (2, "AMD Instinct MI210", "N/A", 104, "gfx90a", 65520, "6.10.5"),
    "mi250": (8, "AMD Instinct MI250X / MI250", "0x740c", 104, "gfx90a", 65520, "6.14.14"),
    "mi250x": (8, "AMD Instinct MI250X / MI250", "0x740c", 110, "gfx90a", 65520, "6.10.5"),
    "mi300a": (4, "AMD Instinct MI300A", "N/A", 228, "gfx942", 131072, "6.12.12"),
    "mi300x": (8, "AMD Instinct MI300X", "0x74a1", 304, "gfx942", 196592, "6.12.12"),
    # Mode CPX: an eighth of the compute units each, and of the memory in mode NPS1 the whole.
    "mi300x-cpx": (64, "AMD Instinct MI300X", "0x74a1", 38, "gfx942", 196592, "6.12.12"),
    "mi350x": (8, "AMD Instinct MI350X", "N/A", 256, "gfx950", 294896, "6.14.14"),
    "mi100": (4, "AMD Instinct MI100", "N/A", 120, "gfx908", 32752, "6.10.5"),
    "mi325x": (8, "AMD Instinct MI325X", "N/A", 304, "gfx942", 262128, "6.12.12"),
    "mi355x": (8, "AMD Instinct MI355X", "N/A", 256, "gfx950", 294896, "6.14.14"),
}
# Model: devices, its name in rocm-smi, PCI number, the board's, architecture as spelt there, bytes, driver.
ROCM_SMI: dict[str, tuple[int, str, str, str, str, int, str]] = {
    "mi250": (8, "AMD INSTINCT MI250 (MCM) OAM AC MBA", "0x740c", "D65210V", "gfx9010", 68702699520, "6.2.4"),
    "mi250x": (
        *(8, "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", "0x7408", "D65201"),
        *("gfx9010", 68702699520, "6.3.6"),
    ),
    "mi250-or-mi250x": (
        *(2, "AMD Instinct MI250X / MI250", "0x740c", "D65210V"),
        *("gfx9010", 68702699520, "6.14.14"),
    ),
    "mi300x": (8, "AMD Instinct MI300X", "0x74a1", "M3000100", "gfx942", 206141652992, "6.10.5"),
    "mi300x-partitioned": (8, "AMD Instinct MI300X", "0x74a1", "M3000100", "gfx942", 25753026560, "6.10.5"),
}
# Units of four a compute unit, the architecture's number, the PCI number and bytes in the kernel's files.
KERNEL = {
    "mi250": (416, 90010, 0x740C, 68702699520),
    "mi250x": (440, 90010, 0x740C, 68702699520),
    "mi300x": (1216, 90402, 0x74A1, 206141652992),
}
WARNING = "WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status\n\n"


@cache
def composed() -> Mapping[str, str]:
    """Return the composed answers by name."""
    made = {f"{model}.amd-smi.json": _amd_smi(model) for model in AMD_SMI}
    made |= {f"{model}.rocm-smi.json": _rocm_smi(model) for model in ROCM_SMI if model != "mi300x"}
    made["mi300x.rocm-smi.txt"] = WARNING + _rocm_smi("mi300x")
    made["mi250.rocm-smi-5.json"] = _rocm_smi_5()
    return made | {f"{model}.kfd.txt": _kernel_files(model) for model in KERNEL}


def text_of(answer: str) -> str:
    """Return an answer as a probe gets it."""
    return composed().get(answer) or (ANSWERS / answer).read_text(encoding="utf-8")


def answering(answer: str) -> str:
    """Return the line of a shell that prints an answer."""
    return f"printf %s {shlex.quote(text_of(answer))}"


def _amd_smi(model: str) -> str:
    count, name, number, units, arch, megabytes, driver = AMD_SMI[model]
    rows: list[dict[str, Any]] = []
    for index in range(count):
        # The two forms differ in all digits of the device, or in the last one alone.
        digits = f"1{index:04X}" if number == "N/A" else str(index) * 5
        asic = {
            "market_name": name,
            "vendor_id": "0x1002",
            "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
            "device_id": number,
            "rev_id": "0x00",
            "asic_serial": f"0x5A10C0DE000{digits}",
            "oam_id": index,
            "num_compute_units": units,
            "target_graphics_version": arch,
        }
        vram = {"type": "HBM", "vendor": "N/A", "size": {"value": megabytes, "unit": "MB"}}
        rows.append(
            {"gpu": index, "asic": asic, "vram": vram, "driver": {"name": "amdgpu", "version": driver}}
        )
    # That of a Cray EX blade prints a list.
    return json.dumps(rows if model == "mi250x" else {"gpu_data": rows}) + "\n"


def _card(index: int, memory: int) -> dict[str, str]:
    return {
        "Unique ID": f"0x5a10c0de000{str(index) * 5}",
        "VRAM Total Memory (B)": str(memory),
        "VRAM Total Used Memory (B)": "11665408",
    }


def _rocm_smi(model: str) -> str:
    count, series, number, board, arch, memory, driver = ROCM_SMI[model]
    cards: dict[str, dict[str, str]] = {}
    for index in range(count):
        cards[f"card{index}"] = _card(index, memory) | {
            "Card Series": series,
            "Card Model": number,
            "Card Vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
            "Card SKU": board,
            "Node ID": str(index + 2),
            "GFX Version": arch,
        }
    return json.dumps(cards | {"system": {"Driver version": driver}}) + "\n"


def _rocm_smi_5() -> str:
    """Return the answer of ROCm 5, with other keys and neither node nor architecture."""
    told = {
        "Card series": "AMD INSTINCT MI250 (MCM) OAM AC MBA",
        "Card model": "0x0b0c",
        "Card vendor": "Advanced Micro Devices, Inc. [AMD/ATI]",
        "Card SKU": "D65209",
    }
    cards = {f"card{index}": _card(index, 68702699520) | told for index in range(8)}
    return json.dumps(cards | {"system": {"Driver version": "5.18.13"}}) + "\n"


def _kernel_files(model: str) -> str:
    """Return the kernel's topology: two processors, then eight devices."""
    units, arch, number, memory = KERNEL[model]
    text = ""
    for node in range(10):
        device = node - 2
        facts = {"cpu_cores_count": 64, "simd_count": 0, "mem_banks_count": 1, "gfx_target_version": 0}
        facts |= {"vendor_id": 0, "device_id": 0}
        bank = {"heap_type": 0, "size_in_bytes": 540934782976, "flags": 0}
        if device >= 0:
            facts = {"cpu_cores_count": 0, "simd_count": units, "mem_banks_count": 1, "caches_count": 206}
            facts |= {"wave_front_size": 64, "simd_per_cu": 4, "gfx_target_version": arch, "vendor_id": 4098}
            facts |= {"device_id": number, "drm_render_minor": 128 + device, "local_mem_size": 0}
            facts |= {"unique_id": 6489999999999000000 + device}
            bank |= {"heap_type": 1, "size_in_bytes": memory}
        parts = ("".join(f"{name} {value}\n" for name, value in part.items()) for part in (facts, bank))
        text += f"{NODE}{node}\n" + "\n".join(parts) + "\n"
    return text
