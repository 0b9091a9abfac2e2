"""Stacks of the project, built in full and from nothing: twice the same, in time, nothing needless."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker import DockerClient

from tests.tiny_stack import ROOT, commit

pytestmark = [pytest.mark.nightly, pytest.mark.needs("unshare", "root")]

SECONDS = 1800
# Nothing of these may be in an image that only runs; ninja, which DeepSpeed requires, compiles nothing.
COMPILERS = (
    "gcc",
    "cc",
    "g++",
    "c++",
    "cc1",
    "cc1plus",
    "clang",
    "ld",
    "as",
    "nvcc",
    "make",
    "cmake",
)
# Nothing at all may be in these, not even an empty file or folder.
EMPTY = (
    *("var/cache/apt", "var/cache/ldconfig", "var/lib/apt/lists", "var/log", "var/tmp", "tmp"),
    *("root/.cache", "twinrun/home"),
)
# What package tools keep of the state before, or of their own work.
LEFT = ("var/cache/debconf/*-old", "var/cache/debconf/tmp.*", "var/lib/dpkg/*-old", "etc/*-", "**/*.dpkg-*")
PACKED = ("**/ensurepip/_bundled/*.whl", "**/python-wheels/*.whl", "**/*.deb")
# Stack to vendor and to the longest that a cold build with a warm package cache may take, in seconds.
FULL = {"cpu": ("cpu", 480), "rocm-debian": ("rocm", 90)}
_ANEW = """
import json, shutil, sys, time
from pathlib import Path
from twinrun.foundation.cache import cache_root
from twinrun.images.builder import Builder
from twinrun.images.command import BuildProgress, BuildRequest, plan_request
from twinrun.images.context import collect
from twinrun.machine import daemon
root, vendor, stack = Path.cwd(), *sys.argv[1:]
plan = plan_request(root, BuildRequest(vendor=vendor, stack=stack))
collect(plan, root, say=lambda text: None)
client = daemon.connect()
client.api.prune_builds()
shutil.rmtree(cache_root() / "roots", ignore_errors=True)
started = time.monotonic()
with BuildProgress() as progress:
    built = Builder(client, plan, root=root, log=root / "build.log", say=progress.say).build(anew=True)
print(json.dumps(built.model_dump(mode="json") | {"seconds": time.monotonic() - started}))
"""
_LOOK = """
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


def project_copy(folder: Path) -> Path:
    """Copy what a build reads of this project to `folder`, as a repository of one commit."""
    left_out = shutil.ignore_patterns("__pycache__")
    for name in ("images", "recipes", "src"):
        shutil.copytree(ROOT / name, folder / name, ignore=left_out)
    commit(folder)
    return folder


def anew(root: Path, stack: str, shell: str) -> dict[str, Any]:
    """Build the stack with nothing left of an earlier build, under what `shell` sets up."""
    script = f'{shell}; exec {sys.executable} -c "$0" $@'
    done = subprocess.run(
        ["unshare", "--uts", "sh", "-c", script, _ANEW, FULL[stack][0], stack],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr
    built: dict[str, Any] = json.loads(done.stdout)
    return built


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    made: DockerClient = docker.from_env(timeout=SECONDS)
    yield made
    made.api.prune_builds()
    made.close()


@pytest.fixture(scope="module", params=FULL)
def full(
    request: pytest.FixtureRequest, client: DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """A stack of the project, built twice from one lock under two sets of circumstances."""
    folder = tmp_path_factory.mktemp("full")
    project = project_copy(folder / "one")
    elsewhere = Path(shutil.copytree(project, folder / "two" / "deeper"))
    first = anew(project, request.param, "umask 022; TZ=UTC")
    changed = "hostname elsewhere; umask 077; export TZ=Asia/Tokyo LC_ALL=C"
    return {"stack": request.param, "builds": (first, anew(elsewhere, request.param, changed))}


def test_two_cold_builds_give_one_image_in_time(full: dict[str, Any]) -> None:
    first, second = full["builds"]
    seconds = [build["seconds"] for build in full["builds"]]
    print(full["stack"], seconds, first["layers"])  # noqa: T201
    assert first["layers"] == second["layers"]
    assert first["id"] == second["id"]
    assert min(seconds) <= FULL[full["stack"]][1]


def test_nothing_of_the_making_is_in_an_image(client: DockerClient, full: dict[str, Any]) -> None:
    compilers = [] if full["stack"] != "cpu" else COMPILERS
    look = ["python3", "-c", _LOOK, json.dumps([compilers, EMPTY, [*LEFT, *PACKED]])]
    output = client.containers.run(full["builds"][0]["id"], look, remove=True, network_mode="none", user="0")
    assert json.loads(output) == [[], [], []]
