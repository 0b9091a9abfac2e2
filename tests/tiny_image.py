"""A Debian with Python as an image that every daemon can load, and the daemons it is loaded into."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import docker
from docker import DockerClient
from docker.errors import DockerException

SECONDS = 60
# A machine may itself be a container: its limits cannot be raised, and crun knows no mixed control groups.
PODMAN = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
"""


def make_root_file_system(tar: Path) -> Path:
    """Write a minimal Debian with Python to `tar`."""
    options = ["--quiet", "--variant=minbase", "--include=python3"]
    subprocess.run(["mmdebstrap", *options, "bookworm", str(tar)], check=True, timeout=300)
    return tar


def write_image(archive: Path, *, layer: Path, name: str, labels: Mapping[str, str]) -> None:
    """Write the root file system `layer` as an image, in the form that `docker save` has."""
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    configuration = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": "2025-01-01T00:00:00Z",
            "config": {"Labels": dict(labels), "Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as stream:
        for member, content in (
            ("config.json", configuration),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            stream.addfile(entry, io.BytesIO(content))
        stream.add(layer, "layer.tar")


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[str]:
    """Start Podman's Docker-compatible service with images of its own, and yield its address."""
    # Podman takes no run root of more than 50 characters, which folders of parallel tests have.
    short = Path(tempfile.mkdtemp(prefix="podman-"))
    storage = ["--root", str(folder / "root"), "--runroot", str(short / "run")]
    address = f"unix://{folder}/podman.sock"
    configuration = folder / "containers.conf"
    configuration.write_text(PODMAN, encoding="utf-8")
    command = ["podman", *storage, "system", "service", "--time=0", address]
    service = subprocess.Popen(command, env=os.environ | {"CONTAINERS_CONF": str(configuration)})
    try:
        await_daemon(address)
        yield address
    finally:
        service.terminate()
        service.wait(SECONDS)
        # What overlays leave mounted, only Podman itself can take away.
        subprocess.run(["podman", *storage, "system", "reset", "--force"], check=True, timeout=5 * SECONDS)
        for left in (folder, short):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def containerd_store(folder: Path) -> Iterator[str]:
    """Start Debian 13's Docker with the image store of containerd in a root of its own; yield its address."""
    root, options = folder / "root", ["--quiet", "--variant=apt", "--include=docker.io,mount"]
    subprocess.run(["mmdebstrap", *options, "trixie", str(root)], check=True, timeout=900)
    (root / "etc/docker").mkdir(exist_ok=True)
    settings = {"features": {"containerd-snapshotter": True}, "bridge": "none", "iptables": False}
    (root / "etc/docker/daemon.json").write_text(json.dumps(settings), encoding="utf-8")
    # Its processes end with the first of their own space of numbers; TERM would leave them. And an engine
    # without a bridge removes the one it finds, which in this machine's network is another engine's.
    apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL"]
    # Folders of this machine are not there.
    environment = {"PATH": os.environ["PATH"]}
    service = subprocess.Popen(
        [*apart, "sh", "-c", _ENTER, "sh", str(root), str(folder.parent)], env=environment
    )
    try:
        address = f"unix://{root}/sock/docker.sock"
        await_daemon(address)
        yield address
    finally:
        service.kill()
        service.wait(SECONDS)
        shutil.rmtree(folder, ignore_errors=True)


# The root becomes a mount: the engine unpacks layers in roots that it changes into. What containers are given
# of this machine lies under the second folder.
_ENTER = """
set -eu
mount --make-rprivate /
mount --bind "$1" "$1"
cd "$1"
mkdir -p sock before ".$2"
mount --bind "$2" ".$2"
mount --rbind /sys sys
mount --rbind /dev dev
mount -t proc proc proc
mount -t tmpfs tmpfs run
pivot_root . before
umount -l before
exec dockerd --host unix:///sock/docker.sock
"""


def await_daemon(address: str) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            # The SDK leaves sockets that could not connect to the collector.
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
                probe.connect(address.removeprefix("unix://"))
            client = docker.DockerClient(base_url=address, timeout=SECONDS)
            client.ping()
        except (DockerException, OSError):
            assert time.monotonic() < deadline, f"nothing answers at {address}"
            time.sleep(0.1)
        else:
            return client.close()


@contextlib.contextmanager
def loaded(client: DockerClient, archive: Path, name: str) -> Iterator[None]:
    """Load the image of `archive` into the daemon, and remove it again."""
    with archive.open("rb") as stream:
        client.images.load(stream)
    try:
        yield
    finally:
        client.images.remove(name, force=True)
