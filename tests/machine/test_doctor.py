"""The diagnosis of real and arranged machines."""

from __future__ import annotations

import json
import os
import socket
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

from tests.machine.played import play
from tests.machine.stand_in import pynvml
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError
from twinrun.machine import checks, daemon
from twinrun.machine.checks import HostCheck, check_device_files, check_devices
from twinrun.machine.devices import discover
from twinrun.machine.doctor import Diagnosis, diagnose, environment_bytes
from twinrun.manifests.vendor import load_gpus, load_vendors
from twinrun.report.terminal import diagnosis_lines

ROOT = Path(__file__).parents[2]


def named(diagnosis: Diagnosis, name: str) -> HostCheck:
    (check,) = (check for check in diagnosis.checks if check.name == name)
    return check


def devices_check(root: Path, vendor: str) -> HostCheck:
    manifest = load_vendors(root)[vendor]
    gpus = load_gpus(root)
    return check_devices(manifest, discover(manifest, gpus), gpus)


def test_machine_without_gpus_is_well_enough(root: Path) -> None:
    diagnosis = diagnose(root)
    assert diagnosis.exit_code == 0
    assert [check.name for check in diagnosis.checks] == [
        "GPUs (cuda)",
        "GPUs (rocm)",
        "memory",
        "shared memory",
        "cache disk",
        "run disk",
        "docker",
        "environments",
    ]
    for name in ("GPUs (cuda)", "GPUs (rocm)", "environments"):
        assert named(diagnosis, name).status == "absent"
    assert named(diagnosis, "docker").status == "warn"
    assert "No such file" in named(diagnosis, "docker").found


def test_every_finding_that_is_not_well_has_a_hint(root: Path) -> None:
    (root / "images" / "stacks" / "plain" / "requirements.in").write_text("rich>=1\n", encoding="utf-8")
    (root / "dev" / "kfd").touch()
    for check in diagnose(root).checks:
        assert check.status in ("ok", "absent") or check.hint, check


def test_the_real_checkout_can_be_examined() -> None:
    assert diagnose(ROOT).checks


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
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    vendor: str,
    status: str,
    found: str,
    hint: str,
) -> None:
    play(root, model, monkeypatch)
    check = devices_check(root, vendor)
    assert check.status == status
    assert found in check.found
    assert hint in str(check.hint)


def test_hidden_devices_are_a_warning(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(root, "h200", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = devices_check(root, "cuda")
    assert check.status == "warn"
    assert "CUDA_VISIBLE_DEVICES= leaves 0 of 1" in check.found


@pytest.mark.parametrize("seconds", [0, 9])
def test_a_driver_that_does_not_answer_is_unknown_never_well(
    root: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("PLAYED_GPUS", json.dumps({"fault": "Unknown Error", "seconds": seconds}))
    assert devices_check(root, "cuda").status == "unknown"


def test_driver_without_its_library_is_unknown(root: Path) -> None:
    (root / "dev" / "nvidia0").touch()
    assert devices_check(root, "cuda").status == "unknown"


def files_checks(root: Path, vendor: str) -> list[HostCheck]:
    manifest = load_vendors(root)[vendor]
    return list(check_device_files(manifest, discover(manifest, load_gpus(root))))


def test_render_node_of_another_adapter_is_no_driver(root: Path) -> None:
    (root / "dev" / "dri" / "renderD128").touch()
    assert files_checks(root, "rocm") == []
    assert devices_check(root, "rocm").status == "absent"


def test_open_device_files_are_well(root: Path) -> None:
    (root / "dev" / "kfd").touch()
    (root / "dev" / "dri" / "renderD128").touch()
    (check,) = files_checks(root, "rocm")
    assert check.status == "ok"


def test_files_that_come_later_or_stand_for_others_are_not_missed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(root, "h200", monkeypatch)
    (check,) = files_checks(root, "cuda")
    assert check.status == "fail"
    (root / "dev" / "dxg").touch()
    (check,) = files_checks(root, "cuda")
    assert check.status == "ok"
    (root / "dev" / "dxg").unlink()
    for name in ("nvidia0", "nvidiactl"):
        (root / "dev" / name).touch()
    (check,) = files_checks(root, "cuda")
    assert (check.status, check.found) == ("ok", "2 files open to this user")


def test_missing_device_file_fails(root: Path) -> None:
    (root / "dev" / "kfd").touch()
    (check,) = files_checks(root, "rocm")
    assert check.status == "fail"
    assert "renderD" in check.found
    assert diagnose(root).exit_code == 3


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


class EngineStandIn(BaseHTTPRequestHandler):
    """A process that answers as an engine without containers does."""

    def do_GET(self) -> None:
        version = {"Version": "20.10.24", "ApiVersion": "1.41"}
        body = json.dumps([] if "/containers/" in self.path else version).encode()
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
    with UnixStreamServer(str(root / "engine.sock"), EngineStandIn) as server:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{root}/engine.sock")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("engine")
def test_engine_that_answers_is_well() -> None:
    check = checks.check_docker()
    assert (check.status, check.found) == ("ok", "engine 20.10.24")


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


def test_check_that_cannot_be_made_is_unknown(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SHARED_MEMORY", root / "absent")
    check = named(diagnose(root), "shared memory")
    assert check.status == "unknown"
    assert "No such file" in check.found


def test_shared_memory_that_is_small_or_read_only_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SHARED_MEMORY_BYTES", 1 << 60)
    check = checks.check_shared_memory()
    assert (check.status, "--shm-size" in str(check.hint)) == ("warn", True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert checks.check_shared_memory().found.endswith("GiB, read-only")


def test_lock_out_of_date_fails(root: Path) -> None:
    (root / "images" / "stacks" / "plain" / "requirements.in").write_text("rich>=1\n", encoding="utf-8")
    diagnosis = diagnose(root)
    assert named(diagnosis, "environment (plain)").status == "fail"
    assert "invoke lock" in str(named(diagnosis, "environment (plain)").hint)
    assert diagnosis.exit_code == 3


def test_broken_hardware_data_is_not_examined(root: Path) -> None:
    (root / "images" / "gpus.toml").write_text("[[gpu]]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"gpus\.toml:gpu\.0\."):
        diagnose(root)


def test_cache_root_prefers_its_own_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("TWINRUN_CACHE", "")
    assert cache_root() == tmp_path / ".cache" / "twinrun"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "twinrun"
    monkeypatch.setenv("TWINRUN_CACHE", "~/own")
    assert cache_root() == tmp_path / "own"


CHECKS = Diagnosis(
    checks=(
        HostCheck(name="memory", status="warn", found="4.0 GiB", needed="8 GiB", hint="buy [red]more[/red]"),
        HostCheck(name="docker", status="absent", found="none", needed="only for --engine docker"),
        HostCheck(
            name="uv", status="fail", found="/" + "a" * 60 + "-b: gone", needed="uv", hint="install it " * 9
        ),
    )
)


def printed(*, width: int | None) -> list[str]:
    output = StringIO()
    console = Console(file=output, width=80, color_system=None)
    for line in diagnosis_lines(CHECKS, width=width):
        console.print(line, soft_wrap=True)
    return output.getvalue().splitlines()


def test_lines_say_in_words_what_colour_repeats() -> None:
    lines = printed(width=None)
    assert lines[0].split() == ["check", "status", "found"]
    assert lines[1].split() == ["memory", "warn", "4.0", "GiB"]
    assert lines[2].strip() == "needed: 8 GiB"
    assert lines[3].strip() == "hint: buy [red]more[/red]"
    assert lines[4].split(maxsplit=2) == ["docker", "absent", "none; only for --engine docker"]
    assert lines[-1].strip() == f"hint: {'install it ' * 9}".strip()


def test_output_to_a_pipe_is_whole(root: Path) -> None:
    (root / "images" / "stacks" / "plain" / "requirements.in").write_text("rich>=1\n", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}
    (root / "recipes").mkdir(exist_ok=True)
    command = [sys.executable, "-m", "twinrun", "doctor"]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "hint: run `invoke lock --stack plain` and commit what it writes" in lines
    assert lines[-1].split(maxsplit=2)[2] == "0 of 1 made; only for --engine venv"


def test_diagnosis_travels_as_json() -> None:
    check = HostCheck(name="uv", status="fail", found="none", needed="uv", hint="install")
    diagnosis = Diagnosis(checks=(check,))
    assert Diagnosis.model_validate_json(diagnosis.model_dump_json()) == diagnosis
    assert diagnosis.exit_code == 3


def test_the_cache_needs_the_largest_environment_of_the_vendors_that_are_there() -> None:
    sizes = {name: environment_bytes(ROOT, {name}) >> 30 for name in ("cpu", "cuda", "rocm")}
    assert sizes == {"cpu": 5, "cuda": 5, "rocm": 14}
