"""Image of a cluster's containers, and the files that they share: Slurm's configuration, munge's key."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.foundation.files import write_atomically
from twinrun.images.apt_archive import KEYRING, own_mirror
from twinrun.images.root_filesystem import mmdebstrap
from twinrun.machine.daemon import daemon_errors, find_image

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "twinrun/cluster"
SUITE = "trixie"
# An engine compresses and unpacks the whole root before it answers.
_IMPORT_SECONDS = 600
CONTROLLER = "controller"
# A node that is out of service from the start.
DRAINED = "worker0"


def recipe_folder(root: Path) -> Path:
    """Return what the containers are made of and start with."""
    return root / "images" / "cluster"


def image_name(root: Path) -> str:
    """Return the name of the image, which changes with its packages."""
    listed = (recipe_folder(root) / "packages.txt").read_bytes()
    return f"{REPOSITORY}:{SUITE}-{hashlib.sha256(listed).hexdigest()[:12]}"


def ensure_image(client: DockerClient, root: Path, *, architecture: str, say: Callable[[str], None]) -> str:
    """Return the name of the image, making it where the engine does not have it.

    Raises:
        MachineError: the packages are out of reach, or the engine refuses the image.
    """
    name = image_name(root)
    if find_image(client, name) is None:
        packages = (recipe_folder(root) / "packages.txt").read_text(encoding="utf-8").split()
        say(f"making {name} of {len(packages)} Debian packages and what they need, once")
        with tempfile.TemporaryDirectory(prefix="twinrun-cluster-") as folder:
            tar = Path(folder) / "root.tar"
            _write_root(tar, packages, architecture)
            _import(client, tar, name)
    return name


def _write_root(tar: Path, packages: list[str], architecture: str) -> None:
    mirror = own_mirror().replace("{archive}", "debian").rstrip("/")
    mmdebstrap(
        *("--variant=minbase", f"--architectures={architecture}", f"--keyring={KEYRING}"),
        *(f"--include={','.join(packages)}", SUITE, str(tar), f"deb {mirror} {SUITE} main"),
        epoch=round(time.time()),
        hint="check the network, or name a mirror in TWINRUN_DEBIAN_MIRROR",
    )


def _import(client: DockerClient, tar: Path, name: str) -> None:
    repository, _, tag = name.partition(":")
    patience, client.api.timeout = client.api.timeout, _IMPORT_SECONDS
    try:
        with daemon_errors("this image"):
            client.api.import_image_from_file(str(tar), repository=repository, tag=tag)
    finally:
        client.api.timeout = patience


def cores() -> int:
    """Return the cores of a node, all nodes share those of this machine."""
    return max(2, len(os.sched_getaffinity(0)))


def write_files(root: Path, folder: Path, *, nodes: int) -> None:
    """Write what every container reads; the key is new each time, and readable for its owner alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (recipe_folder(root) / "etc").iterdir():
        text = file.read_text(encoding="utf-8").format(nodes=nodes, cores=cores())
        write_atomically(folder / file.name, text)
    key = folder / "munge.key"
    key.unlink(missing_ok=True)
    descriptor = os.open(key, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(secrets.token_bytes(1024))


def site_text(
    root: Path, *, nodes: int, vendor: str, shared: tuple[Path, ...], client: tuple[str, ...]
) -> str:
    """Return the cluster.toml of the site."""
    text = (recipe_folder(root) / "site.toml.in").read_text(encoding="utf-8")
    folders = json.dumps([str(folder) for folder in shared])
    return text.format(
        nodes=nodes, cores=cores(), vendor=vendor, shared=folders, client=json.dumps(list(client))
    )
