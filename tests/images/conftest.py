"""This machine's engine, and a small stack with all files that its build needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import docker
import pytest
from docker import DockerClient

from tests.tiny_build import SECONDS
from tests.tiny_stack import STACK, Checkout, commit, make_real_checkout
from twinrun.images.apt_archive import fetch_packages
from twinrun.manifests.locks import load_apt_lock, load_image_lock


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    """Yield the engine of this machine, and leave none of the small stack's images in it."""
    engine: DockerClient = docker.from_env(timeout=SECONDS)
    yield engine
    for image in engine.images.list(name="twinrun-test/tiny"):
        engine.images.remove(str(image.id), force=True)
    engine.api.prune_builds()
    engine.close()


@pytest.fixture(scope="module")
def checkout(client: DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Return the small stack with all its packages in a folder: everything after this needs no network."""
    made = make_real_checkout(tmp_path_factory.mktemp("tiny"))
    commit(made.root)
    stack = made.root / "images/stacks" / STACK
    lock, epoch = load_apt_lock(stack), load_image_lock(stack).epoch
    for package, path in fetch_packages(lock.all(), epoch=epoch).items():
        copy = made.wheelhouse / package.path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    return made
