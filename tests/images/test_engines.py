"""The same image from every engine, and what leaves it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import docker
import pytest
from docker import DockerClient

from tests.tiny_build import SECONDS, another, answer, build
from tests.tiny_image import containerd_store, podman
from tests.tiny_stack import STACK, Checkout
from twinrun.execution.engines import load_engine
from twinrun.machine import daemon
from twinrun.manifests.stack import load_stack
from twinrun.manifests.vendor import load_vendors

pytestmark = pytest.mark.image

ENGINES = [
    pytest.param(podman, marks=pytest.mark.needs("podman", "root"), id="podman"),
    pytest.param(containerd_store, marks=pytest.mark.needs("unshare", "root"), id="containerd-store"),
]


@pytest.fixture(scope="module")
def built(client: DockerClient, checkout: Checkout) -> dict[str, Any]:
    """The small stack as this machine's engine builds it."""
    return answer(build(checkout, "--json"))["built"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("start", ENGINES)
def test_another_engine_builds_the_same_image(
    start: Callable[[Path], AbstractContextManager[str]],
    checkout: Checkout,
    built: dict[str, Any],
    tmp_path: Path,
) -> None:
    other = another(checkout, tmp_path / "there" / "checkout")
    # The base is the one thing that an engine has no part in.
    shutil.copytree(checkout.root.parent / "cache/bases", tmp_path / "there/cache/bases")
    (tmp_path / "engine").mkdir()
    with start(tmp_path / "engine") as address:
        there = answer(build(other, "--json", DOCKER_HOST=address))["built"]
        assert (there["id"], there["layers"]) == (built["id"], built["layers"])
        again = answer(build(other, "--json", DOCKER_HOST=address))["built"]
        assert (again["id"], again["fresh"]) == (built["id"], False)
        engine: DockerClient = docker.DockerClient(base_url=address, timeout=SECONDS)
        assert daemon.image_id(engine, built["image"]) == built["id"]
        # What somebody adds to the configuration is another image.
        container = engine.api.create_container(built["image"], command=["true"])["Id"]
        engine.api.commit(container, "twinrun-test/tiny", "planted", conf={"Entrypoint": ["sh"]})
        assert daemon.image_id(engine, "twinrun-test/tiny:planted") != built["id"]
        engine.close()


@pytest.mark.needs("skopeo")
def test_what_is_saved_is_a_layout_with_all_that_a_build_needs(
    checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    carried = tmp_path / "carried"
    done = answer(build(checkout, "--save", str(carried), "--json"))
    assert (done["built"]["id"], done["saved"]) == (built["id"], str(carried))
    layout = f"oci-archive:{carried}/image.tar"
    inspected = subprocess.run(["skopeo", "inspect", "--raw", layout], capture_output=True, check=True)
    assert json.loads(inspected.stdout)["config"]["digest"] == built["id"]
    subprocess.run(["skopeo", "copy", "--quiet", layout, f"oci:{tmp_path}/copy"], check=True)
    other = another(checkout, tmp_path / "there" / "checkout")._replace(wheelhouse=carried)
    again = answer(build(other, "--base", str(carried / "base.tar"), "--json"))["built"]
    assert again["id"] == built["id"]


def test_a_stage_of_the_same_inputs_is_not_built_again(
    client: DockerClient, checkout: Checkout, built: dict[str, Any]
) -> None:
    answer(build(checkout, "--json"))
    client.images.remove(built["image"], force=True)
    client.api.prune_builds()
    again = answer(build(checkout, "--json"))["built"]
    assert (again["id"], again["fresh"]) == (built["id"], True)
    assert [layer["bytes"] for layer in again["layers"][1:]] == [None, None]
    kept = checkout.root.parent / "cache/layers" / STACK / "python.tar"
    kept.write_bytes(kept.read_bytes()[:-1] + b"!")
    client.images.remove(built["image"], force=True)
    healed = answer(build(checkout, "--json"))["built"]
    assert (healed["id"], healed["layers"][1]["bytes"]) == (built["id"], None)
    assert healed["layers"][2]["bytes"]


def test_an_image_without_its_tag_is_known_by_its_id(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is after `docker pull REPOSITORY@sha256:DIGEST`."""
    monkeypatch.setenv("TWINRUN_CACHE", str(checkout.root.parent / "cache"))
    stack = load_stack(checkout.root, STACK)
    client.images.get(built["id"]).tag("twinrun-test/tiny", "pulled")
    client.images.remove(built["image"])
    assert load_engine("docker").unusable(stack=stack, vendor=load_vendors(checkout.root)["cpu"]) is None
    assert answer(build(checkout, "--json"))["built"] | {"layers": ()} == built | {
        "fresh": False,
        "layers": (),
    }
