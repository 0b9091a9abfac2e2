"""A Debian with Python as an image that every daemon can load, and the daemons it is loaded into."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
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
        subprocess.run(["podman", *storage, "system", "reset", "--force"], check=True, timeout=SECONDS)
        for left in (folder, short):
            shutil.rmtree(left, ignore_errors=True)


def await_daemon(address: str) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
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
