"""Docker, Podman and Apptainer, where they are: what processes see and may write, and that they end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.execution.clusters import until
from tests.tiny_image import PODMAN as PODMAN_SETTINGS
from tests.tiny_image import make_root_file_system
from twinrun.execution.containers import ContainerEngine
from twinrun.execution.engine import Command, Engine, Workspace, run_to_end
from twinrun.execution.engines import Apptainer, load_engine
from twinrun.foundation.errors import MachineError, RunError
from twinrun.manifests.stack import LoadedStack, Stack
from twinrun.manifests.vendor import load_vendors

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "twinrun-test/engines:1"
CONTAINERS = [
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("podman", marks=pytest.mark.needs("podman", "root")),
]
ENGINES = [*CONTAINERS, pytest.param("apptainer", marks=pytest.mark.needs("apptainer"))]
# What a shell would replace, run, split or end at.
TRICKY = "a 'quoted' \"text\" with $HOME, `touch canary`, $(touch canary), \\ and a\nline \\"
# Tries to write into each folder that it is given, and says where it is and what it was told.
LOOKS = """
import json, os, sys, tempfile
import ours

def writable(folder):
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True

status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "told": os.environ["TOLD"], "user": os.getuid(), "ours": ours.NAME,
    "powers": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "writable": [one for one in sys.argv[1:] if writable(one)],
    "links": [name for name in os.listdir("/sys/class/net") if name != "lo"],
}))
"""
# Ignores being told to end, as does a child in a session of its own, and writes the time.
STAYS = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
CHILD = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=True)
print("up", flush=True)
while True:
    pathlib.Path(sys.argv[1]).write_text(str(time.time()))
    time.sleep(0.1)
"""
SAVES = """
import pathlib, signal, sys, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
pathlib.Path(sys.argv[1]).write_text("trains")
while not received:
    time.sleep(0.05)
time.sleep(0.5)
sys.exit(5)
"""
# Another twinrun, which is killed.
STARTS = """
import sys, time
from pathlib import Path
from twinrun.execution.engine import Command, Workspace
from twinrun.execution.engines import ENGINES
from twinrun.manifests.vendor import load_vendors
kind, root, run, stays = ENGINES[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
workspace = Workspace(root=root, run=run, data=run)
vendor = load_vendors(Path(sys.argv[5]))["cpu"]
engine = kind(image=sys.argv[6], vendor=vendor, workspace=workspace).opened()
words = ("python", "-c", stays, engine.inside(run / "alive"))
running = engine.start(engine.render(Command(arguments=words, variables={})), log=run / "log")
time.sleep(600)
"""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Debian with Python and nothing else."""
    return make_root_file_system(tmp_path_factory.mktemp("image") / "layer.tar")


@pytest.fixture(scope="module", params=ENGINES)
def name(
    request: pytest.FixtureRequest, layer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The name of an engine that has the image."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "containers.conf").write_text(PODMAN_SETTINGS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
        if request.param == "apptainer":
            subprocess.run(["tar", "--extract", "--file", layer, "--directory", folder], check=True)
            subprocess.run(["apptainer", "build", folder.with_suffix(".sif"), folder], check=True)
            patch.setenv("TINY_SIF", str(folder.with_suffix(".sif")))
            yield request.param
            return
        subprocess.run([request.param, "import", layer, IMAGE], check=True, capture_output=True)
        yield request.param
        assert not left(request.param)
        subprocess.run([request.param, "rmi", "--force", IMAGE], check=True, capture_output=True)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(root=tmp_path / "project", run=tmp_path / "run", data=tmp_path / "data")
    for folder in (made.root / "src", made.run, made.data):
        folder.mkdir(parents=True)
    (made.root / "src" / "ours.py").write_text("NAME = 'of the project'\n", encoding="utf-8")
    return made


@pytest.fixture
def engine(name: str, workspace: Workspace) -> Engine:
    vendor = load_vendors(ROOT)["cpu"]
    if name == "apptainer":
        file = Path(os.environ["TINY_SIF"])
        return Apptainer(file=file, vendor=vendor, workspace=workspace)
    made: ContainerEngine = load_engine(name)(image=IMAGE, vendor=vendor, workspace=workspace)  # type: ignore[call-arg, assignment]
    return made.opened()


def left(name: str) -> list[str]:
    # Those of this image: others on the machine are not ours.
    ours = ("--filter", "label=dev.twinrun.container=run", "--filter", f"ancestor={IMAGE}")
    words = [name, "ps", "--all", "--quiet", *ours]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


def command(program: str, *words: str, **keys: Any) -> Command:
    variables = keys.pop("variables", {})
    return Command(arguments=("python", "-c", program, *words), variables=variables, **keys)


def said(log: Path, word: str) -> bool:
    return log.exists() and word in log.read_text(encoding="utf-8")


def silent(file: Path) -> bool:
    """Say whether nobody writes a file any more."""
    before = file.read_text(encoding="utf-8")
    time.sleep(0.5)
    return file.read_text(encoding="utf-8") == before


@pytest.mark.parametrize("writes_data", [False, True])
def test_a_process_sees_its_folders_and_is_told_any_text(
    engine: Engine, workspace: Workspace, name: str, *, writes_data: bool
) -> None:
    folders = [engine.inside(one) for one in (workspace.root, workspace.run, workspace.data)]
    asked = command(LOOKS, *folders, variables={"TOLD": TRICKY}, writes_data=writes_data)
    facts = json.loads(engine.read(asked))
    assert (facts["told"], facts["ours"], facts["user"]) == (TRICKY, "of the project", os.getuid())
    assert facts["writable"] == folders[1 : 3 if writes_data else 2]
    assert name == "apptainer" or (facts["powers"], facts["links"]) == (0, [])


def test_output_comes_as_it_is_printed_and_the_status_at_the_end(
    engine: Engine, workspace: Workspace, name: str
) -> None:
    log = workspace.run / "log"
    program = "import sys, time; print('begins', flush=True); time.sleep(2); sys.exit(7)"
    running = engine.start(engine.render(command(program)), log=log)
    until(lambda: said(log, "begins"))
    assert running.poll() is None
    until(lambda: running.poll() is not None)
    assert running.poll() == 7
    running.stop()
    if name != "apptainer":
        rendered = engine.render(command("pass"))
        words = (*rendered.arguments[:3], "--device", "/dev/no-such-device", *rendered.arguments[3:])
        refused = engine.start(rendered.model_copy(update={"arguments": words}), log=log)
        until(lambda: refused.poll() is not None)
        assert refused.poll()
        assert said(log, "no-such-device")
        refused.stop()
    with pytest.raises(RunError, match="the command failed") as caught:
        engine.read(command("import sys; sys.exit('no such thing')"))
    assert "no such thing" in str(caught.value.found)
    assert run_to_end(engine, command("pass"), log=workspace.run / "other") == 0


@pytest.mark.parametrize(("program", "status"), [(STAYS, None), (SAVES, 5)])
def test_a_stop_leaves_nothing_whatever_ignores_it_and_lets_ranks_save(
    engine: Engine, workspace: Workspace, program: str, status: int | None
) -> None:
    alive, log = workspace.run / "alive", workspace.run / "log"
    running = engine.start(engine.render(command(program, engine.inside(alive))), log=log)
    until(alive.exists)
    running.stop()
    assert silent(alive)
    assert status in (None, running.poll())


@pytest.mark.parametrize("name", CONTAINERS, indirect=True)
@pytest.mark.parametrize("killed", ["client", "twinrun"])
def test_no_container_outlives_what_has_started_it(
    engine: Engine, workspace: Workspace, name: str, killed: str
) -> None:
    """A scheduler kills the client of a script; somebody kills twinrun; processes are the daemon's."""
    alive = workspace.run / "alive"
    rendered = engine.render(command(STAYS, engine.inside(alive)))
    words = [name, str(workspace.root), str(workspace.run), STAYS, str(ROOT), IMAGE]
    client = ["bash", "-c", 'exec "$@" <> <(echo 0)', "bash", *rendered.arguments]
    for _ in range(3):
        line = client if killed == "client" else [sys.executable, "-c", STARTS, *words]
        starter = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        until(alive.exists)
        starter.kill()
        starter.wait()
        until(lambda: silent(alive))
        alive.unlink()
    until(lambda: not left(name))


@pytest.mark.parametrize("name", CONTAINERS, indirect=True)
@pytest.mark.parametrize("cancels", [6, pytest.param(50, marks=pytest.mark.nightly)])
def test_no_container_is_left_of_runs_that_are_cancelled(
    engine: Engine, workspace: Workspace, name: str, cancels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the moment of their start until their ranks, which ignore that they are told to end, are up."""
    for place in ("execution.containers", "foundation.processes"):
        monkeypatch.setattr(f"twinrun.{place}.GRACE_SECONDS", 1)
    for number in range(cancels):
        alive = workspace.run / f"alive-{number}"
        rendered = engine.render(command(STAYS, engine.inside(alive)))
        running = engine.start(rendered, log=workspace.run / f"log-{number}")
        if number % 2:
            until(alive.exists)
        else:
            time.sleep(number / cancels)
        running.stop()
    assert not left(name)


@pytest.mark.docker
def test_no_daemon_and_no_image_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Stack(name="tiny", vendor="cpu", title="tiny", python=">=3.11", image="twinrun-test/tiny")
    digests = {"lock_sha256": "0" * 64, "inputs_sha256": "0" * 64}
    stack = LoadedStack.model_validate({"stack": own, "folder": "images/stacks/tiny", **digests})
    vendor, kind = load_vendors(ROOT)["cpu"], load_engine("docker")
    assert kind.unusable(stack=stack, vendor=vendor) == f"no image {stack.image()} on this machine"
    workspace = Workspace(root=tmp_path, run=tmp_path, data=tmp_path)
    with pytest.raises(MachineError, match="no image"):
        kind.open_engine(stack=stack, vendor=vendor, workspace=workspace, say=print)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    assert "does not answer" in str(kind.unusable(stack=stack, vendor=vendor))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kind.unusable(stack=stack, vendor=vendor) == "docker is not installed"
