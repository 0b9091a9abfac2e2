"""Probes against recorded and composed answers, real subprocesses, and the hardware tables."""

from __future__ import annotations

import shutil
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machine.answers import ANSWERS, answering, composed, text_of
from twinrun.foundation.errors import InputError, MachineError, TwinrunError
from twinrun.machine.devices import discover, identify, visible_devices
from twinrun.machine.inventory import detect
from twinrun.machine.probes import ProbedDevice, parse_output, run_probe
from twinrun.manifests.vendor import Probe, load_gpus, load_vendors
from twinrun.protocol.allocation import Device

ROOT = Path(__file__).parents[2]
GPUS = load_gpus(ROOT)
VENDORS = load_vendors(ROOT)
PROBES = {probe.name: (vendor, probe) for vendor in VENDORS.values() for probe in vendor.probe}
PROGRAMS = {
    "nvidia-smi": "nvidia-smi",
    "nvidia-smi-470": "nvidia-smi of drivers before 510",
    "rocm-smi": "rocm-smi",
    "rocm-smi-5": "rocm-smi",
    "amd-smi": "amd-smi",
    "kfd": "KFD topology",
}
# file: (row of gpus.toml, devices, cards, architecture, driver)
KNOWN = {
    "mi100.amd-smi.json": ("mi100", 4, 4, "gfx908", "6.10.5"),
    "mi350x.amd-smi.json": ("mi350x", 8, 8, "gfx950", "6.14.14"),
    "mi300x-cpx.amd-smi.json": (None, 64, None, "gfx942", "6.12.12"),
    "rtx-4090.nvidia-smi.csv": ("rtx-4090", 1, 1, "sm_89", "550.54.14"),
    "mi210.amd-smi.json": ("mi210", 2, 2, "gfx90a", "6.10.5"),
    "mi300a.amd-smi.json": ("mi300a", 4, 4, "gfx942", "6.12.12"),
    "mi325x.amd-smi.json": ("mi325x", 8, 8, "gfx942", "6.12.12"),
    "mi355x.amd-smi.json": ("mi355x", 8, 8, "gfx950", "6.14.14"),
    "mi250.rocm-smi.json": ("mi250", 8, 4, "gfx90a", "6.2.4"),
    "mi250.rocm-smi-5.json": ("mi250", 8, 4, None, "5.18.13"),
    "mi250.amd-smi.json": ("mi250", 8, 4, "gfx90a", "6.14.14"),
    "mi250.kfd.txt": ("mi250", 8, 4, "gfx90a", None),
    "mi250x.rocm-smi.json": ("mi250x", 8, 4, "gfx90a", "6.3.6"),
    "mi250x.amd-smi.json": ("mi250x", 8, 4, "gfx90a", "6.10.5"),
    "mi250x.kfd.txt": ("mi250x", 8, 4, "gfx90a", None),
    "mi250-or-mi250x.rocm-smi.json": (None, 2, None, "gfx90a", "6.14.14"),
    "mi300x.rocm-smi.txt": ("mi300x", 8, 8, "gfx942", "6.10.5"),
    "mi300x.amd-smi.json": ("mi300x", 8, 8, "gfx942", "6.12.12"),
    "mi300x.kfd.txt": ("mi300x", 8, 8, "gfx942", None),
    "mi300x-partitioned.rocm-smi.json": (None, 8, None, "gfx942", "6.10.5"),
    "a100-40gb.nvidia-smi.csv": ("a100-40gb", 8, 8, "sm_80", "525.105.17"),
    "a100-40gb.nvidia-smi-470.csv": ("a100-40gb", 8, 8, None, "470.199.02"),
    "a100-80gb.nvidia-smi.csv": ("a100-80gb", 8, 8, "sm_80", "535.129.03"),
    "a100-80gb-pcie.nvidia-smi.csv": ("a100-80gb-pcie", 2, 2, "sm_80", "535.129.03"),
    "a40.nvidia-smi.csv": ("a40", 1, 1, "sm_86", "535.129.03"),
    "l40s.nvidia-smi.csv": ("l40s", 1, 1, "sm_89", "580.95.05"),
    "h100-80gb.nvidia-smi.csv": ("h100-80gb", 8, 8, "sm_90", "535.216.03"),
    "h100-pcie.nvidia-smi.csv": ("h100-pcie", 2, 2, "sm_90", "570.211.01"),
    "h200.nvidia-smi.csv": ("h200", 1, 1, "sm_90", "580.159.04"),
    "b200.nvidia-smi.csv": ("b200", 8, 8, "sm_100", "580.95.05"),
    "unknown.nvidia-smi.csv": (None, 1, None, "sm_89", "550.54.14"),
    "unknown.rocm-smi.json": (None, 1, None, "gfx1100", None),
}
EMPTY = ("desktop.kfd.txt", "apu.rocm-smi.json", "apu.amd-smi.json")
BROKEN = ("broken.nvidia-smi.txt", "broken.rocm-smi.txt")
VARIABLES = sorted({name for vendor in VENDORS.values() for group in vendor.hidden_by for name in group})


def probe_of(answer: str) -> Probe:
    return PROBES[PROGRAMS[answer.split(".")[1]]][1]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the hardware tables that looks for kernel files in `tmp_path`, nothing on the PATH."""
    shutil.copytree(ROOT / "images" / "vendors", tmp_path / "images" / "vendors")
    shutil.copy(ROOT / "images" / "gpus.toml", tmp_path / "images")
    for manifest in (tmp_path / "images" / "vendors").glob("*/vendor.toml"):
        text = manifest.read_text(encoding="utf-8").replace('"/sys/', f'"{tmp_path}/sys/')
        manifest.write_text(text.replace("timeout_s = 30", "timeout_s = 0.5"), encoding="utf-8")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def install(root: Path, program: str, script: str) -> None:
    path = root / "bin" / program
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("answer", sorted(KNOWN))
def test_answer_becomes_devices(answer: str) -> None:
    row, devices, cards, arch, driver = KNOWN[answer]
    vendor, probe = PROBES[PROGRAMS[answer.split(".")[1]]]
    probed = parse_output(probe, text_of(answer))
    assert [identify(one, vendor, GPUS) for one in probed] == [row] * devices
    assert {vendor.arch_names.get(one.arch or "", one.arch) for one in probed} == {arch}
    assert {one.driver for one in probed} == {driver}
    if row is not None:
        assert devices / GPUS[row].devices_per_card == cards
        assert len({one.unique_id for one in probed}) == devices
        found, nominal = probed[0].memory_bytes, GPUS[row].device_memory_bytes
        assert found is not None
        assert found >= nominal


@pytest.mark.parametrize("answer", EMPTY)
def test_answer_without_devices(answer: str) -> None:
    assert parse_output(probe_of(answer), text_of(answer)) == ()


@pytest.mark.parametrize("probe", [probe for _, probe in PROBES.values()], ids=list(PROBES))
def test_no_answer_means_no_devices(probe: Probe) -> None:
    assert parse_output(probe, "") == ()


@pytest.mark.parametrize("answer", BROKEN)
def test_broken_answer_is_told(answer: str) -> None:
    with pytest.raises(MachineError, match="answer not understood") as caught:
        parse_output(probe_of(answer), text_of(answer))
    assert caught.value.place == probe_of(answer).name
    assert caught.value.found


def test_every_answer_is_tested() -> None:
    files = {path.name for path in ANSWERS.iterdir()} - {"README.md"}
    assert files.isdisjoint(composed())
    assert files | composed().keys() == {*KNOWN, *EMPTY, *BROKEN}


PIECES = st.text(max_size=8) | st.sampled_from(["[", "{", '"', ",", "\\ud800", "9" * 5000])


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Probe, str]:
    answer = draw(st.sampled_from([*KNOWN, *EMPTY, *BROKEN]))
    text = text_of(answer)[:4000]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 40)))
        text = text[:start] + draw(PIECES) + text[end:]
    return probe_of(answer), text


def parsed(probe: Probe, text: str) -> tuple[ProbedDevice, ...]:
    try:
        return parse_output(probe, text)
    except TwinrunError:
        return ()


@settings(deadline=None)
@given(mutated())
def test_mutated_answers_raise_only_our_errors(case: tuple[Probe, str]) -> None:
    for device in parsed(*case):
        assert device.name
        assert ProbedDevice.model_validate_json(device.model_dump_json()) == device


@settings(deadline=None)
@given(st.sampled_from([probe for _, probe in PROBES.values()]), st.text())
def test_any_text_raises_only_our_errors(probe: Probe, text: str) -> None:
    assert all(device.name for device in parsed(probe, text))


def test_deep_nesting_is_told() -> None:
    with pytest.raises(MachineError, match="answer not understood"):
        parse_output(PROBES["rocm-smi"][1], "[" * 100_000)


def test_machine_without_gpus_is_a_cpu(root: Path) -> None:
    machine = detect(root)
    assert (machine.vendor, machine.devices, machine.driver, machine.cpu != "") == ("cpu", (), None, True)
    assert machine.cpu_count >= 1
    assert machine.memory_bytes > 1 << 28
    assert all(name in machine.probe for name in ("nvidia-smi", "KFD topology"))


def test_first_vendor_with_devices_is_taken(root: Path) -> None:
    install(root, "rocm-smi", answering("mi250.rocm-smi.json"))
    machine = detect(root)
    assert machine.vendor == "rocm"
    assert machine.driver == "6.2.4"
    assert len(machine.devices) == 8
    assert machine.devices[3] == Device(
        index=3,
        name="AMD INSTINCT MI250 (MCM) OAM AC MBA",
        gpu="mi250",
        arch="gfx90a",
        memory_bytes=68702699520,
        unique_id="0x5a10c0de00033333",
        driver="6.2.4",
    )
    assert machine.probe == "amd-smi: not on this machine; rocm-smi: 8 devices"


def test_vendor_can_be_chosen(root: Path) -> None:
    install(root, "nvidia-smi", answering("a100-80gb.nvidia-smi.csv"))
    install(root, "amd-smi", answering("mi300x.amd-smi.json"))
    assert detect(root).vendor == "cuda"
    assert detect(root, vendor="rocm").devices[7].gpu == "mi300x"
    assert detect(root, vendor="cpu").devices == ()
    assert detect(root, vendor="cpu").probe == "none asked"


def test_missing_vendor_is_a_machine_error(root: Path) -> None:
    with pytest.raises(MachineError) as caught:
        detect(root, vendor="cuda")
    assert caught.value.exit_code == 3
    assert caught.value.place == "--vendor cuda"
    assert "not on this machine" in str(caught.value)
    assert "invoke doctor" in str(caught.value.hint)


def test_unknown_vendor_names_the_allowed(root: Path) -> None:
    with pytest.raises(InputError) as caught:
        detect(root, vendor="rocn")
    assert caught.value.allowed == ["cpu", "cuda", "rocm"]
    assert caught.value.hint == "did you mean `rocm`?"


def test_old_driver_is_asked_again_without_the_column_it_refuses(root: Path) -> None:
    refusal = "echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2"
    accepted = f"*compute_cap*) {refusal};; *) {answering('a100-40gb.nvidia-smi-470.csv')};;"
    install(root, "nvidia-smi", f'case "$*" in {accepted} esac')
    machine = detect(root)
    assert [device.gpu for device in machine.devices] == ["a100-40gb"] * 8
    assert 'exit status 2 (Field "compute_cap" is not a valid field' in machine.probe


def test_broken_probe_falls_back_and_is_told(root: Path) -> None:
    install(root, "amd-smi", "echo 'Segmentation fault' >&2; exit 139")
    install(root, "rocm-smi", answering("broken.rocm-smi.txt"))
    machine = detect(root)
    assert machine.vendor == "cpu"
    assert "amd-smi: exit status 139 (Segmentation fault)" in machine.probe
    assert "rocm-smi: answer not understood: no JSON in it" in machine.probe
    with pytest.raises(MachineError, match="answer not understood"):
        detect(root, vendor="rocm")


def test_program_that_cannot_be_started_is_told(root: Path) -> None:
    (root / "bin" / "nvidia-smi").write_bytes(b"\x7fELF not really")
    (root / "bin" / "nvidia-smi").chmod(0o755)
    assert "cannot be started: Exec format error" in detect(root).probe


@pytest.mark.parametrize("ending", ["wait", "exit 0"], ids=["waits", "leaves a child behind"])
def test_hanging_probe_ends_with_all_its_children(root: Path, ending: str) -> None:
    pids = root / "pids"
    install(root, "nvidia-smi", f"/bin/sleep 60 & echo $$ $! >> {pids}; {ending}")
    machine = detect(root)
    assert machine.vendor == "cpu"
    assert "cuda: nvidia-smi: no answer within 0.5 s |" in machine.probe
    (calls,) = pids.read_text(encoding="utf-8").splitlines()
    # A killed process is gone a moment later.
    while any(_running(pid) for pid in calls.split()):
        time.sleep(0.05)


def _running(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_kernel_files_are_the_last_resort(root: Path) -> None:
    nodes = root / "sys" / "class" / "kfd" / "kfd" / "topology" / "nodes"
    for section in text_of("mi250.kfd.txt").split("== ")[1:]:
        head, _, rest = section.partition("\n")
        properties, bank = rest.strip().split("\n\n")
        folder = nodes / Path(head).name
        (folder / "mem_banks" / "0").mkdir(parents=True)
        (folder / "properties").write_text(properties, encoding="utf-8")
        (folder / "mem_banks" / "0" / "properties").write_text(bank, encoding="utf-8")
    (nodes / "10").mkdir()
    machine = detect(root)
    assert [device.gpu for device in machine.devices] == ["mi250"] * 8
    assert machine.devices[0].memory_bytes == 68702699520
    assert machine.driver is None


def test_answer_of_kernel_files_is_in_the_order_of_nodes(root: Path) -> None:
    nodes = root / "sys" / "class" / "kfd" / "kfd" / "topology" / "nodes"
    for number in (10, 9, 2):
        (nodes / str(number)).mkdir(parents=True)
    text = run_probe(load_vendors(root)["rocm"].probe[-1])
    assert [line.rpartition("/")[2] for line in text.splitlines()] == ["2", "9", "10"]


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "2,-1,3"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "8"}, []),
        ({"HIP_VISIBLE_DEVICES": "1,1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "GPU-5a10c0de00033333"}, [3]),
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
    install(root, "rocm-smi", answering("mi250.rocm-smi.json"))
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    result = discover(load_vendors(root)["rocm"], GPUS)
    assert [device.index for device in result.devices] == left


def test_hidden_devices_are_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(root, "nvidia-smi", answering("h100-80gb.nvidia-smi.csv"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES= leaves 0 of 8" in detect(root).probe
    with pytest.raises(MachineError, match="CUDA_VISIBLE_DEVICES= leaves 0 of 8"):
        detect(root, vendor="cuda")


@given(st.lists(st.none() | st.text(max_size=6), max_size=6), st.text(max_size=12))
def test_visible_keeps_known_places_once(identifiers: list[str | None], value: str) -> None:
    places, _ = visible_devices(identifiers, [["V"]], {"V": value})
    assert len(set(places)) == len(places)
    assert set(places) <= set(range(len(identifiers)))


def test_published_figures_are_in_the_table() -> None:
    expected = {
        "mi250": (128, 3277, 362),
        "a100-40gb": (40, 1555, 312),
        "a100-80gb": (80, 2039, 312),
        "h100-80gb": (80, 3350, 989.5),
    }
    for row, figures in expected.items():
        gpu = GPUS[row]
        assert (gpu.memory_gb, gpu.bandwidth_gb_s, gpu.peak_bf16_tflops) == figures
    assert GPUS["mi250"].device_peak_flops == 181e12
    assert GPUS["mi250"].device_memory_bytes == 64_000_000_000
    assert GPUS["mi250"].device_bandwidth_bytes_s == pytest.approx(1638.5e9)


def test_architectures_of_the_table_are_those_probes_print() -> None:
    for gpu in GPUS.values():
        assert gpu.arch in VENDORS[gpu.vendor].arch_names.values()
        assert gpu.source


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("gpus.toml", 'id = "mi250x"', 'id = "mi250"', "gpu.2.id: given twice"),
        ("gpus.toml", 'vendor = "rocm"', 'vendor = "rocq"', "gpu.0.vendor: no such vendor"),
        ("gpus.toml", "memory_gb = 64", "memory_gb = 0", "gpu.0.memory_gb"),
        ("gpus.toml", "'MI210\\b'", "'MI210('", "gpu.0.match.0"),
        ("gpus.toml", "compute_units = 104", "compute_unit = 104", "compute_unit: unknown key"),
        ("vendors/rocm/vendor.toml", 'name = "rocm"', 'name = "amd"', "name: the name is not the folder's"),
        ("vendors/rocm/vendor.toml", 'backend = "nccl"', "", "backend: this key is required"),
        ("vendors/cuda/vendor.toml", "columns = [", "rows = [", "unknown key"),
        ("vendors/cuda/vendor.toml", 'format = "csv"', 'format = "xml"', "probe.0.format"),
        ("vendors/cuda/vendor.toml", 'format = "csv"', 'format = "properties"', "also needs: folders, parts"),
    ],
)
def test_broken_table_names_file_and_key(root: Path, file: str, old: str, new: str, expected: str) -> None:
    path = root / "images" / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        detect(root)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_folder_without_manifest_is_told(root: Path) -> None:
    (root / "images" / "vendors" / "tpu").mkdir()
    with pytest.raises(InputError, match=r"tpu/vendor\.toml: cannot be read"):
        detect(root)
