"""Every AMD model as the tools of each ROCm release print it: detected, with the right stack.

Keys and spellings are those of the tools' own source at each release; see tests/hardware_probes/README.md.
"""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.machine.test_inventory import root as root_fixture
from twinrun.machine.devices import discover
from twinrun.manifests.vendor import load_gpus, load_vendors

ROOT = Path(__file__).parents[2]
GPUS = load_gpus(ROOT)
root = root_fixture


@dataclass(frozen=True, kw_only=True)
class PlayedModel:
    """A GPU model, as tools of several ages print it."""

    row: str
    old: str
    """Series in rocm-smi until ROCm 6.1."""
    name: str
    number: int
    """Of the PCI device."""
    memory_mb: int
    """Of a device, as the driver gives it."""
    since: float
    """First ROCm release that has it."""
    stack: str = "rocm6.3-torch2.7"


MODELS = (
    PlayedModel(
        row="mi210",
        old="AMD INSTINCT MI210",
        name="AMD Instinct MI210",
        number=0x740F,
        memory_mb=65520,
        since=5,
    ),
    PlayedModel(
        row="mi250",
        old="AMD INSTINCT MI250 (MCM) OAM AC MBA",
        name="AMD Instinct MI250X / MI250",
        number=0x740C,
        memory_mb=65520,
        since=5,
    ),
    PlayedModel(
        row="mi250x",
        old="AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2",
        name="AMD Instinct MI250X / MI250",
        number=0x7408,
        memory_mb=65520,
        since=5,
    ),
    PlayedModel(
        row="mi300a",
        old="AMD Instinct MI300A",
        name="AMD Instinct MI300A",
        number=0x74A0,
        memory_mb=128304,
        since=6,
    ),
    PlayedModel(
        row="mi300x",
        old="AMD Instinct MI300X",
        name="AMD Instinct MI300X",
        number=0x74A1,
        memory_mb=196592,
        since=6,
    ),
    PlayedModel(
        row="mi325x",
        old="AMD Instinct MI325X",
        name="AMD Instinct MI325X",
        number=0x74A5,
        memory_mb=262128,
        since=6.2,
    ),
    PlayedModel(
        row="mi355x",
        old="AMD Instinct MI355X",
        name="AMD Instinct MI355X",
        number=0x75A3,
        memory_mb=294896,
        since=7,
        stack="rocm7.1-torch2.10",
    ),
)
RELEASES = (5.4, 5.7, 6.0, 6.1, 6.3, 7.1)
PAIRS = [(model, release) for model in MODELS for release in RELEASES if release >= model.since]


def amd_smi(model: PlayedModel, release: float, count: int) -> str:
    """Return the script of an amd-smi of `release`."""
    if release < 6:
        return "echo 'amd-smi: error: unrecognized arguments: --vram' >&2; exit 2"
    name = model.name if release >= 6.3 else model.old
    rows = []
    for index in range(count):
        asic: dict[str, object] = {
            "market_name": name,
            "vendor_id": "0x1002",
            "device_id": hex(model.number),
            "rev_id": "0x2",
        }
        asic["asic_serial"] = f"0x5A10C0DE{index:08X}"
        if release >= 6.3:
            gpu = GPUS[model.row]
            asic |= {"num_compute_units": gpu.compute_units, "target_graphics_version": gpu.arch}
        vram: dict[str, object] = {
            "type": "HBM",
            "vendor": "N/A",
            "size": {"value": model.memory_mb, "unit": "MB"},
        }
        driver = {"name": "amdgpu", "version": "6.10.5"}
        if release < 6.1:
            vram = {"vram_type": "HBM", "vram_vendor": "N/A", "vram_size_mb": model.memory_mb}
            driver = {"driver_name": "amdgpu", "driver_version": "6.10.5", "driver_date": "2015/01/01 00:00"}
        rows.append({"gpu": index, "asic": asic, "vram": vram, "driver": driver})
    return f"/bin/cat <<'END'\n{json.dumps({'gpu_data': rows} if release >= 6.4 else rows)}\nEND"


def rocm_smi(model: PlayedModel, release: float, count: int) -> str:
    """Return the script of a rocm-smi of `release`."""
    cards: dict[str, dict[str, str]] = {}
    for index in range(count):
        card = {"Unique ID": f"0x5a10c0de{index:08x}", "VRAM Total Memory (B)": str(model.memory_mb << 20)}
        if release >= 6.2:
            card |= {
                "Card Series": model.name,
                "Card PlayedModel": hex(model.number),
                "Node ID": str(index + 2),
            }
            card["GFX Version"] = {"gfx90a": "gfx9010"}.get(GPUS[model.row].arch, GPUS[model.row].arch)
        else:
            card |= {"Card series": model.old, "Card model": "0x0b0c"}
        cards[f"card{index}"] = card
    return f"/bin/cat <<'END'\n{json.dumps(cards | {'system': {'Driver version': '6.10.5'}})}\nEND"


def play(folder: Path, model: PlayedModel, release: float, count: int, *, tools: tuple[str, ...]) -> None:
    """Put the tools of a machine with `count` devices of `model` on the PATH of a test."""
    scripts = {"amd-smi": amd_smi(model, release, count), "rocm-smi": rocm_smi(model, release, count)}
    for name in tools:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{scripts[name]}\n", encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


def tools_of(release: float) -> tuple[str, ...]:
    """Return the tools that a release brings: amd-smi came with ROCm 5.7."""
    return ("rocm-smi",) if release < 5.7 else ("amd-smi", "rocm-smi")


@pytest.mark.parametrize("cards", [1, 4, 8])
@pytest.mark.parametrize(("model", "release"), PAIRS, ids=[f"{one.row}-{release}" for one, release in PAIRS])
def test_model_is_found_whatever_release_prints_it(
    root: Path, model: PlayedModel, release: float, cards: int
) -> None:
    devices = cards * GPUS[model.row].devices_per_card
    play(root / "bin", model, release, devices, tools=tools_of(release))
    found = discover(load_vendors(root)["rocm"], GPUS)
    assert [(one.gpu, one.memory_bytes) for one in found.devices] == [
        (model.row, model.memory_mb << 20)
    ] * devices
    assert {one.driver for one in found.devices} == {"6.10.5"}
    assert {one.arch for one in found.devices} <= {None, GPUS[model.row].arch}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.row)
def test_rocm_smi_alone_leaves_open_what_it_cannot_tell(root: Path, model: PlayedModel) -> None:
    play(root / "bin", model, 7.1, 1, tools=("rocm-smi",))
    (device,) = discover(load_vendors(root)["rocm"], GPUS).devices
    # One name for both, and rocm-smi counts no compute units.
    assert device.gpu == (None if model.row in ("mi250", "mi250x") else model.row)
    assert device.arch == GPUS[model.row].arch


@pytest.mark.parametrize("model", [one for one in MODELS if one.row != "mi250x"], ids=lambda model: model.row)
def test_number_stands_for_a_name_that_the_tool_lacks(root: Path, model: PlayedModel) -> None:
    script = amd_smi(model, 7.1, 1).replace(model.name, "N/A")
    (root / "bin" / "amd-smi").write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    (root / "bin" / "amd-smi").chmod(0o755)
    (device,) = discover(load_vendors(root)["rocm"], GPUS).devices
    assert (device.name, device.gpu) == (hex(model.number), model.row)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.row)
def test_played_machine_gets_the_stack_for_it_and_every_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: PlayedModel
) -> None:
    play(tmp_path, model, max(6.3, model.since), 8, tools=("amd-smi", "rocm-smi"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    done = invoke(ROOT, "run", "recipes/mpt7b-scaling", "--dry", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["plan"]["stack"], plan["plan"]["gpu"]) == (model.stack, model.row)
