"""The wheel, built and installed from the file, runs a published experiment in an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from uv import find_uv_bin

from tests.commands import ROOT

Twinrun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def twinrun(tmp_path_factory: pytest.TempPathFactory) -> Twinrun:
    """Return what runs the installed program in an empty folder; its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder))
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    installed, empty = folder / "installed", folder / "empty"
    empty.mkdir()
    install = (
        find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-deps",
        "--target",
        installed,
        wheel,
    )
    subprocess.run(install, check=True, timeout=120)
    variables = os.environ | {"PYTHONPATH": str(installed), "TWINRUN_CACHE": str(folder / "cache")}

    def run(*arguments: str, limit: int) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, str(installed / "bin" / "twinrun"), *arguments)
        return subprocess.run(
            command, cwd=empty, env=variables, text=True, capture_output=True, timeout=limit, check=False
        )

    return run


def test_the_wheel_plans_a_run_in_an_empty_folder(twinrun: Twinrun) -> None:
    done = twinrun("run", "mpt7b-scaling", "--dry", "--vendor", "cpu", "--engine", "host", limit=60)
    assert done.returncode == 0, done.stderr
    assert "Strong scaling of MPT-7B" in done.stdout
    # Nothing is of this checkout: an environment may lie beside it under a longer name.
    assert f"{ROOT}/" not in done.stdout


@pytest.mark.nightly
@pytest.mark.needs("composer")
def test_the_wheel_runs_in_an_empty_folder(twinrun: Twinrun) -> None:
    done = twinrun(
        *("run", "mpt7b-scaling", "--vendor", "cpu", "--engine", "host", "--scale", "smoke", "--json"),
        limit=900,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert {one["final"] for one in summary["verdicts"]} >= {"holds-here"}
