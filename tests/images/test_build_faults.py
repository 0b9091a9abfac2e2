"""What goes wrong with a build: each with its exit code and one message, and nothing is lost."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker import DockerClient

from tests.tiny_build import another, arguments, build, environment, relock
from tests.tiny_image import await_daemon
from tests.tiny_stack import STACK, Checkout
from twinrun.manifests.stack import load_stack

pytestmark = pytest.mark.image

PYTHON_STAGE = "FROM system AS python\n"


def test_a_failing_step_is_named_with_its_last_lines(checkout: Checkout, tmp_path: Path) -> None:
    instead = (PYTHON_STAGE, f"{PYTHON_STAGE}RUN echo so far so good; false\n")
    done = build(another(checkout, tmp_path / "project", instead=instead))
    assert done.returncode == 4, done.stderr
    assert "images/Dockerfile [python 1/2]: a step of the image failed" in done.stderr
    for text in ("so far so good", "exit code: 1", "build.log"):
        assert text in done.stderr


def test_stopped_by_the_user(client: DockerClient, checkout: Checkout, tmp_path: Path) -> None:
    instead = (PYTHON_STAGE, f"{PYTHON_STAGE}RUN sleep 600\n")
    slow = another(checkout, tmp_path / "project", instead=instead)
    command = arguments(slow)
    with subprocess.Popen(
        command, cwd=slow.root, env=environment(slow), stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert any("sleep 600" in line for line in running.stderr)
        running.send_signal(signal.SIGINT)
        output = running.stderr.read()
        assert (running.wait(60), ": stopped" in output) == (5, True), output
    assert not list((slow.root.parent / "cache").glob("building-*"))
    images = client.images.list(name=load_stack(slow.root, STACK).image())
    assert not [image for image in images if "sleep" in json.dumps(image.history())]


def test_what_a_killed_build_has_left_is_removed(
    client: DockerClient, checkout: Checkout, tmp_path: Path
) -> None:
    image = json.loads(build(checkout, "--json").stdout)["built"]["image"]
    program = (
        "import docker, sys, time\nfrom twinrun.images.archive import export_root\n"
        "with export_root(docker.from_env(), sys.argv[1]):\n    print('open', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program, image], stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"open\n"
        killed.kill()
    done = build(checkout, "--save", str(tmp_path / "image.tar"))
    assert "which a killed command had left" in done.stderr
    assert not client.containers.list(all=True, filters={"ancestor": image})


def test_an_engine_out_of_reach(checkout: Checkout, tmp_path: Path) -> None:
    done = build(checkout, DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert (done.returncode, "does not answer" in done.stderr) == (3, True)
    path = tmp_path / "closed.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        path.chmod(0)
        if os.getuid() == 0:
            os.chown(path, 65534, 65534)
        # Root may open everything, unless it has lost that right.
        less = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.getuid() == 0 else ()
        done = build(checkout, wrap=less, DOCKER_HOST=f"unix://{path}")
    assert done.returncode == 3, done.stderr
    assert "Permission denied" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_processor(checkout: Checkout, tmp_path: Path) -> None:
    other = another(checkout, tmp_path / "project")
    manifest = other.root / "images/stacks" / STACK / "stack.toml"
    text = manifest.read_text(encoding="utf-8").replace("\n[base]", 'platform = "linux/arm64"\n\n[base]', 1)
    manifest.write_text(text, encoding="utf-8")
    relock(other.root)
    done = build(other)
    assert done.returncode == 3, done.stderr
    assert "the engine's processor is not the stack's" in done.stderr


# A full disk


@contextlib.contextmanager
def small_engine(folder: Path, megabytes: int) -> Iterator[str]:
    """An engine of its own on a small disk, and its address."""
    data, address = folder / "data", f"unix://{folder}/docker.sock"
    data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(data)], check=True)
    folders = [f"--data-root={data}", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid"]
    network = ["--bridge=none", "--iptables=false", "--ip-masq=false"]
    with (folder / "log").open("wb") as log:
        # An engine without a bridge removes the one it finds: this machine's belongs to another engine.
        command = ["unshare", "--net", "dockerd", f"--host={address}", *folders, *network]
        engine = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        await_daemon(address)
        # The SDK leaves sockets that could not connect to the collector.
        gc.collect()
        yield address
    finally:
        engine.terminate()
        engine.wait(60)
        subprocess.run(["umount", "--recursive", "--lazy", str(data)], check=False)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
@pytest.mark.needs("root")  # to mount a small disk
def test_a_disk_that_fills_up_in_the_middle(checkout: Checkout, tmp_path: Path) -> None:
    # The step waits until the disk is full.
    waiting = f"{PYTHON_STAGE}RUN sleep 10; dd if=/dev/zero of=/opt/large bs=1M count=64\n"
    other = another(checkout, tmp_path / "project", instead=(PYTHON_STAGE, waiting))
    with small_engine(tmp_path, 1500) as address:
        filler = tmp_path / "data" / "filler"
        thread = threading.Thread(target=fill_when, args=(filler, other.root, "sleep 10"), daemon=True)
        thread.start()
        done = build(other, DOCKER_HOST=address)
        thread.join()
        assert done.returncode == 3, done.stderr
        for text in ("not enough space on the disk", "MB free in", "MB needed", "nothing was tagged"):
            assert text in done.stderr
        engine = docker.DockerClient(base_url=address)
        assert not engine.images.list(name="twinrun-test/tiny")
        # A disk that is full before is refused before.
        again = build(checkout, DOCKER_HOST=address)
        assert (again.returncode, "not enough space" in again.stderr) == (3, True), again.stderr
        filler.unlink()
        assert build(checkout, DOCKER_HOST=address).returncode == 0
        assert engine.images.list(name="twinrun-test/tiny")
        engine.close()


def fill_when(filler: Path, root: Path, step: str) -> None:
    """Fill the disk once a step of the build runs."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        logs = (root / "runs/images").glob("*/*/build.log")
        if any(f"RUN {step}" in log.read_text(encoding="utf-8") for log in logs):
            break
        time.sleep(0.1)
    with contextlib.suppress(OSError), filler.open("wb") as stream:
        while True:
            stream.write(b"\0" * (1 << 20))
            stream.flush()
