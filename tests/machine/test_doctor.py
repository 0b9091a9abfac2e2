"""The diagnosis of real and arranged machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine.played import play
from twinrun.foundation.cache import COMPLETE, cache_root, environment_folder
from twinrun.machine import checks, daemon
from twinrun.machine.checks import HostCheck
from twinrun.machine.doctor import Diagnosis, diagnose
from twinrun.manifests.stack import load_stack, stamp

ROOT = Path(__file__).parents[2]


def named(diagnosis: Diagnosis, name: str) -> HostCheck:
    (check,) = (check for check in diagnosis.checks if check.name == name)
    return check


def test_machine_without_gpus_is_well_enough(root: Path) -> None:
    diagnosis = diagnose(root)
    assert diagnosis.exit_code == 0
    expected = "GPUs (cuda), GPUs (rocm), memory, shared memory, cache disk, run disk, docker, environments"
    assert ", ".join(check.name for check in diagnosis.checks) == expected
    for name in ("GPUs (cuda)", "GPUs (rocm)", "environments"):
        assert named(diagnosis, name).status == "absent"
    assert named(diagnosis, "docker").status == "warn"
    assert "No such file" in named(diagnosis, "docker").found


@pytest.mark.parametrize(
    ("model", "vendor", "status", "found", "hint"),
    [
        ("mi250", "rocm", "ok", "8 x AMD Instinct MI250 (mi250, 4 cards); driver 6.12.12", "None"),
        ("unknown", "cuda", "warn", "(no row)", "add a row for NVIDIA GeForce RTX 4080"),
        ("mi300x-nps8", "rocm", "warn", "MI300X is one of 8 parts of mi300x", "--compute-partition SPX"),
        ("mi300x-cpx", "rocm", "warn", "MI300X is one of 8 parts of mi300x", "--compute-partition SPX"),
        ("h100-part", "cuda", "warn", "is one of 4 parts of h100-80gb", "--multi-instance-gpu=0"),
    ],
)
def test_devices_are_counted_in_cards_and_parts_recognised(
    root: Path, monkeypatch: pytest.MonkeyPatch, model: str, vendor: str, status: str, found: str, hint: str
) -> None:
    play(root, model, monkeypatch)
    check = named(diagnose(root), f"GPUs ({vendor})")
    assert (check.status, found in check.found, hint in str(check.hint)) == (status, True, True)


CLOSED = """
import os, sys
from pathlib import Path
from twinrun.machine.checks import check_device_files
from twinrun.machine.devices import discover
from twinrun.manifests.vendor import load_gpus, load_vendors
root = Path(sys.argv[1])
vendor = load_vendors(root)["rocm"]
result = discover(vendor, load_gpus(root))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for check in check_device_files(vendor, result):
    print(check.status, check.found, check.hint, sep="|")
print(*(check.status for check in check_device_files(vendor, result, grouped=True)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away and become another user")
@pytest.mark.parametrize("mode", [0o660, 0o600])
def test_closed_device_file_names_group_and_remedy(root: Path, mode: int) -> None:
    manifest = root / "images" / "vendors" / "rocm" / "vendor.toml"
    # The folders above pytest's own are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("kfd", "dri/renderD128"):
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
            path.chmod(mode)
            os.chown(path, 0, 64321)
        text = manifest.read_text(encoding="utf-8").replace(f'"{root}/dev/', f'"{folder}/')
        manifest.write_text(text, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", CLOSED, str(root)]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    alone, grouped = answer.stdout.splitlines()
    status, found, hint = alone.split("|")
    assert status == "fail"
    assert "kfd of group 64321" in found
    assert "the user's groups: 65534" in found
    # usermod refuses a group that the system has no name for.
    add = "`sudo groupadd -g 64321 gpu64321` and `sudo usermod -aG gpu64321 $USER`"
    # Nor does the group help where the file is closed to it.
    chmod = f"`sudo chmod g+rw {folder}/kfd {folder}/dri/renderD128` and "
    assert hint == f"{chmod if mode == 0o600 else ''}{add}, then sign in again"
    # A container that is given the group opens what its members may.
    assert grouped == ("fail" if mode == 0o600 else "ok")


def test_engine_that_does_not_answer_is_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "ANSWER_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(root / "silent.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{root}/silent.sock")
        check = checks.check_docker()
    assert check.status == "warn"
    assert "timed out" in check.found


def test_disk_too_small_warns_and_closed_disk_fails(tmp_path: Path) -> None:
    assert checks.check_disk("d", tmp_path / "a" / "b", 1, "move").status == "ok"
    small = checks.check_disk("d", tmp_path, 1 << 60, "move")
    assert (small.status, small.hint) == ("warn", "free some space, or move")
    (tmp_path / "file").touch()
    assert checks.check_disk("d", tmp_path / "file" / "b", 1, "move").status == "fail"


def test_shared_memory_that_is_small_closed_or_not_there_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SHARED_MEMORY_BYTES", 1 << 60)
    check = checks.check_shared_memory()
    assert (check.status, "--shm-size" in str(check.hint)) == ("warn", True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert checks.check_shared_memory().found.endswith("GiB, read-only")
    # A check that cannot be made is unknown.
    monkeypatch.setattr(checks, "SHARED_MEMORY", root / "absent")
    check = named(diagnose(root), "shared memory")
    assert (check.status, "No such file" in check.found) == ("unknown", True)


def test_cache_root_prefers_its_own_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("TWINRUN_CACHE", "")
    assert cache_root() == tmp_path / ".cache" / "twinrun"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "twinrun"
    monkeypatch.setenv("TWINRUN_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"


@pytest.fixture
def environment(root: Path) -> Path:
    """A whole environment of the stack, with one package as it is locked."""
    stack = root / "images" / "stacks" / "plain"
    lock = f"{stamp(stack / 'requirements.in')}\nwhole-package==1.2\nother==1 ; python_version < '3'\n"
    (stack / "requirements.lock").write_text(lock, encoding="utf-8")
    folder = environment_folder("plain", load_stack(root, "plain").requirements_sha256(root))
    venv.create(folder, symlinks=True)
    (folder / COMPLETE).touch()
    (site,) = folder.glob("lib/python*/site-packages")
    files = {
        "whole_package/__init__.py": "",
        "whole_package-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: Whole_Package\nVersion: 1.2\n",
        "whole_package-1.2.dist-info/RECORD": "whole_package/__init__.py,,\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    return folder


def remove_interpreter(folder: Path) -> None:
    for path in (folder / "bin").glob("python*"):
        path.unlink()
        path.symlink_to("no-such-python")


def break_interpreter(folder: Path) -> None:
    python = folder / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 'libpython3.11.so: cannot open' >&2; exit 127\n", encoding="utf-8")
    python.chmod(0o755)


def change_version(folder: Path) -> None:
    (metadata,) = folder.glob("lib/python*/site-packages/*/METADATA")
    metadata.write_text("Name: whole-package\nVersion: 1.3\n", encoding="utf-8")


def remove_marker(folder: Path) -> None:
    (folder / COMPLETE).unlink()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (remove_interpreter, "its interpreter fails: cannot start: No such file or directory"),
        (break_interpreter, "its interpreter fails: libpython3.11.so: cannot open"),
        (change_version, "not as locked: whole-package"),
        (remove_marker, "not installed to the end, or by an older twinrun"),
    ],
)
def test_broken_environment_is_named(
    root: Path, environment: Path, damage: Callable[[Path], None], found: str
) -> None:
    damage(environment)
    diagnosis = diagnose(root)
    check = named(diagnosis, "environment (plain)")
    assert check.found == found
    assert named(diagnosis, "environments").found == "0 of 1 made"
    # An engine makes an unfinished environment again by itself; it trusts one that is marked as complete.
    expected = ("warn", 0) if damage is remove_marker else ("fail", 3)
    assert (check.status, diagnosis.exit_code) == expected
    assert damage is remove_marker or f"`rm -r {environment}`" in str(check.hint)


def test_a_stop_says_which_checks_ended(root: Path) -> None:
    (root / "recipes").mkdir(exist_ok=True)
    checks = root / "images" / "stacks" / "plain" / "checks"
    checks.mkdir()
    (checks / "first.py").write_text("print('fine')\n", encoding="utf-8")
    (checks / "second.py").write_text("import time; time.sleep(60)\n", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "twinrun", "doctor", "--stack", "plain", "--engine", "host"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    told: list[str] = []
    while not told or told[-1] not in ("first: ok\n", ""):
        told.append(process.stderr.readline())
    assert told[-2:] == ["first: running, 3 of 4\n", "first: ok\n"]
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert "error: plain: stopped; checks that ended: files: ok, versions: ok, first: ok\nhint: " in error
