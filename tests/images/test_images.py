"""The images that Debian's packages are enough for, built for real: their checks, and a run inside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import docker
import pytest

from twinrun.execution.containers import LABEL
from twinrun.manifests.stack import load_stack
from twinrun.planning.project import Project
from twinrun.results.reading import read_record

pytestmark = pytest.mark.image

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/mpt7b-scaling"
# Stack to vendor and to checks that must be among its own.
CPU = {"versions", "imports", "matmul", "attention", "collective", "composer_step", "mamba_ops", "repeats"}
STACKS = {"cpu": ("cpu", CPU), "rocm-debian": ("rocm", {"versions", "imports", "hip_kernels", "rdma"})}
# Nothing of these may be in an image that only runs; ninja, which DeepSpeed requires, compiles nothing.
COMPILERS = ["gcc", "cc", "g++", "c++", "cc1", "cc1plus", "clang", "ld", "as", "nvcc", "make", "cmake"]
# Nothing at all may be in these, not even an empty file or folder.
EMPTY = (
    *("var/cache/apt", "var/cache/ldconfig", "var/lib/apt/lists", "var/log", "var/tmp", "tmp"),
    *("root/.cache", "twinrun/home"),
)
# What package tools keep of the state before, or of their own work.
LEFT = ("var/cache/debconf/*-old", "var/cache/debconf/tmp.*", "var/lib/dpkg/*-old", "etc/*-", "**/*.dpkg-*")
PACKED = ("**/ensurepip/_bundled/*.whl", "**/python-wheels/*.whl", "**/*.deb")
LOOK = """
import glob, json, os, shutil, sys
programs, places, patterns = json.loads(sys.argv[1])
roots = [name for name in sorted(os.listdir("/")) if name not in ("proc", "sys", "dev", "run")]
print(json.dumps([
    [name for name in programs if shutil.which(name)],
    [os.path.join(folder, name) for place in places for folder, folders, files in os.walk("/" + place)
     for name in folders + files],
    [path for pattern in patterns for path in (
        glob.glob("/" + pattern) if not pattern.startswith("**/") else
        [found for root in roots for found in glob.glob("/" + root + "/" + pattern, recursive=True)]
    )],
]))
"""
HOUR_SECONDS = 3600
PATIENCE_SECONDS = 300


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "twinrun", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def invoke(*arguments: str) -> str:
    """Run a command that must succeed and return what it printed."""
    process = start(*arguments)
    out, err = process.communicate(timeout=HOUR_SECONDS)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def containers() -> list[Any]:
    with contextlib.closing(docker.from_env()) as client:
        return client.containers.list(all=True, filters={"label": f"{LABEL}=run"})


def image_id(stack: str) -> str | None:
    with contextlib.closing(docker.from_env()) as client:
        return client.images.get(load_stack(ROOT, stack).image()).id


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("rocm-debian", marks=pytest.mark.nightly)], ids=str
)
def stack(request: pytest.FixtureRequest) -> str:
    """A stack whose image is there."""
    name = str(request.param)
    invoke("build", "--vendor", STACKS[name][0], "--stack", name)
    return name


@pytest.fixture(scope="module")
def cpu() -> str:
    invoke("build", "--vendor", "cpu")
    return "cpu"


def test_the_checks_of_a_stack_pass_inside_its_image(stack: str) -> None:
    outcomes = json.loads(invoke("doctor", "--stack", stack, "--engine", "docker", "--json"))
    outputs = {outcome["check"]: outcome["output"] for outcome in outcomes}
    assert STACKS[stack][1] <= outputs.keys()
    assert all(outcome["passed"] for outcome in outcomes)
    if "matmul" in outputs:
        assert "on CPU" in outputs["matmul"]
    if "flash-attention" in load_stack(ROOT, stack).stack.kernels:
        assert "twinrun-attention, interpreted, bf16 on CPU" in outputs["attention"]
    for arch in load_stack(ROOT, stack).stack.archs:
        assert arch in outputs["hip_kernels"]
    assert containers() == []


def test_a_build_leaves_what_was_measured_in_the_image(stack: str) -> None:
    loaded = load_stack(ROOT, stack)
    folder = ROOT / "runs" / "images" / stack / loaded.image().rpartition(":")[2]
    contents = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    # A build of the committed inputs that gave another ID would have failed.
    assert loaded.committed, f"{stack}: commit manifest.json as contents.json"
    assert contents["digest"] == loaded.committed.digest == image_id(stack)
    assert contents["measured"]["user"] == "1000:1000"
    bill = json.loads((folder / "sbom.cdx.json").read_text(encoding="utf-8"))
    system = {part["name"] for part in bill["components"] if part["purl"].startswith("pkg:deb/")}
    assert system == contents["measured"]["system_packages"].keys()
    assert all(part["hashes"] for part in bill["components"] if part["name"] in system)


def test_nothing_of_the_making_is_in_an_image(stack: str) -> None:
    places = json.dumps([COMPILERS if stack == "cpu" else [], EMPTY, [*LEFT, *PACKED]])
    with contextlib.closing(docker.from_env(timeout=PATIENCE_SECONDS)) as client:
        image, look = load_stack(ROOT, stack).image(), ["python3", "-c", LOOK, places]
        output = client.containers.run(image, look, remove=True, network_mode="none", user="0")
    assert json.loads(output) == [[], [], []]


def test_the_main_recipe_is_judged_alike_in_image_and_environment(cpu: str, tmp_path: Path) -> None:
    verdicts, records = {}, {}
    for engine in ("docker", "venv"):
        options = ("--vendor", "cpu", "--engine", engine, "--out", str(tmp_path / engine), "--json")
        summary = json.loads(invoke("run", RECIPE, *options))
        verdicts[engine] = {item["claim"]: item["final"] for item in summary["verdicts"]}
        records[engine] = json.loads(Path(summary["record"]).read_text(encoding="utf-8"))
    assert verdicts["docker"] == verdicts["venv"]
    assert "holds-here" in verdicts["docker"].values()
    assert records["docker"]["environment"]["image_digest"] == image_id(cpu)
    assert records["venv"]["environment"]["image_digest"] is None
    assert records["docker"]["environment"]["lock_differences"] == {}
    assert containers() == []


def test_a_users_own_image_runs_and_is_a_doubt(cpu: str, tmp_path: Path) -> None:
    name = "twinrun-test/own:torch"
    with contextlib.closing(docker.from_env()) as client:
        client.images.get(load_stack(ROOT, cpu).image()).tag(*name.split(":"))
    sets = ("--set", "steps=2", "--set", "warmup_steps=1", "--set", "devices=1")
    options = ("--vendor", "cpu", "--engine", "docker", "--image", name, "--out", str(tmp_path), "--json")
    summary = json.loads(invoke("run", RECIPE, *options, *sets))
    found = read_record(Path(summary["record"]), Project(ROOT))
    assert (found.plan.image, found.environment.image_digest) == (name, image_id(cpu))
    assert any(f"own image: {name}" in doubt for doubt in found.doubts)
    with contextlib.closing(docker.from_env()) as client:
        client.images.remove(name)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_the_container_and_all_in_it(cpu: str, tmp_path: Path, presses: int) -> None:
    options = ("--vendor", "cpu", "--engine", "docker", "--out", str(tmp_path), "--set", "steps=5000")
    process = start("run", RECIPE, *options)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(tmp_path.glob("*/*/metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    for _ in range(presses):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5, err
    assert containers() == []
    # Ranks carry the path of their job as the container sees it.
    found = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"/twinrun/run/points" in read(path)]
    assert found == []


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
