"""Whole runs at the smallest scale under the interpreter of the tests, undisturbed and disturbed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.refusals import RECIPE, copied_project, error_message
from tests.commands import ROOT, environment
from twinrun.execution.engine import Workspace
from twinrun.execution.engines import load_engine
from twinrun.foundation.cache import COMPLETE, bytecode_folder
from twinrun.foundation.errors import MachineError
from twinrun.manifests.stack import load_stack, stamp
from twinrun.manifests.vendor import load_vendors
from twinrun.planning.project import Project
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record

pytestmark = pytest.mark.needs("composer")
PROJECT = Project(ROOT)

SMOKE = ("run", RECIPE, "--vendor", "cpu", "--engine", "host", "--scale", "smoke")
SHORT = ("--set", "steps=4", "--set", "warmup_steps=1", "--set", "optimizer.warmup_steps=0")
INVARIANT = "same-loss-at-every-world-size"
# Only a hang takes so long, however busy the machine is.
PATIENCE_SECONDS = 600


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose cache all runs share: data are prepared once, and what is compiled is the user's."""
    runs = tmp_path_factory.mktemp("runs")
    bytecode_folder().mkdir(parents=True, exist_ok=True)
    (runs / "cache").mkdir()
    (runs / "cache" / bytecode_folder().name).symlink_to(bytecode_folder())
    return runs


@pytest.fixture(scope="module")
def root(folder: Path) -> Path:
    return copied_project(folder / "project")


@pytest.fixture(scope="module")
def undisturbed(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished(start(root, *SMOKE, *SHORT, "--json", "--out", str(folder / "undisturbed")))


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the real command in the project at `root`."""
    return subprocess.Popen(
        [sys.executable, "-m", "twinrun", *arguments],
        cwd=root,
        env=environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a command and return what it said."""
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_folder(out: Path) -> Path:
    (found,) = (out / "mpt7b-scaling").iterdir()
    return found


def await_that(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Wait until `condition` holds while `process` runs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_of(run: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield number and environment of each living process that names a job of `run`."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            variables = (entry / "environ").read_bytes().decode().split("\0")
        except OSError:
            continue
        if os.fsencode(run) in command:
            yield int(entry.name), dict(item.split("=", 1) for item in variables if "=" in item)


def losses(record: Judged) -> dict[str, tuple[float, ...]]:
    return {point.id: point.series[0].values for point in record.points}


def outcomes(record: Judged) -> dict[str, str]:
    return {verdict.claim: verdict.final for verdict in record.verdicts}


def test_a_run_leaves_all_its_files_and_prints_only_its_summary(
    undisturbed: subprocess.CompletedProcess[str], folder: Path
) -> None:
    assert undisturbed.returncode == 0, undisturbed.stderr
    run = run_folder(folder / "undisturbed")
    summary = json.loads(undisturbed.stdout)
    assert summary["record"] == str(run / "record.json")
    assert summary["report"] == str(run / "report.html")
    assert [point["id"] for point in summary["points"]] == ["devices=1", "devices=2"]
    assert "devices=2: step 4/4" in undisturbed.stderr

    record = read_record(run, PROJECT)
    assert set(record.record.files) == {"plan.json", "metrics.jsonl"}
    for name, digest in record.record.files.items():
        assert hashlib.sha256((run / name).read_bytes()).hexdigest() == digest
    assert json.loads((run / "plan.json").read_text()) == record.plan.model_dump(mode="json")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(step["point"], step["step"]) for step in steps] == [
        (point, step) for point in ("devices=1", "devices=2") for step in (1, 2, 3, 4)
    ]
    assert {path.name for path in (run / "log").iterdir()} >= {"devices=1", "devices=2"}
    assert "<html" in (run / "report.html").read_text(encoding="utf-8")
    assert outcomes(record)[INVARIANT] == "holds-here"
    assert "without a closure" in record.points[0].result.changes["composer"]


def test_a_stopped_run_goes_on_where_it_was(
    root: Path, folder: Path, undisturbed: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    options = (*SMOKE, *SHORT, "--json", "--out", str(tmp_path))
    process = start(root, *options)
    await_that(lambda: list(tmp_path.glob("*/*/points/devices=1.json")), process)
    run = run_folder(tmp_path)
    # Ranks of the point after it start from the copy of the sources in the run folder.
    loop = root / "src" / "twinrun" / "train" / "loop.py"
    kept = loop.read_text(encoding="utf-8")
    loop.write_text("raise SystemExit('edited')\n", encoding="utf-8")
    await_that(lambda: len(list(processes_of(run))) >= 3, process)
    # As a scheduler ends a job; Ctrl-C is the same to exit_on_error.
    process.send_signal(signal.SIGTERM)
    message = error_message(finished(process), 5)
    assert f"{run}: stopped with 1 of 2 points finished" in message
    assert "hint: the same command with --resume" in message
    assert not list(processes_of(run))
    assert not (run / "record.json").exists()

    first = (run / "points" / "devices=1.json").read_bytes()
    edited = error_message(finished(start(root, *options, "--resume")), 2)
    assert "the run was begun with other sources found: commit none" in edited
    assert "src/twinrun/train/loop.py" in edited
    loop.write_text(kept, encoding="utf-8")
    again = finished(start(root, *options, "--resume"))
    assert again.returncode == 0, again.stderr
    assert "devices=1: finished before, not run again" in again.stderr
    assert (run / "points" / "devices=1.json").read_bytes() == first
    record, whole = read_record(run, PROJECT), read_record(run_folder(folder / "undisturbed"), PROJECT)
    assert losses(record) == losses(whole)
    assert outcomes(record) == outcomes(whole)
    assert json.loads(again.stdout)["run"] == run.name


OPEN = """
import sys
from pathlib import Path
from twinrun.execution.engine import Command, Workspace
from twinrun.execution.engines import load_engine
from twinrun.manifests.vendor import load_vendors
from twinrun.manifests.stack import load_stack
root = Path(sys.argv[1])
workspace = Workspace(root=root, run=root, data=root)
stack, vendor = load_stack(root, "tiny"), load_vendors(root)["cpu"]
engine = load_engine("venv").open_engine(stack=stack, vendor=vendor, workspace=workspace, say=print)
print(engine.read(Command(arguments=("python", "-c", "import tiny; print(tiny.__file__)"), variables={})))
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a stack that holds one small package of this machine, and an empty cache."""
    root = copied_project(tmp_path / "project")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(
            "tiny-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    stack = root / "images" / "stacks" / "tiny"
    stack.mkdir()
    whole = (stack.parent / "cpu" / "stack.toml").read_text(encoding="utf-8")
    # Without what only an image needs.
    manifest = whole.partition("platform = ")[0]
    (stack / "stack.toml").write_text(manifest.replace('name = "cpu"', 'name = "tiny"'), encoding="utf-8")
    (stack / "requirements.in").write_text("tiny==1.0\n", encoding="utf-8")
    lock_to(stack, wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    return root


def lock_to(stack: Path, wheel: Path, digest: str) -> None:
    """Write the lock of one package: what `wheel` holds, if it has `digest`."""
    lines = (stamp(stack / "requirements.in"), f"tiny @ {wheel.as_uri()} --hash=sha256:{digest}")
    (stack / "requirements.lock").write_text("\n".join((*lines, "")), encoding="utf-8")


def open_tiny(root: Path) -> str:
    """Provision the tiny stack and return what was said of it, and of its files."""
    said: list[str] = []
    workspace = Workspace(root=root, run=root, data=root)
    vendor = load_vendors(root)["cpu"]
    engine = load_engine("venv").open_engine(
        stack=load_stack(root, "tiny"), vendor=vendor, workspace=workspace, say=said.append
    )
    return "\n".join([*said, *(f"{name}: {what}" for name, what in engine.changed_files().items())])


def environments(root: Path) -> list[Path]:
    return [path for path in (root.parent / "cache" / "environments").iterdir() if path.is_dir()]


def test_two_runs_install_an_environment_once(tiny: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tiny)]
    variables = environment(tiny)
    started = [
        subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    done = [finished(process) for process in started]
    (made,) = environments(tiny)
    assert [one.returncode for one in done] == [0, 0]
    assert sum(one.stdout.count("installing tiny from its lock, once") for one in done) == 1
    assert all(str(made) in one.stdout.splitlines()[-2:][0] for one in done)
    assert open_tiny(tiny) == ""


@pytest.mark.parametrize(
    "variable", ["UV_NO_VERIFY_HASHES=1", "UV_REQUIRE_HASHES=0", "UV_SYSTEM_PYTHON=1", "PIP_REQUIRE_HASHES=0"]
)
def test_no_variable_of_uv_or_pip_takes_another_file(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(*variable.split("="))
    test_an_environment_that_fails_leaves_nothing(tiny)


@pytest.mark.parametrize(
    "variable",
    [
        *("UV_LINK_MODE=symlink", "UV_INDEX_URL=http://127.0.0.1:9/simple", "UV_NO_CACHE=1", "PYTHONPATH=/"),
        *("PIP_INDEX_URL=http://127.0.0.1:9/simple", "PIP_CONFIG_FILE=/dev/full", "PIP_TARGET=/dev/full"),
        *("VIRTUAL_ENV=/dev/full", "UV_PROJECT_ENVIRONMENT=/dev/full", "UV_COMPILE_BYTECODE=1"),
    ],
)
def test_an_environment_is_the_same_whatever_steers_uv_and_pip(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(*variable.split("="))
    open_tiny(tiny)
    (made,) = environments(tiny)
    (module,) = made.glob("lib/python*/site-packages/tiny.py")
    assert not module.is_symlink()


def test_an_installation_that_is_killed_is_made_again(tiny: Path) -> None:
    """Killed as soon as there is a folder, so that whatever was written by then is half of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPEN, str(tiny)], env=environment(tiny), stdout=subprocess.DEVNULL, text=True
    )
    await_that(lambda: list((tiny.parent / "cache").glob("environments/tiny-*/pyvenv.cfg")), process)
    process.kill()
    process.wait()
    (half,) = environments(tiny)
    assert not (half / COMPLETE).exists()
    assert "installing tiny" in open_tiny(tiny)
    assert open_tiny(tiny) == ""
    (module,) = half.glob("lib/python*/site-packages/tiny.py")
    module.write_text("edited = True\n", encoding="utf-8")
    assert open_tiny(tiny).endswith("site-packages/tiny.py: written after the installation")


def test_an_environment_that_fails_leaves_nothing(tiny: Path) -> None:
    lock_to(tiny / "images" / "stacks" / "tiny", tiny.parent / "tiny-1.0-py3-none-any.whl", "0" * 64)
    with pytest.raises(MachineError, match="cannot be installed") as caught:
        open_tiny(tiny)
    assert "ash mismatch" in str(caught.value)
    assert environments(tiny) == []


def test_a_half_made_environment_is_made_again(tiny: Path) -> None:
    open_tiny(tiny)
    (made,) = environments(tiny)
    (made / COMPLETE).unlink()
    (made / "bin" / "python").unlink()
    (made / "left over").touch()
    assert "installing tiny" in open_tiny(tiny)
    assert environments(tiny) == [made]
    assert (made / "bin" / "python").exists()
    assert not (made / "left over").exists()
