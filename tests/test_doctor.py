"""The examination of real and arranged machines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from io import StringIO
from pathlib import Path
from socketserver import UnixStreamServer

import pytest
from rich.console import Console

from twinrun.cache import cache_root, environment_folder
from twinrun.checks import Check, host
from twinrun.checks.devices import check_device_files, check_devices
from twinrun.devices import search
from twinrun.doctor import Examination, examine
from twinrun.errors import InputError
from twinrun.hardware import load_gpus, load_vendors
from twinrun.report.doctor_table import examination_table
from twinrun.seal import sealed
from twinrun.stack import stamp

ROOT = Path(__file__).parents[1]
ANSWERS = Path(__file__).with_name("hardware_probes")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one stack whose kernel and device files are looked for in `tmp_path`."""
    shutil.copytree(ROOT / "images" / "vendors", tmp_path / "images" / "vendors")
    shutil.copy(ROOT / "images" / "gpus.toml", tmp_path / "images")
    for manifest in (tmp_path / "images" / "vendors").glob("*/vendor.toml"):
        text = manifest.read_text(encoding="utf-8").replace('"/sys/', f'"{tmp_path}/sys/')
        text = text.replace('"/dev/', f'"{tmp_path}/dev/').replace("timeout_s = 30", "timeout_s = 0.3")
        manifest.write_text(text, encoding="utf-8")
    stack = tmp_path / "images" / "stacks" / "plain"
    stack.mkdir(parents=True)
    lines = (
        'name = "plain"',
        'vendor = "cpu"',
        'title = "plain"',
        'python = ">=3.11"',
        'image = "twinrun/plain"',
    )
    (stack / "stack.toml").write_text("\n".join(lines), encoding="utf-8")
    (stack / "requirements.in").write_text("rich\n", encoding="utf-8")
    lock = sealed(stamp(stack / "requirements.in") + "\n")
    (stack / "requirements.lock").write_text(lock, encoding="utf-8")
    (tmp_path / "bin").mkdir()
    (tmp_path / "dev" / "dri").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def install(root: Path, program: str, script: str) -> None:
    path = root / "bin" / program
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def named(examination: Examination, name: str) -> Check:
    (check,) = (check for check in examination.checks if check.name == name)
    return check


def devices_check(root: Path, vendor: str) -> Check:
    manifest = load_vendors(root)[vendor]
    gpus = load_gpus(root)
    return check_devices(manifest, search(manifest, gpus), gpus)


def test_machine_without_gpus_is_well_enough(root: Path) -> None:
    examination = examine(root)
    assert examination.exit_code == 0
    assert [check.name for check in examination.checks] == [
        "interpreter",
        "GPUs (cuda)",
        "GPUs (rocm)",
        "memory",
        "shared memory",
        "cache disk",
        "run disk",
        "docker",
        "uv",
        "environment (plain)",
    ]
    assert named(examination, "GPUs (cuda)").status == "warn"
    assert named(examination, "docker").status == "warn"
    assert "No such file" in named(examination, "docker").found


def test_every_finding_that_is_not_well_has_a_hint(root: Path) -> None:
    (root / "images" / "stacks" / "plain" / "requirements.in").write_text("rich>=1\n", encoding="utf-8")
    (root / "dev" / "kfd").touch()
    for check in examine(root).checks:
        assert check.status == "ok" or check.hint, check


def test_the_real_checkout_can_be_examined() -> None:
    assert examine(ROOT).checks


def test_devices_are_counted_in_cards(root: Path) -> None:
    install(root, "rocm-smi", f"exec /bin/cat {ANSWERS / 'mi250.rocm-smi.json'}")
    check = devices_check(root, "rocm")
    assert check.status == "ok"
    assert check.found == "8 x AMD INSTINCT MI250 (MCM) OAM AC MBA (mi250, 4 cards); driver 6.2.4"


def test_model_without_row_is_a_warning(root: Path) -> None:
    install(root, "nvidia-smi", f"exec /bin/cat {ANSWERS / 'unknown.nvidia-smi.csv'}")
    check = devices_check(root, "cuda")
    assert check.status == "warn"
    assert "NVIDIA GeForce RTX 4090" in str(check.hint)


def test_hidden_devices_are_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(root, "nvidia-smi", f"exec /bin/cat {ANSWERS / 'h200.nvidia-smi.csv'}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = devices_check(root, "cuda")
    assert check.status == "warn"
    assert "CUDA_VISIBLE_DEVICES= leaves 0 of 1" in check.found


@pytest.mark.parametrize("script", ["/bin/sleep 30", "exit 9", "echo nonsense"])
def test_probe_that_does_not_answer_is_unknown_never_well(root: Path, script: str) -> None:
    install(root, "nvidia-smi", script)
    assert devices_check(root, "cuda").status == "unknown"


def test_driver_without_tool_is_unknown(root: Path) -> None:
    (root / "dev" / "nvidia0").touch()
    assert devices_check(root, "cuda").status == "unknown"


def files_checks(root: Path, vendor: str) -> list[Check]:
    manifest = load_vendors(root)[vendor]
    return list(check_device_files(manifest, search(manifest, load_gpus(root))))


def test_render_node_of_another_adapter_is_no_driver(root: Path) -> None:
    (root / "dev" / "dri" / "renderD128").touch()
    assert files_checks(root, "rocm") == []
    assert devices_check(root, "rocm").status == "warn"


def test_open_device_files_are_well(root: Path) -> None:
    (root / "dev" / "kfd").touch()
    (root / "dev" / "dri" / "renderD128").touch()
    (check,) = files_checks(root, "rocm")
    assert check.status == "ok"


def test_missing_device_file_fails(root: Path) -> None:
    (root / "dev" / "kfd").touch()
    (check,) = files_checks(root, "rocm")
    assert check.status == "fail"
    assert "renderD" in check.found
    assert examine(root).exit_code == 3


CLOSED = """
import os, sys
from pathlib import Path
from twinrun.checks.devices import check_device_files
from twinrun.devices import search
from twinrun.hardware import load_gpus, load_vendors
root = Path(sys.argv[1])
vendor = load_vendors(root)["rocm"]
result = search(vendor, load_gpus(root))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for check in check_device_files(vendor, result):
    print(check.status, check.found, check.hint, sep="|")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away and become another user")
def test_closed_device_file_names_group_and_remedy(root: Path) -> None:
    manifest = root / "images" / "vendors" / "rocm" / "vendor.toml"
    # The folders above pytest's own are closed to other users.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("kfd", "dri/renderD128"):
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
            path.chmod(0o660)
            os.chown(path, 0, 64321)
        text = manifest.read_text(encoding="utf-8").replace(f'"{root}/dev/', f'"{folder}/')
        manifest.write_text(text, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-c", CLOSED, str(root)]
        answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    status, found, hint = answer.stdout.strip().split("|")
    assert status == "fail"
    assert "kfd of group 64321" in found
    assert "the user's groups: 65534" in found
    assert hint == "`sudo usermod -aG 64321 $USER`, then sign in again"


class Engine(BaseHTTPRequestHandler):
    """A process that answers as an engine does to a version request."""

    def do_GET(self) -> None:
        body = json.dumps({"Version": "20.10.24", "ApiVersion": "1.41"}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "socket"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        """Keep the test's output clean."""


@pytest.fixture
def engine(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with UnixStreamServer(str(root / "engine.sock"), Engine) as server:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{root}/engine.sock")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("engine")
def test_engine_that_answers_is_well() -> None:
    check = host.check_docker()
    assert (check.status, check.found) == ("ok", "engine 20.10.24")


def test_engine_that_does_not_answer_is_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "DOCKER_TIMEOUT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(root / "silent.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{root}/silent.sock")
        check = host.check_docker()
    assert check.status == "warn"
    assert "timed out" in check.found


def test_disk_too_small_warns_and_closed_disk_fails(tmp_path: Path) -> None:
    assert host.check_disk("d", tmp_path / "a" / "b", 1, "move").status == "ok"
    small = host.check_disk("d", tmp_path, 1 << 60, "move")
    assert (small.status, small.hint) == ("warn", "free some space, or move")
    (tmp_path / "file").touch()
    assert host.check_disk("d", tmp_path / "file" / "b", 1, "move").status == "fail"


def test_check_that_cannot_be_made_is_unknown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY", root / "absent")
    check = named(examine(root), "shared memory")
    assert check.status == "unknown"
    assert "No such file" in check.found


def test_small_shared_memory_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY_BYTES", 1 << 60)
    check = host.check_shared_memory()
    assert check.status == "warn"
    assert "--shm-size" in str(check.hint)


def test_environment_of_the_current_lock_is_found(root: Path) -> None:
    assert named(examine(root), "environment (plain)").found == "not made yet"
    (cache_root() / "environments" / "plain-000000000000").mkdir(parents=True)
    assert "plain-000000000000" in named(examine(root), "environment (plain)").found
    lock = root / "images" / "stacks" / "plain" / "requirements.lock"
    digest = subprocess.run(["/usr/bin/sha256sum", lock], capture_output=True, text=True, check=True).stdout
    environment_folder("plain", digest.split()[0]).mkdir()
    assert named(examine(root), "environment (plain)").status == "ok"


def test_lock_out_of_date_fails(root: Path) -> None:
    (root / "images" / "stacks" / "plain" / "requirements.in").write_text("rich>=1\n", encoding="utf-8")
    examination = examine(root)
    assert named(examination, "environment (plain)").status == "fail"
    assert "invoke lock" in str(named(examination, "environment (plain)").hint)
    assert examination.exit_code == 3


def test_broken_hardware_data_is_not_examined(root: Path) -> None:
    (root / "images" / "gpus.toml").write_text("[[gpu]]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"gpus\.toml:gpu\.0\."):
        examine(root)


def test_cache_root_prefers_its_own_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("TWINRUN_CACHE", "")
    assert cache_root() == tmp_path / ".cache" / "twinrun"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "twinrun"
    monkeypatch.setenv("TWINRUN_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"


def test_table_says_in_words_what_colour_repeats() -> None:
    checks = (
        Check(name="memory", status="warn", found="4.0 GiB", needed="8 GiB", hint="buy [red]more[/red]"),
        Check(name="uv", status="ok", found="uv 1", needed="uv"),
    )
    output = StringIO()
    Console(file=output, width=100, color_system=None).print(examination_table(Examination(checks=checks)))
    lines = output.getvalue().splitlines()
    assert lines[0].split() == ["check", "status", "found", "needed"]
    assert lines[1].split() == ["memory", "warn", "4.0", "GiB", "8", "GiB"]
    assert lines[2].strip() == "hint: buy [red]more[/red]"
    assert lines[3].split()[:2] == ["uv", "ok"]


def test_examination_travels_as_json() -> None:
    check = Check(name="uv", status="fail", found="none", needed="uv", hint="install")
    examination = Examination(checks=(check,))
    assert Examination.model_validate_json(examination.model_dump_json()) == examination
    assert examination.exit_code == 3
