"""The image of a cluster's containers: Debian with Slurm, munge, OpenMPI and MariaDB; no Python."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.images.apt_archive import KEYRING, own_mirror
from twinrun.images.root_filesystem import mmdebstrap
from twinrun.machine.daemon import daemon_errors, find_image

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "twinrun/cluster"
SUITE = "trixie"
# An engine compresses and unpacks the whole root before it answers.
_IMPORT_SECONDS = 600


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
