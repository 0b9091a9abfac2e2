"""The engine for containers, against a real daemon and a small image made here."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import docker
import pytest
from docker import DockerClient

from tests.tiny_image import SECONDS, loaded, make_root_file_system, podman, write_image
from twinrun.engine import Command, Site
from twinrun.engines.docker import ContainerEngine, devices, open_engine, unusable
from twinrun.errors import MachineError, RunError
from twinrun.hardware import Vendor, load_vendors
from twinrun.process import _MARK, _marked
from twinrun.stack import LoadedStack, Stack

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "twinrun-test/tiny"
# The user of the image, for callers who are root.
IMAGE_USER = [1000, 1000]


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root_file_system(tmp_path_factory.mktemp("image") / "layer.tar")


@pytest.fixture(scope="module", params=["docker", "podman"])
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the daemon that DOCKER_HOST leads to while the tests with it run."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if request.param == "podman":
            address = stack.enter_context(podman(tmp_path_factory.mktemp("podman")))
            patch.setenv("DOCKER_HOST", address)
        yield request.param


@pytest.fixture(scope="module")
def client(daemon: str) -> Iterator[DockerClient]:
    made: DockerClient = docker.from_env(timeout=SECONDS)
    made.ping()
    yield made
    made.close()


@pytest.fixture(scope="module")
def stack(
    client: DockerClient, layer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedStack]:
    """A stack whose image is a Debian with Python and nothing else, gone after the tests."""
    made = stack_of(hashlib.sha256(layer.read_bytes()).hexdigest())
    archive = tmp_path_factory.mktemp("archive") / "image.tar"
    write_image(archive, layer=layer, name=made.image(), labels={})
    with loaded(client, archive, made.image()):
        archive.unlink()
        yield made


def stack_of(lock_sha256: str) -> LoadedStack:
    stack = Stack(name="tiny", vendor="cpu", title="tiny", python=">=3.11", image=REPOSITORY)
    return LoadedStack(stack=stack, folder="images/stacks/tiny", lock_sha256=lock_sha256)


@pytest.fixture
def cpu() -> Vendor:
    return load_vendors(ROOT)["cpu"]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(root=tmp_path / "project", run=tmp_path / "run", data=tmp_path / "data")
    for folder in (made.root, made.run, made.data):
        folder.mkdir()
    (made.root / "src").mkdir()
    (made.root / "src" / "ours.py").write_text("NAME = 'of the project'\n", encoding="utf-8")
    return made


@pytest.fixture
def engine(client: DockerClient, stack: LoadedStack, cpu: Vendor, site: Site) -> Iterator[ContainerEngine]:
    made = open_engine(stack=stack, vendor=cpu, site=site, say=print)
    assert isinstance(made, ContainerEngine)
    yield made
    made._client.close()
    assert containers(client, stack) == []


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
    assert isinstance(status, int)
    return status


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_no_daemon_and_no_image_are_told_apart(
    stack: LoadedStack, cpu: Vendor, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unusable(stack=stack, vendor=cpu) is None
    absent = stack_of("0" * 64)
    assert unusable(stack=absent, vendor=cpu) == f"no image {REPOSITORY}:000000000000"
    with pytest.raises(MachineError, match="the image is not on this machine"):
        open_engine(stack=absent, vendor=cpu, site=site, say=print)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert unusable(stack=stack, vendor=cpu) == "the Docker daemon does not answer"
    with pytest.raises(MachineError, match="does not answer") as caught:
        open_engine(stack=stack, vendor=cpu, site=site, say=print)
    assert f"{tmp_path}/no.sock" in str(caught.value)
    # The SDK leaves sockets that could not connect to the collector.
    del caught
    gc.collect()
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setattr("twinrun.daemon.SOCKET", str(tmp_path / "no.sock"))
    assert unusable(stack=stack, vendor=cpu) == "no Docker daemon on this machine"


def test_the_digest_is_that_of_the_image(
    engine: ContainerEngine, client: DockerClient, stack: LoadedStack
) -> None:
    assert engine.image_digest == client.images.get(stack.image()).id
    assert str(engine.image_digest).startswith("sha256:")


SELF = """
import json, os, socket
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":\\t", 1) for line in lines if ":\\t" in line)
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "capabilities": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "no_new_privileges": status["NoNewPrivs"],
    "interfaces": [name for _, name in socket.if_nameindex()],
    "address": socket.gethostbyname(socket.getfqdn()),
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
    # The ranks of a run find each other under this name.
    assert facts["address"] == "127.0.0.1"
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
    engine: ContainerEngine, site: Site, writes_data: bool
) -> None:
    folders = [engine.inside(folder) for folder in (site.run, site.data, site.root)]
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
    assert (site.run / "made").read_text(encoding="utf-8") == "here"
    assert (site.data / "made").exists() == writes_data
    assert not (site.root / "made").exists()


def test_a_project_that_the_container_cannot_read_is_told(engine: ContainerEngine, site: Site) -> None:
    if os.getuid():
        pytest.skip("only callers who are root run containers as somebody else")
    site.root.chmod(0o700)
    with pytest.raises(MachineError, match="cannot read the project") as caught:
        engine.read(python("pass"))
    assert "chmod -R go+rX" in str(caught.value)


def test_the_user_is_the_one_who_asks_even_if_not_root(
    engine: ContainerEngine, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid() == 0:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        monkeypatch.setattr(os, "getgid", lambda: 23456)
        os.chown(site.run, 12345, 23456)
    program = "import os, pathlib; pathlib.Path('/twinrun/run/made').touch(); print(os.getuid(), os.getgid())"
    assert engine.read(python(program)).split() == [str(os.getuid()), str(os.getgid())]
    assert (site.run / "made").stat().st_uid == os.getuid()


def test_the_project_is_imported_from(engine: ContainerEngine) -> None:
    assert engine.read(python("import ours; print(ours.NAME)")) == "of the project\n"


def test_a_failed_command_is_told_with_its_last_lines(engine: ContainerEngine) -> None:
    with pytest.raises(RunError, match="the command failed") as caught:
        engine.read(python("raise SystemExit('the disk is on fire')"))
    assert "the disk is on fire" in str(caught.value)


def test_status_and_output_are_passed_on(engine: ContainerEngine, site: Site) -> None:
    log = site.run / "log" / "launcher.log"
    program = "import sys; print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(77)"
    running = engine.start(python(program), log=log)
    assert ended(running) == 77
    assert running.poll() == 77
    running.stop()
    assert sorted(log.read_text(encoding="utf-8").splitlines()) == ["to stderr", "to stdout"]


def test_what_the_daemon_refuses_is_told_and_leaves_nothing(
    client: DockerClient, stack: LoadedStack, cpu: Vendor, site: Site
) -> None:
    container = cpu.container.model_copy(update={"devices": ("/dev/no-such-gpu",)})
    vendor = cpu.model_copy(update={"container": container})
    engine = ContainerEngine(client=client, image=stack.image(), vendor=vendor, site=site)
    for attempt in (engine.read, lambda command: engine.start(command, log=site.run / "log")):
        with pytest.raises(MachineError, match="cannot run a container") as caught:
            attempt(python("pass"))
        assert "no-such-gpu" in str(caught.value)
        assert "hint:" in str(caught.value)
    assert containers(client, stack) == []


def test_a_daemon_that_drops_device_requests_is_not_used(daemon: str, stack: LoadedStack, site: Site) -> None:
    vendors = load_vendors(ROOT).values()
    asking = next(vendor for vendor in vendors if vendor.container.driver)
    reason = "Podman's socket passes no device requests on" if daemon == "podman" else None
    assert unusable(stack=stack, vendor=asking) == reason
    if reason:
        with pytest.raises(MachineError, match=reason):
            open_engine(stack=stack, vendor=asking, site=site, say=print)


def test_a_container_that_others_removed_is_told(
    engine: ContainerEngine, client: DockerClient, stack: LoadedStack, site: Site
) -> None:
    running = engine.start(python("import time; time.sleep(600)"), log=site.run / "log")
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
    engine: ContainerEngine, client: DockerClient, stack: LoadedStack, site: Site
) -> None:
    (site.run / "stubborn.py").write_text(STUBBORN, encoding="utf-8")
    log = site.run / "log" / "launcher.log"
    mark = str(site.run)
    command = Command(arguments=("python", "/twinrun/run/stubborn.py"), variables={_MARK: mark})
    running = engine.start(command, log=log)
    deadline = time.monotonic() + SECONDS
    while not ((site.run / "parent").exists() and (site.run / "child").exists()):
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


def test_devices_are_as_the_vendors_manifest_says(
    client: DockerClient, stack: LoadedStack, site: Site, tmp_path: Path
) -> None:
    vendors = load_vendors(ROOT)
    rendered = {}
    for name, vendor in vendors.items():
        engine = ContainerEngine(client=client, image=stack.image(), vendor=vendor, site=site)
        arguments = engine.arguments(python("pass"))
        assert not arguments.get("privileged")
        assert arguments["cap_drop"] == ["ALL"]
        assert "cap_add" not in arguments
        assert devices(vendor).items() <= arguments.items()
        rendered[name] = devices(vendor)
    assert rendered["cpu"] == {}
    (request,) = rendered["cuda"]["device_requests"]
    assert request == {
        "Driver": "nvidia",
        "Count": -1,
        "DeviceIDs": [],
        "Capabilities": [["gpu", "compute", "utility"]],
        "Options": {},
    }
    assert rendered["rocm"]["devices"] == ["/dev/kfd:/dev/kfd:rwm", "/dev/dri:/dev/dri:rwm"]

    # Stands for device files that belong to a group of this machine.
    file = tmp_path / "renderD128"
    file.touch()
    container = vendors["rocm"].container.model_copy(update={"groups_of": (f"{tmp_path}/renderD*",)})
    joined = devices(vendors["rocm"].model_copy(update={"container": container}))
    assert joined["group_add"] == [file.stat().st_gid]
