"""Images against GPUs that they are, or are not, built for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.refusals import RECIPE, error_message, with_manifests
from tests.commands import invoke
from tests.machine.answers import answering, text_of
from tests.machine.test_inventory import PROGRAMS
from twinrun.machine.architecture import architectures_needed, misfit, runs_on
from twinrun.machine.devices import identify
from twinrun.machine.probes import parse_output
from twinrun.manifests.vendor import Vendor, load_gpus, load_vendors
from twinrun.planning.project import Project
from twinrun.protocol.allocation import Device, Machine

ROOT = Path(__file__).resolve().parents[2]
GPUS = load_gpus(ROOT)
VENDORS = load_vendors(ROOT)
BOTH_CDNA = ("gfx90a", "gfx942")
BOTH_SM = ("sm_80", "sm_90")
# What the image is built for, the recorded or composed answer of a probe, and what cannot run there.
PAIRS = [
    (BOTH_CDNA, "mi250.rocm-smi.json", None),
    (BOTH_CDNA, "mi250x.amd-smi.json", None),
    (BOTH_CDNA, "mi300x.amd-smi.json", None),
    (BOTH_CDNA, "mi300x.kfd.txt", None),
    (BOTH_CDNA, "mi355x.amd-smi.json", "gfx950"),
    (BOTH_CDNA, "mi300x-partitioned.rocm-smi.json", None),
    (BOTH_CDNA, "unknown.rocm-smi.json", "gfx1100"),
    # The probe tells no architecture: that of the row in images/gpus.toml counts.
    (("gfx90a",), "mi250.rocm-smi-5.json", None),
    (("gfx942",), "mi250.rocm-smi-5.json", "gfx90a"),
    (("gfx90a",), "mi300x.rocm-smi.txt", "gfx942"),
    (("gfx942",), "mi250.kfd.txt", "gfx90a"),
    (BOTH_SM, "a100-80gb.nvidia-smi.csv", None),
    (BOTH_SM, "h100-80gb.nvidia-smi.csv", None),
    (BOTH_SM, "h200.nvidia-smi.csv", None),
    (BOTH_SM, "b200.nvidia-smi.csv", "sm_100"),
    (("sm_80",), "a100-40gb.nvidia-smi-470.csv", None),
    (("sm_80",), "a40.nvidia-smi.csv", None),
    (("sm_80",), "l40s.nvidia-smi.csv", None),
    (("sm_80",), "h200.nvidia-smi.csv", "sm_90"),
    (("sm_86",), "a100-80gb.nvidia-smi.csv", "sm_80"),
    (("sm_90",), "a100-40gb.nvidia-smi.csv", "sm_80"),
    (("sm_90a",), "h100-pcie.nvidia-smi.csv", None),
    (("sm_90a",), "b200.nvidia-smi.csv", "sm_100"),
    (("sm_90", "compute_90"), "b200.nvidia-smi.csv", None),
    (("compute_90",), "a100-80gb.nvidia-smi.csv", "sm_80"),
    ((), "h200.nvidia-smi.csv", None),
]


def machine_of(answer: str) -> tuple[Machine, Vendor]:
    """Return the machine whose probe gave `answer`."""
    wanted = PROGRAMS[answer.split(".")[1]]
    vendor, probe = next(
        (vendor, probe) for vendor in VENDORS.values() for probe in vendor.probe if probe.name == wanted
    )
    devices = tuple(
        Device(
            index=index,
            gpu=identify(one, vendor, GPUS),
            arch=None if one.arch is None else vendor.arch_names.get(one.arch, one.arch),
            **one.model_dump(exclude={"arch", "compute_units"}),
        )
        for index, one in enumerate(parse_output(probe, text_of(answer)))
    )
    machine = Machine(
        vendor=vendor.name,
        devices=devices,
        driver=None,
        host="host",
        cpu="cpu",
        cpu_count=1,
        memory_bytes=1,
        kernel="kernel",
        probe=answer,
    )
    return machine, vendor


@pytest.mark.parametrize(("built", "answer", "refused"), PAIRS)
def test_pair(built: tuple[str, ...], answer: str, refused: str | None) -> None:
    machine, vendor = machine_of(answer)
    found = misfit(built=built, machine=machine, vendor=vendor, gpus=GPUS)
    assert found is None if refused is None else found == f"{refused} ({machine.devices[0].name})"


def test_a_device_of_unknown_architecture_is_not_held_against_an_image() -> None:
    machine, vendor = machine_of("mi250.rocm-smi-5.json")
    unknown = tuple(device.model_copy(update={"gpu": None}) for device in machine.devices)
    changed = machine.model_copy(update={"devices": unknown})
    assert misfit(built=("gfx942",), machine=changed, vendor=vendor, gpus=GPUS) is None


def test_a_machine_of_another_vendor_only_plans() -> None:
    machine, _ = machine_of("h200.nvidia-smi.csv")
    assert misfit(built=("gfx90a",), machine=machine, vendor=VENDORS["rocm"], gpus=GPUS) is None


@pytest.mark.parametrize(
    ("built", "answer", "expected"),
    [
        (("sm_80", "sm_90"), "h200.nvidia-smi.csv", ("sm_90",)),
        (("gfx90a", "gfx942"), "mi250.rocm-smi-5.json", ("gfx90a",)),
        (("sm_80", "compute_80"), "h200.nvidia-smi.csv", ("compute_80",)),
        (("sm_100",), "h200.nvidia-smi.csv", ("sm_100",)),
    ],
)
def test_kernels_are_compiled_for_the_devices_that_are_here(
    built: tuple[str, ...], answer: str, expected: tuple[str, ...]
) -> None:
    machine, vendor = machine_of(answer)
    assert architectures_needed(built=built, machine=machine, vendor=vendor, gpus=GPUS) == expected
    nobody = machine.model_copy(update={"devices": ()})
    assert architectures_needed(built=built, machine=nobody, vendor=vendor, gpus=GPUS) == built


def test_versions_count_as_numbers() -> None:
    cuda = VENDORS["cuda"]
    assert runs_on("sm_100", "sm_103", cuda)
    assert not runs_on("sm_100a", "sm_103", cuda)
    assert not runs_on("sm_90", "sm_100", cuda)
    assert runs_on("compute_90", "sm_100", cuda)
    assert not runs_on("gfx90a", "gfx90c", VENDORS["rocm"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    return with_manifests(tmp_path / "project")


def planned(
    root: Path, answer: str, built: tuple[str, ...], *options: str
) -> subprocess.CompletedProcess[str]:
    """Plan a run on a machine whose probe answers so, with a stack built so."""
    vendor = machine_of(answer)[1].name
    stack = Project(root).recipe(RECIPE).recipe.stacks.current[vendor]
    manifest = root / "images" / "stacks" / stack / "stack.toml"
    text = re.sub(r"^archs = .*\n", "", manifest.read_text(encoding="utf-8"), flags=re.MULTILINE)
    archs = f"archs = {json.dumps(built)}\n"
    manifest.write_text(text.replace("vendor = ", f"{archs}vendor = ", 1), encoding="utf-8")
    program = root.parent / "bin" / answer.split(".")[1]
    program.write_text(f"#!/bin/sh\n{answering(answer)}\n", encoding="utf-8")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return invoke(
        root, "run", RECIPE, "--dry", "--json", "--stack", stack, *options, variables={"PATH": path}
    )


# What an image for it is built for, what another is built for, and its own architecture.
FIVE = {
    "mi250.rocm-smi.json": (("gfx90a",), ("gfx942",), "gfx90a"),
    "mi300x.rocm-smi.txt": (("gfx90a", "gfx942"), ("gfx90a",), "gfx942"),
    "a100-80gb.nvidia-smi.csv": (("sm_80", "sm_90"), ("sm_90",), "sm_80"),
    "h100-80gb.nvidia-smi.csv": (("sm_80", "sm_90"), ("sm_80",), "sm_90"),
    "h200.nvidia-smi.csv": (("sm_80", "sm_90"), ("sm_80",), "sm_90"),
}


@pytest.mark.parametrize("answer", FIVE)
def test_an_image_for_other_gpus_is_refused_before_anything_runs(root: Path, answer: str) -> None:
    fits, other, arch = FIVE[answer]
    done = planned(root, answer, fits, "--engine", "docker")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    assert plan["engine"] == "docker"

    message = error_message(planned(root, answer, other, "--engine", "docker"), 3)
    assert f"error: twinrun/{plan['stack']}:" in message
    assert "the image is not built for this GPU" in message
    found = f"{arch} ({machine_of(answer)[0].devices[0].name})"
    assert f"found: {found} allowed: built for {', '.join(other)} hint: " in message
    assert not (root / "runs").exists()


def test_what_runs_no_image_is_not_refused(root: Path) -> None:
    done = planned(root, "h200.nvidia-smi.csv", ("sm_80",), "--engine", "venv")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("answer", ["mi300x.amd-smi.json", "h200.nvidia-smi.csv"])
def test_a_gpu_without_its_device_files_is_refused_before_anything_is_installed(
    tmp_path: Path, answer: str
) -> None:
    project, programs = with_manifests(tmp_path / "project"), tmp_path / "bin"
    programs.mkdir()
    program = programs / answer.split(".")[1]
    program.write_text(f"#!/bin/sh\n{answering(answer)}\n", encoding="utf-8")
    program.chmod(0o755)
    for manifest in (project / "images" / "vendors").glob("*/vendor.toml"):
        text = manifest.read_text(encoding="utf-8")
        manifest.write_text(text.replace('"/dev/', f'"{tmp_path}/dev/'), encoding="utf-8")
    variables = {"PATH": f"{programs}:{os.environ['PATH']}"}
    line = ("run", RECIPE, "--engine", "venv")
    planned = invoke(project, *line, "--dry", variables=variables)
    assert planned.returncode == 0, planned.stderr
    assert "a run would be refused here" in planned.stderr
    assert "this user cannot compute on the GPUs" in planned.stderr
    done = invoke(project, *line, variables=variables)
    message = error_message(done, 3)
    assert "this user cannot compute on the GPUs" in message
    assert f"found: missing: {tmp_path}/dev/" in message
    assert "load the driver; in a container, start it with the devices: --" in message
    assert "installing" not in done.stderr
    assert not (project / "runs").exists()
