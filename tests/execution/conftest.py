"""Container engines that run here, each with a small image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import docker
import pytest
from docker import DockerClient

from tests.tiny_image import SECONDS, loaded, make_root_file_system, podman, write_image
from twinrun.manifests.image_identity import CommittedInventory
from twinrun.manifests.stack import LoadedStack, Stack

if find_spec("streaming"):
    from tests.train.small import corpus_folder, make_job  # noqa: F401 - fixtures

ROOT = Path(__file__).resolve().parents[2]

REPOSITORY = "twinrun-test/tiny"


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
        committed = CommittedInventory(image=made.image(), digest=str(client.images.get(made.image()).id))
        yield made.model_copy(update={"committed": committed})


def stack_of(sha256: str) -> LoadedStack:
    stack = Stack(name="tiny", vendor="cpu", title="tiny", python=">=3.11", image=REPOSITORY)
    return LoadedStack(stack=stack, folder="images/stacks/tiny", lock_sha256=sha256, inputs_sha256=sha256)
