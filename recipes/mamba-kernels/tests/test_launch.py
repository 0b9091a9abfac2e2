"""Which code object runs where, what kernels are handed, and what only a GPU's driver can show."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import checks
import pytest
import torch
import twinrun_kernels
import twinrun_mamba
from cases import EMULATED_BACKENDS, TRAINING_OPTIONS, Case, ConvCase, ScanCase, results
from twinrun_mamba import ArchitectureError, conv_kernels, describe, registry, scan_kernels, selective_scan_fn
from twinrun_mamba.drivers import Emulator, Launch, LaunchError, driver
from twinrun_mamba.launch import Launcher, Timing
from twinrun_mamba.layout import LAYOUTS
from twinrun_mamba.registry import CodeObject, Kernel, compatible

TIMINGS = (Timing(1, 1, 1, 1, 1), Timing(2**40, 2**40, 2**40, 2**40, 2**40), Timing(1, 1, 2**40, 1, 1))


@pytest.mark.parametrize("of", TIMINGS, ids=str)
def test_what_is_by_architecture_changes_no_bit(of: Timing, monkeypatch: pytest.MonkeyPatch) -> None:
    convolutions = (
        ConvCase(torch.bfloat16, length=length, options=TRAINING_OPTIONS, layout=layout)
        for length in (520, 2309)
        for layout in LAYOUTS
    )
    cases: tuple[Case, ...] = (ScanCase(torch.bfloat16, 1, 32, 200), *convolutions)
    for case in cases:
        tensors = case.inputs(torch.Generator().manual_seed(0))
        expected = results(case, tensors, EMULATED_BACKENDS[0], None, 0)
        with monkeypatch.context() as changed:
            for module in (scan_kernels, conv_kernels):
                changed.setattr(module, "timing", lambda _: of)
            found = results(case, tensors, EMULATED_BACKENDS[0], None, 0)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), case


@pytest.mark.parametrize(
    ("arch", "built", "chosen"),
    [
        ("sm_90", ["sm_80", "sm_90", "ptx"], "sm_90"),
        ("sm_86", ["sm_80", "sm_90"], "sm_80"),
        ("sm_75", ["sm_80", "sm_90"], None),
        ("sm_100", ["sm_90", "sm_90a", "ptx"], None),
        ("sm_121", ["sm_120", "sm_12"], "sm_120"),
        ("gfx90a", ["gfx90a", "gfx942"], "gfx90a"),
        ("gfx950", ["gfx90a", "gfx942"], None),
    ],
)
def test_code_that_an_architecture_runs(arch: str, built: list[str], chosen: str | None) -> None:
    assert compatible(arch, built) == chosen


def test_an_architecture_without_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh: None) -> None:
    entry = {"object": "x", "kernels": {}}
    index = {"archs": {"sm_80": entry, "gfx90a": entry, "ptx": entry, "cpu": entry}}
    (tmp_path / "kernels.json").write_text(json.dumps(index), encoding="utf-8")
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path))
    monkeypatch.setattr(registry, "architecture", lambda device: "sm_100")
    device = torch.device("cuda", 0)
    with pytest.raises(ArchitectureError) as caught:
        registry.code_object_of(device)
    assert str(caught.value) == (
        "cuda:0 is sm_100, kernels are built for gfx90a, ptx, sm_80; "
        'allowed: backend="ptx" (compiled by the driver when first used) or backend="reference"'
    )
    assert registry.code_object_of(device, ptx=True).arch == "ptx"
    # Nothing is built.
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("TWINRUN_MAMBA_OBJECTS", str(tmp_path / "empty"))
    case = ScanCase(torch.float32)
    inputs = case.inputs(torch.Generator())
    with pytest.raises(ArchitectureError, match='no kernel is built; allowed: backend="reference"'):
        case.call(inputs, backend=EMULATED_BACKENDS[0], seq_idx=None)
    case.call(inputs, backend="reference", seq_idx=None)


def test_the_choice_is_logged_once_and_made_by_the_environment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    caplog.set_level(logging.INFO, "twinrun_mamba")
    inputs = ScanCase(torch.float32).inputs(torch.Generator())
    for _ in range(3):
        selective_scan_fn(**inputs)
    assert caplog.messages == ["reference on cpu: the tensors are on cpu"]
    monkeypatch.setenv("TWINRUN_MAMBA_BACKEND", EMULATED_BACKENDS[1])
    found = describe("cpu")
    assert (found["backend"], found["reason"]) == (EMULATED_BACKENDS[1], "TWINRUN_MAMBA_BACKEND")


def test_too_many_blocks() -> None:
    code = CodeObject("cpu", Path("none"), {"big": Kernel(128, 0, 0)})
    start = Launcher(code, driver("32"), 0, {("big", 0): (None, 128, 0)})
    with pytest.raises(LaunchError, match="big: 2147483648 blocks of 128 threads, at most 2147483647 blocks"):
        start("big", 2**31, b"")


@pytest.mark.parametrize("able", [False, True])
def test_code_that_does_not_wait_by_itself_does_not_overlap(able: bool) -> None:
    asked: list[bool] = []

    class Asked(Emulator):
        def launch(self, index: int, launch: Launch) -> None:
            asked.append(launch.overlap)

    code_object = CodeObject("sm_90" if able else "sm_80", Path("none"), {"one": Kernel(128, 0, 0)})
    start = Launcher(code_object, Asked(32), 0, {("one", 0): (None, 128, 0)})
    start("one", 1, b"")
    start("one", 1, b"", overlap=True)
    assert asked == [False, able]


def test_importing_needs_no_driver() -> None:
    code = "import twinrun_mamba.scan; print('libcuda.so' in open('/proc/self/maps').read())"
    path = f"{Path(twinrun_mamba.__file__).parents[1]}:{Path(twinrun_kernels.__file__).parents[1]}"
    found = subprocess.check_output([sys.executable, "-c", code], text=True, env={"PYTHONPATH": path})
    assert found == "False\n"


@pytest.mark.gpu
def test_native_ptx() -> None:
    if torch.version.hip:
        pytest.skip("PTX is for NVIDIA's driver")
    checks.fits(ScanCase(torch.bfloat16, length=90, channels=48, states=16), "ptx", "cuda")
