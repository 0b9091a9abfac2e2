"""Images against GPUs that they are, or are not, built for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.refusals import RECIPE, error_message, with_manifests
from tests.commands import invoke
from tests.machine.played import look_below, play
from twinrun.machine.inventory import architectures_needed, detect, misfit
from twinrun.manifests.vendor import load_gpus, load_vendors
from twinrun.planning.project import Project

ROOT = Path(__file__).resolve().parents[2]
GPUS = load_gpus(ROOT)
VENDORS = load_vendors(ROOT)
BOTH_CDNA = ("gfx90a", "gfx942")
BOTH_SM = ("sm_80", "sm_90")
# What the image is built for, the machine, and what cannot run there.
PAIRS = [
    (BOTH_CDNA, "mi250", None),
    (BOTH_CDNA, "mi355x", "gfx950"),
    (BOTH_CDNA, "mi300x-cpx", None),
    (("gfx942",), "mi250", "gfx90a"),
    (BOTH_SM, "a100-80gb", None),
    (BOTH_SM, "b200", "sm_100"),
    (("sm_80",), "l40s", None),
    (("sm_86",), "a100-80gb", "sm_80"),
    (("sm_90a",), "b200", "sm_100"),
    (("sm_90", "compute_90"), "b200", None),
    (("compute_90",), "a100-80gb", "sm_80"),
    ((), "h200", None),
]


@pytest.mark.parametrize(("built", "model", "refused"), PAIRS)
def test_an_image_is_built_for_a_machine_or_not(
    root: Path, monkeypatch: pytest.MonkeyPatch, built: tuple[str, ...], model: str, refused: str | None
) -> None:
    play(root, model, monkeypatch)
    machine = detect(root)
    found = misfit(built=built, machine=machine, vendor=VENDORS[machine.vendor], gpus=GPUS)
    assert found is None if refused is None else found == f"{refused} ({machine.devices[0].name})"


@pytest.mark.parametrize(
    ("built", "model", "expected"),
    [
        (("sm_80", "sm_90"), "h200", "sm_90"),
        (("gfx90a", "gfx942"), "mi250", "gfx90a"),
        (("sm_80", "compute_80"), "h200", "compute_80"),
        (("sm_100",), "h200", "sm_100"),
    ],
)
def test_kernels_are_compiled_for_the_devices_that_are_here(
    root: Path, monkeypatch: pytest.MonkeyPatch, built: tuple[str, ...], model: str, expected: str
) -> None:
    play(root, model, monkeypatch)
    machine = detect(root)
    told: dict[str, Any] = {"built": built, "vendor": VENDORS[machine.vendor], "gpus": GPUS}
    assert architectures_needed(machine=machine, **told) == (expected,)
    assert architectures_needed(machine=machine.model_copy(update={"devices": ()}), **told) == built


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project on a machine whose kernel and device files are looked for beside it."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    look_below(tmp_path, project := with_manifests(tmp_path / "project"))
    return project


def planned(project: Path, vendor: str, built: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Plan a run in a container on the machine that is played, with a stack built so."""
    stack = Project(project).recipe(RECIPE).recipe.stacks.current[vendor]
    manifest = project / "images" / "stacks" / stack / "stack.toml"
    text = re.sub(r"^archs = .*\n", "", manifest.read_text(encoding="utf-8"), flags=re.MULTILINE)
    archs = f"archs = {json.dumps(built)}\n"
    manifest.write_text(text.replace("vendor = ", f"{archs}vendor = ", 1), encoding="utf-8")
    return invoke(project, "run", RECIPE, "--dry", "--json", "--stack", stack, "--engine", "docker")


@pytest.mark.parametrize(
    ("model", "fits", "other", "found"),
    [
        ("mi300x", ("gfx90a", "gfx942"), ("gfx90a",), "gfx942 (AMD Instinct MI300X)"),
        ("h200", ("sm_80", "sm_90"), ("sm_80",), "sm_90 (NVIDIA H200)"),
    ],
)
def test_an_image_for_other_gpus_is_refused_before_anything_runs(
    project: Path, monkeypatch: pytest.MonkeyPatch, model: str, fits: Any, other: Any, found: str
) -> None:
    play(project.parent, model, monkeypatch)
    done = planned(project, GPUS[model].vendor, fits)
    assert done.returncode == 0, done.stderr
    message = error_message(planned(project, GPUS[model].vendor, other), 3)
    assert "the image is not built for this GPU" in message
    assert f"found: {found} allowed: built for {', '.join(other)} hint: " in message
    assert not (project / "runs").exists()


@pytest.mark.parametrize(("model", "stack"), [("mi355x", "rocm7.1-torch2.10"), ("h200", "cuda12.6-torch2.7")])
def test_a_machine_gets_its_stack_and_is_refused_without_device_files_before_anything_is_installed(
    project: Path, monkeypatch: pytest.MonkeyPatch, model: str, stack: str
) -> None:
    play(project.parent, model, monkeypatch)
    line = ("run", RECIPE, "--engine", "venv")
    planned = invoke(project, *line, "--dry", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)["plan"]
    assert (plan["stack"], plan["gpu"]) == (stack, model)
    assert "a run would be refused here" in planned.stderr
    done = invoke(project, *line)
    message = error_message(done, 3)
    assert "this user cannot compute on the GPUs" in message
    assert f"found: missing: {project.parent}/dev/" in message
    assert "load the driver; in a container, start it with the devices: --" in message
    assert "installing" not in done.stderr
    assert not (project / "runs").exists()
