"""The engine apptainer where it is installed: what its processes see, may write, are told, and leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_image import make_root_file_system
from twinrun.execution.engine import Command, Workspace, run_to_end
from twinrun.execution.engines.apptainer import PROGRAM
from twinrun.execution.sif import SifEngine
from twinrun.foundation.errors import RunError
from twinrun.foundation.files import sha256_of_file
from twinrun.images.archive import Image, ImageLayer, image_archive
from twinrun.images.dockerfile import ContainerConfig
from twinrun.manifests.vendor import load_vendors

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
pytestmark = pytest.mark.needs(PROGRAM.name, "mmdebstrap", "mirror")
# What a shell would replace, run, split or end at.
TRICKY = "a 'quoted' \"text\" with $HOME, `touch {canary}`, $(touch {canary}), \\ and a\nline \\"
# Tries to write into each folder that it is given, and says where it is and what it was told.
LOOKS = """
import json, os, sys, tempfile
import twinrun

def writable(folder):
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True

facts = {"received": os.environ["TOLD"], "folder": os.getcwd(), "user": os.getuid(), "python": sys.executable}
facts |= {"package": twinrun.__file__, "writable": [one for one in sys.argv[1:] if writable(one)]}
print(json.dumps(facts))
"""
# Starts another process in a session of its own, and waits with it.
WAITS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "{mark}"], start_new_session=True)
print("waits", flush=True)
time.sleep(600)
"""
# A rank that was told to end goes on to the end of its step.
SAVES = """
import signal, sys, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
print("trains", flush=True)
while not received:
    time.sleep(0.05)
time.sleep(0.5)
sys.exit(5)
"""


@pytest.fixture(scope="module")
def sif(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Debian with Python as the file that is made of a saved image."""
    folder = tmp_path_factory.mktemp("sif")
    layer = make_root_file_system(folder / "layer.tar")
    image = Image(
        platform="linux/amd64",
        epoch=0,
        container_config=ContainerConfig(env={"TOLD": "the image's"}, user="1000:1000", working_dir="/"),
        labels={},
        layers=(ImageLayer(diff_id=f"sha256:{sha256_of_file(layer)}", created_by="a test", file=layer),),
    )
    archive = folder / "image.tar"
    with archive.open("wb") as stream:
        stream.writelines(image_archive(image, "twinrun-test/tiny:1"))
    command = [PROGRAM.name, "build", str(folder / "tiny.sif"), f"oci-archive:{archive}"]
    subprocess.run(command, check=True, timeout=600)
    return folder / "tiny.sif"


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(root=ROOT, run=tmp_path / 'a, "run": b', data=tmp_path / "data")
    for folder in (made.run, made.data):
        folder.mkdir()
    return made


@pytest.fixture
def engine(sif: Path, workspace: Workspace) -> SifEngine:
    return SifEngine(program=PROGRAM, file=sif, vendor=load_vendors(ROOT)["cpu"], workspace=workspace)


def command(program: str, *words: str, **variables: str) -> Command:
    return Command(arguments=("python", "-c", program, *words), variables=variables)


def processes(pattern: str) -> str:
    done = subprocess.run(["pgrep", "--full", pattern], capture_output=True, text=True, check=False)
    return done.stdout


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_printed(log: Path, word: str) -> None:
    until(lambda: log.exists() and word in log.read_text(encoding="utf-8"))


def test_a_process_sees_its_folders_and_is_told_any_text(
    engine: SifEngine, workspace: Workspace, tmp_path: Path
) -> None:
    received = TRICKY.replace("{canary}", str(workspace.run / "canary"))
    folders = ("/", "/usr", "/etc", "/var/tmp", "/root", str(ROOT), str(workspace.data), str(workspace.run))
    found = json.loads(engine.read(command(LOOKS, *folders, TOLD=received)))
    assert found["received"] == received
    assert not list(workspace.run.iterdir())
    assert found["writable"] == [str(workspace.run)]
    assert found["folder"] == str(ROOT)
    assert found["user"] == os.getuid()
    assert found["python"].startswith("/usr/bin/python3")
    assert found["package"] == str(ROOT / "src" / "twinrun" / "__init__.py")


def test_an_exit_status_comes_back(engine: SifEngine, workspace: Workspace) -> None:
    log = workspace.run / "log"
    assert run_to_end(engine, command("print('said'); raise SystemExit(77)"), log=log) == 77
    assert "said\n" in log.read_text(encoding="utf-8")
    with pytest.raises(RunError, match="the command failed") as caught:
        engine.read(command("raise SystemExit('why')"))
    assert "why" in str(caught.value)


def test_a_stop_leaves_nothing(engine: SifEngine, workspace: Workspace) -> None:
    mark, log = f"twinrun-waits-{os.getpid()}", workspace.run / "log"
    running = engine.start(engine.render(command(WAITS.replace("{mark}", mark))), log=log)
    until_printed(log, "waits")
    assert processes(f"sleep.600. {mark}")
    running.stop()
    # What was killed takes a moment to be gone.
    until(lambda: not processes(mark))


def test_ranks_that_are_told_to_end_save_first(engine: SifEngine, workspace: Workspace) -> None:
    log = workspace.run / "log"
    rendered = engine.render(command(SAVES))
    # As Slurm does it: every process of the step is told.
    with log.open("wb") as stream:
        process = subprocess.Popen(
            rendered.arguments,
            env=os.environ | rendered.variables,
            cwd=rendered.folder,
            stdout=stream,
            start_new_session=True,
        )
    until_printed(log, "trains")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(SECONDS) == 5
