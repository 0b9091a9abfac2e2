"""A Debian with Python, and the daemons that an image is built or loaded in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from docker import DockerClient

SECONDS = 60
# A machine may itself be a container: its limits cannot be raised, and crun knows no mixed control groups.
PODMAN = """
[containers]
default_ulimits = []
[engine]
runtime = "runc"
"""
# Podman takes no run root of more than 50 characters, which folders of parallel tests have.
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{}/root"\nrunroot = "{}/run"\n'


def make_root_file_system(tar: Path) -> Path:
    """Write a minimal Debian with Python to `tar`."""
    options = ["--quiet", "--variant=minbase", "--include=python3"]
    subprocess.run(["mmdebstrap", *options, "bookworm", str(tar)], check=True, timeout=300)
    return tar


def podman_variables(folder: Path) -> dict[str, str]:
    """Return the settings of the service in `folder`, by which Podman's own client works beside it."""
    files = {"CONTAINERS_CONF": "containers.conf", "CONTAINERS_STORAGE_CONF": "storage.conf"}
    return {name: str(folder / file) for name, file in files.items()}


@contextlib.contextmanager
def podman(folder: Path) -> Iterator[str]:
    """Start Podman's Docker-compatible service with images of its own, and yield its address."""
    short = Path(tempfile.mkdtemp(prefix="podman-"))
    address = f"unix://{folder}/podman.sock"
    variables = os.environ | podman_variables(folder)
    (folder / "containers.conf").write_text(PODMAN, encoding="utf-8")
    (folder / "storage.conf").write_text(STORAGE.format(folder, short), encoding="utf-8")
    service = subprocess.Popen(["podman", "system", "service", "--time=0", address], env=variables)
    try:
        await_daemon(address)
        yield address
    finally:
        service.terminate()
        service.wait(SECONDS)
        # What overlays leave mounted, only Podman itself can take away.
        reset = ["podman", "system", "reset", "--force"]
        subprocess.run(reset, env=variables, check=True, timeout=5 * SECONDS)
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
    """Wait until the daemon behind a socket answers."""
    deadline, refused = time.monotonic() + SECONDS, True
    while refused:
        assert time.monotonic() < deadline, f"nothing answers at {address}"
        # The SDK would leave a connection open that was refused.
        with socket.socket(socket.AF_UNIX) as probe:
            refused = bool(probe.connect_ex(address.removeprefix("unix://")))
        time.sleep(0.1)
    DockerClient(address, timeout=SECONDS).close()
