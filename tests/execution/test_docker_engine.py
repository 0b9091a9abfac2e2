"""The engine for containers, against a real daemon and a small image made here."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docker import DockerClient

from tests.execution.conftest import REPOSITORY, stack_of
from tests.tiny_image import SECONDS
from twinrun.execution.engine import Command, Workspace
from twinrun.execution.engines.docker import (
    ContainerEngine,
    change_owner,
    open_engine,
    unusable,
)
from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.processes import _MARK, _marked
from twinrun.machine.daemon import remove_abandoned
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor, load_vendors

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[2]
# The user of the image, for callers who are root.
IMAGE_USER = [1000, 1000]


@pytest.fixture
def cpu() -> Vendor:
    return load_vendors(ROOT)["cpu"]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(root=tmp_path / "project", run=tmp_path / "run", data=tmp_path / "data")
    for folder in (made.root, made.run, made.data):
        folder.mkdir()
    (made.root / "src").mkdir()
    (made.root / "src" / "ours.py").write_text("NAME = 'of the project'\n", encoding="utf-8")
    return made


@pytest.fixture
def engine(
    client: DockerClient, stack: LoadedStack, cpu: Vendor, workspace: Workspace
) -> Iterator[ContainerEngine]:
    made = open_engine(stack=stack, vendor=cpu, workspace=workspace, say=print)
    assert isinstance(made, ContainerEngine)
    yield made
    made._client.close()
    assert containers(client, stack) == []


def test_what_a_killed_run_left_is_removed_by_the_next(
    client: DockerClient, stack: LoadedStack, cpu: Vendor, workspace: Workspace
) -> None:
    program = (
        "import sys, time, twinrun.execution.container as c, docker;"
        "k = dict(labels=c.Container(image='i', arguments=(), variables={}, user='0:0', mounts=(), host='h')"
        ".sdk_arguments()['labels'], entrypoint=['sleep'], command=['600']);"
        "print(docker.from_env().containers.run(sys.argv[1], detach=True, **k).name, flush=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, stack.image()], stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        name = killed.stdout.readline().strip()
        assert remove_abandoned(client) == []
        killed.kill()
    messages: list[str] = []
    made: Any = open_engine(stack=stack, vendor=cpu, workspace=workspace, say=messages.append)
    made._client.close()
    assert messages == [f"removed the container {name}, which a killed run had left"]


def containers(client: DockerClient, stack: LoadedStack) -> list[Any]:
    """Return the containers of the test image, running or not."""
    image = client.images.get(stack.image()).id
    return [one for one in client.containers.list(all=True) if one.attrs["Image"] == image]


def python(program: str, **variables: str) -> Command:
    return Command(arguments=("python", "-c", program), variables=variables)


def ended(running: Any) -> int:
    deadline = time.monotonic() + SECONDS
    while (status := running.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(status)


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_no_daemon_and_no_image_are_told_apart(
    stack: LoadedStack, cpu: Vendor, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unusable(stack=stack, vendor=cpu) is None
    absent = stack_of("0" * 64)
    assert unusable(stack=absent, vendor=cpu) == f"no image {REPOSITORY}:000000000000"
    with pytest.raises(MachineError, match="the image is not on this machine"):
        open_engine(stack=absent, vendor=cpu, workspace=workspace, say=print)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert unusable(stack=stack, vendor=cpu) == "the Docker daemon does not answer"
    with pytest.raises(MachineError, match="does not answer") as caught:
        open_engine(stack=stack, vendor=cpu, workspace=workspace, say=print)
    assert f"{tmp_path}/no.sock" in str(caught.value)
    # The SDK leaves sockets that could not connect to the collector.
    del caught
    gc.collect()
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setattr("twinrun.machine.daemon.SOCKET", str(tmp_path / "no.sock"))
    assert unusable(stack=stack, vendor=cpu) == "no Docker daemon on this machine"


def test_the_digest_is_that_of_the_image(
    engine: ContainerEngine, client: DockerClient, stack: LoadedStack
) -> None:
    assert engine.image_digest == client.images.get(stack.image()).id
    assert str(engine.image_digest).startswith("sha256:")


SELF = """
import json, os, platform, socket
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "capabilities": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "address": socket.gethostbyname(socket.getfqdn()),
    "host": platform.node(),
    "folder": os.getcwd(),
    "variable": os.environ["ASKED"],
    "first": os.readlink("/proc/1/exe"),
    "shared_memory": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
}))
"""


def test_a_command_has_no_privileges_and_no_network(engine: ContainerEngine) -> None:
    facts = json.loads(engine.read(python(SELF, ASKED="yes")))
    assert facts["user"] == ([os.getuid(), os.getgid()] if os.getuid() else IMAGE_USER)
    assert {int(mask, 16) for mask in facts["capabilities"]} == {0}
    assert facts["no_new_privileges"] == "1"
    assert facts["interfaces"] == ["lo"]
    # The ranks of a run find each other under this name, and report it.
    assert facts["address"] == "127.0.0.1"
    assert facts["host"] == platform.node()
    assert facts["folder"] == "/twinrun/project"
    assert facts["variable"] == "yes"
    assert "init" in facts["first"]
    assert facts["shared_memory"] == 16 << 30


WRITE = """
import json, pathlib, sys
def fault(folder):
    try:
        pathlib.Path(folder, "made").write_text("here")
    except OSError as error:
        return error.strerror
print(json.dumps({folder: fault(folder) for folder in json.loads(sys.argv[1])}))
"""


@pytest.mark.parametrize("writes_data", [False, True])
def test_only_the_run_folder_is_written_and_what_prepares_data_writes_data(
    engine: ContainerEngine, workspace: Workspace, writes_data: bool
) -> None:
    folders = [engine.inside(folder) for folder in (workspace.run, workspace.data, workspace.root)]
    command = ("python", "-c", WRITE, json.dumps([*folders, "/tmp", "/", "/etc", "/usr/lib/python3.11"]))
    found = json.loads(engine.read(Command(arguments=command, variables={}, writes_data=writes_data)))
    closed = "Read-only file system"
    assert list(found.values()) == [
        None,
        None if writes_data else closed,
        closed,
        None,
        closed,
        closed,
        closed,
    ]
    assert (workspace.run / "made").read_text(encoding="utf-8") == "here"
    assert (workspace.data / "made").exists() == writes_data
    assert not (workspace.root / "made").exists()


def test_a_project_that_the_container_cannot_read_is_told(
    engine: ContainerEngine, workspace: Workspace
) -> None:
    if os.getuid():
        pytest.skip("only callers who are root run containers as somebody else")
    workspace.root.chmod(0o700)
    with pytest.raises(MachineError, match="cannot read this folder") as caught:
        engine.read(python("pass"))
    assert "chmod -R go+rX" in str(caught.value)


def test_the_user_is_the_one_who_asks_even_if_not_root(
    engine: ContainerEngine, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(os, "getgid", lambda: 23456)
        os.chown(workspace.run, 12345, 23456)
    program = "import os, pathlib; pathlib.Path('/twinrun/run/made').touch(); print(os.getuid(), os.getgid())"
    assert engine.read(python(program)).split() == [str(os.getuid()), str(os.getgid())]
    assert (workspace.run / "made").stat().st_uid == os.getuid()


def test_the_project_is_imported_from(engine: ContainerEngine) -> None:
    assert engine.read(python("import ours; print(ours.NAME)")) == "of the project\n"


def test_a_failed_command_is_told_with_its_last_lines(engine: ContainerEngine) -> None:
    with pytest.raises(RunError, match="the command failed") as caught:
        engine.read(python("raise SystemExit('the disk is on fire')"))
    assert "the disk is on fire" in str(caught.value)


def test_status_and_output_are_passed_on(engine: ContainerEngine, workspace: Workspace) -> None:
    log = workspace.run / "log" / "launcher.log"
    program = "import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(77)"
    running = engine.start(engine.render(python(program)), log=log)
    assert ended(running) == 77
    assert running.poll() == 77
    running.stop()
    assert sorted(log.read_text(encoding="utf-8").splitlines()) == ["to stderr", "to stdout"]


def test_what_the_daemon_refuses_is_told_and_leaves_nothing(
    client: DockerClient, stack: LoadedStack, cpu: Vendor, workspace: Workspace
) -> None:
    container = cpu.container.model_copy(update={"devices": ("/dev/no-such-gpu",)})
    vendor = cpu.model_copy(update={"container": container})
    engine = ContainerEngine(client=client, image=stack.image(), vendor=vendor, workspace=workspace)
    for attempt in (
        engine.read,
        lambda command: engine.start(engine.render(command), log=workspace.run / "log"),
    ):
        with pytest.raises(MachineError, match="cannot run a container") as caught:
            attempt(python("pass"))
        assert "no-such-gpu" in str(caught.value)
        assert "hint:" in str(caught.value)
    assert containers(client, stack) == []


def test_a_daemon_that_drops_device_requests_is_not_used(
    daemon: str, stack: LoadedStack, workspace: Workspace
) -> None:
    vendors = load_vendors(ROOT).values()
    asking = next(vendor for vendor in vendors if vendor.container.driver)
    reason = "Podman's socket passes no device requests on" if daemon == "podman" else None
    assert unusable(stack=stack, vendor=asking) == reason
    if reason:
        with pytest.raises(MachineError, match=reason):
            open_engine(stack=stack, vendor=asking, workspace=workspace, say=print)


def test_a_container_that_others_removed_is_told(
    engine: ContainerEngine, client: DockerClient, stack: LoadedStack, workspace: Workspace
) -> None:
    running = engine.start(engine.render(python("import time; time.sleep(600)")), log=workspace.run / "log")
    for container in containers(client, stack):
        container.remove(force=True)
    for attempt in (running.poll, running.stop):
        with pytest.raises(MachineError, match="cannot run the container"):
            attempt()


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, "-c", open("/twinrun/run/stubborn.py").read(), "child"])
open("/twinrun/run/" + (sys.argv[1] if len(sys.argv) > 1 else "parent"), "w").close()
print("started", flush=True)
time.sleep(600)
"""


def test_stopping_ends_everything_even_what_ignores_sigterm(
    engine: ContainerEngine, client: DockerClient, stack: LoadedStack, workspace: Workspace
) -> None:
    (workspace.run / "stubborn.py").write_text(STUBBORN, encoding="utf-8")
    log = workspace.run / "log" / "launcher.log"
    mark = str(workspace.run)
    command = Command(arguments=("python", "/twinrun/run/stubborn.py"), variables={_MARK: mark})
    running = engine.start(engine.render(command), log=log)
    deadline = time.monotonic() + SECONDS
    while not ((workspace.run / "parent").exists() and (workspace.run / "child").exists()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(containers(client, stack)) == 1
    # The parent and its child, seen from outside.
    assert len(_marked(mark)) >= 2
    assert running.poll() is None

    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < 30
    assert containers(client, stack) == []
    assert _marked(mark) == []
    assert running.poll() != 0
    assert "started" in log.read_text(encoding="utf-8")


SPELLED = ("Cmd", "Entrypoint", "Env", "Hostname", "Image", "User", "WorkingDir")
LIMITED = (
    *("Binds", "CapDrop", "ExtraHosts", "Init", "NetworkMode", "Privileged", "ReadonlyRootfs"),
    *("SecurityOpt", "ShmSize", "Tmpfs"),
)


def test_the_shown_command_makes_the_same_container_as_the_sdk(
    engine: ContainerEngine, client: DockerClient, daemon: str
) -> None:
    command = engine.render(python("print('here')", NAME="with space"))
    shown = list(command.arguments)
    made = [str(client.containers.create(**command.container.sdk_arguments()).id)]
    created = ["docker", "create", *(word for word in shown[2:] if word != "--rm")]
    made.append(subprocess.run(created, check=True, capture_output=True, text=True).stdout.strip())
    try:
        (sdk, cli) = ([*client.api.inspect_container(one).items()] for one in made)
        facts = [dict(sdk), dict(cli)]
    finally:
        for one in made:
            client.api.remove_container(one, force=True)
    for name in SPELLED:
        one, other = (fact["Config"].get(name) for fact in facts)
        assert (sorted(one) == sorted(other)) if name == "Env" and daemon == "docker" else True, name
        assert name == "Env" or one == other, name
    for name in LIMITED:
        one, other = (fact["HostConfig"].get(name) for fact in facts)
        assert (sorted(one or []) == sorted(other or [])) if name == "Binds" else one == other, name


def test_the_shown_command_does_what_the_engine_does(engine: ContainerEngine, workspace: Workspace) -> None:
    command = engine.render(python(SELF, ASKED="with space"))
    if command.writer:
        change_owner(workspace.run, giver=os.getuid(), taker=command.writer)
    done = subprocess.run(command.arguments, capture_output=True, text=True, check=True, cwd=command.folder)
    assert json.loads(done.stdout) == json.loads(engine.read(python(SELF, ASKED="with space")))


def owners(folder: Path) -> dict[str, tuple[int, int]]:
    paths = (folder, *folder.rglob("*"))
    return {str(path.relative_to(folder)): (path.lstat().st_uid, path.lstat().st_gid) for path in paths}


def test_what_a_container_wrote_belongs_to_the_caller_and_nothing_else_changes_hands(
    engine: ContainerEngine, workspace: Workspace
) -> None:
    (workspace.run / "points").mkdir()
    (workspace.run / "points" / "job.json").touch()
    (workspace.run / "leads out").symlink_to(workspace.data)
    (workspace.data / "others").touch()
    os.utime(workspace.data / "others", (1, 1))
    stamps = {path: path.lstat().st_ctime_ns for path in (workspace.data, workspace.data / "others")}
    caller = (os.getuid(), os.getgid())
    program = "import pathlib; pathlib.Path('/twinrun/run/points/made').touch()"
    engine.read(python(program))
    running = engine.start(engine.render(python(program.replace("made", "later"))), log=workspace.run / "log")
    assert ended(running) == 0
    running.stop()
    assert set(owners(workspace.run).values()) == {caller}
    assert {"points/made", "points/later"} <= owners(workspace.run).keys()
    assert {path: path.lstat().st_ctime_ns for path in stamps} == stamps

    prepared = "import pathlib; pathlib.Path('/twinrun/data/made').touch()"
    engine.read(Command(arguments=("python", "-c", prepared), variables={}, writes_data=True))
    assert set(owners(workspace.data).values()) == {caller}
    assert (workspace.data / "others").lstat().st_ctime_ns == stamps[workspace.data / "others"]


def test_a_container_that_does_not_start_leaves_the_folder_to_the_caller(
    client: DockerClient, stack: LoadedStack, cpu: Vendor, workspace: Workspace
) -> None:
    container = cpu.container.model_copy(update={"devices": ("/dev/no-such-gpu",)})
    vendor = cpu.model_copy(update={"container": container})
    engine = ContainerEngine(client=client, image=stack.image(), vendor=vendor, workspace=workspace)
    with pytest.raises(MachineError):
        engine.start(engine.render(python("pass")), log=workspace.run / "log")
    assert set(owners(workspace.run).values()) == {(os.getuid(), os.getgid())}
