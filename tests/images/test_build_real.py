"""An image that is really built, from one small stack, in every way there is."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from docker import DockerClient

from tests.registries import RunningRegistry, wire
from tests.tiny_build import another, answer, arguments, build, environment
from tests.tiny_stack import STACK, Checkout
from twinrun.images.attachments import PROVENANCE, SBOM, TYPES
from twinrun.manifests.stack import load_stack

pytestmark = pytest.mark.image


@pytest.fixture(scope="module")
def built(client: DockerClient, checkout: Checkout) -> dict[str, Any]:
    """The small stack's image, built where neither this machine nor the containers have a network."""
    return answer(build(checkout, "--json", wrap=("unshare", "--net")))


def test_without_a_network_the_image_is_built(
    client: DockerClient, checkout: Checkout, built: dict[str, Any]
) -> None:
    facts = client.images.get(built["built"]["id"]).attrs
    labels = facts["Config"]["Labels"]
    assert built["built"]["image"] in facts["RepoTags"]
    assert labels["dev.twinrun.inputs-sha256"] == load_stack(checkout.root, STACK).inputs_sha256
    assert [layer["name"] for layer in built["built"]["layers"]] == ["base", "system", "python"]
    program = (
        "import importlib.util, os, small, sys;"
        "print(small.VERSION, os.getuid(), sys.executable, importlib.util.find_spec('twinrun'))"
    )
    output = client.containers.run(facts["Id"], ["python3", "-c", program], remove=True, network_mode="none")
    assert output.decode().split() == ["1.0", "1000", "/opt/twinrun/python/bin/python3", "None"]
    assert "[system 1/1]" in (Path(built["folder"]) / "build.log").read_text(encoding="utf-8")


def test_nothing_changed_is_nothing_done(checkout: Checkout, built: dict[str, Any]) -> None:
    started = time.monotonic()
    again = answer(build(checkout, "--json"))
    assert time.monotonic() - started < 5
    assert (again["built"]["id"], again["built"]["fresh"]) == (built["built"]["id"], False)


def test_another_folder_name_mask_and_zone_give_the_same_image(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    other = another(checkout, tmp_path / "elsewhere" / "project")
    client.images.remove(built["built"]["image"])
    client.api.prune_builds()
    script = 'hostname another; umask 077; TZ=Asia/Tokyo LC_ALL=C exec "$0" "$@"'
    done = subprocess.run(
        ["unshare", "--uts", "sh", "-c", script, *arguments(other, "--json")],
        cwd=other.root,
        env=environment(other),
        capture_output=True,
        text=True,
        check=False,
    )
    again = answer(done)
    assert again["built"]["fresh"]
    assert again["built"]["layers"] == built["built"]["layers"]
    assert again["built"]["id"] == built["built"]["id"]


def test_another_image_than_the_committed_one_is_refused(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    other = another(checkout, tmp_path / "elsewhere" / "project")
    layers = [layer["diff_id"] for layer in built["built"]["layers"]]
    committed = {"image": built["built"]["image"], "digest": f"sha256:{'0' * 64}"}
    committed |= {"layers": [*layers[:-1], f"sha256:{'1' * 64}"]}
    file = other.root / "images/stacks" / STACK / "contents.json"
    file.write_text(json.dumps(committed), encoding="utf-8")
    client.images.remove(built["built"]["id"], force=True)
    refused = build(other)
    assert refused.returncode == 3, refused.stderr
    for text in (built["built"]["id"], committed["digest"], "layers that differ: python"):
        assert text in refused.stderr
    assert not client.images.list(name=built["built"]["image"])
    answer(build(checkout, "--json"))


def package(name: str) -> dict[str, str]:
    """Return a package that builds itself with nothing but the standard library."""
    backend = f"""\
import os, zipfile
def build_wheel(folder, settings=None, metadata=None):
    built = os.environ.get("TWINRUN_KERNEL_ARCHS", "") + "|" + os.environ.get("WORDS", "")
    files = {{
        "{name}.py": f"BUILT = {{built!r}}\\n",
        "{name}-1.0.dist-info/METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n",
        "{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }}
    files["{name}-1.0.dist-info/RECORD"] = "".join(path + ",,\\n" for path in files)
    with zipfile.ZipFile(os.path.join(folder, "{name}-1.0-py3-none-any.whl"), "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return "{name}-1.0-py3-none-any.whl"
"""
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    return {
        "pyproject.toml": f'{project}[project]\nname = "{name}"\nversion = "1.0"\n',
        "backend.py": backend,
    }


# Out of the engine


def test_push_and_save(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    registry = RunningRegistry(tmp_path)
    archive, image = tmp_path / "saved" / "image.tar", built["built"]
    try:
        repository = f"{registry.host}/stacks/tiny"
        done = answer(build(checkout, "--push", repository, "--save", str(archive), "--json"))
        name, _, digest = done["pushed"].partition("@")
        assert name == repository
        tag = image["image"].rpartition(":")[2]
        address = f"http://{registry.host}/v2/stacks/tiny/manifests/{tag}"
        accept = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
        with urllib.request.urlopen(urllib.request.Request(address, headers=accept)) as reply:
            manifest = json.load(reply)
            assert reply.headers["Docker-Content-Digest"] == digest
        assert manifest["config"]["digest"] == image["id"]
        tags = client.images.get(image["id"]).tags
        assert not [tag for tag in tags if tag.startswith(registry.host)]
    finally:
        registry.kill()
    client.images.remove(image["image"], force=True)
    with archive.open("rb") as stream:
        (loaded,) = client.images.load(stream)
    assert (loaded.id, image["image"] in loaded.tags) == (image["id"], True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        refused = build(checkout, "--push", f"127.0.0.1:{probe.getsockname()[1]}/none")
    assert refused.returncode == 3, refused.stderr
    assert "the engine cannot push" in refused.stderr


def test_two_builds_at_once_give_one_image(
    client: DockerClient, checkout: Checkout, built: dict[str, Any]
) -> None:
    client.images.remove(built["built"]["id"], force=True)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(build, checkout, "--json") for _ in range(2)]
    found = [answer(one.result())["built"] for one in both]
    assert {one["id"] for one in found} == {built["built"]["id"]}
    assert sorted(one["fresh"] for one in found) == [False, True]


@pytest.mark.needs("docker-registry")
@pytest.mark.parametrize("answers", [1, 4])
def test_a_registry_that_dies_in_the_middle_leaves_nothing(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path, answers: int
) -> None:
    def spoil(number: int, answer: bytes) -> bytes:
        return answer if number < answers else answer[:20]

    before = sorted(client.images.get(built["built"]["id"]).tags)
    with RunningRegistry(tmp_path) as registry, wire(registry, spoil) as host:
        refused = build(checkout, "--push", f"{host}/stacks/tiny")
        assert (refused.returncode, "cannot push" in refused.stderr) == (3, True), refused.stderr
        assert sorted(client.images.get(built["built"]["id"]).tags) == before
        refused = pull(checkout, f"{host}/stacks/tiny@sha256:{'0' * 64}")
        assert (refused.returncode, "cannot pull" in refused.stderr) == (3, True), refused.stderr
        assert sorted(client.images.get(built["built"]["id"]).tags) == before


@pytest.mark.needs("docker-registry", "oras", "cosign")
def test_what_is_pushed_is_described_signed_and_taken_by_its_digest(
    client: DockerClient, checkout: Checkout, built: dict[str, Any], tmp_path: Path
) -> None:
    variables = {"COSIGN_PASSWORD": "", "DOCKER_CONFIG": str(tmp_path / "no-login")}

    def output_of(*command: str) -> str:
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | variables, check=True, capture_output=True, text=True
        ).stdout

    output_of("cosign", "generate-key-pair")
    with RunningRegistry(tmp_path) as registry:
        repository = f"localhost:{registry.host.partition(':')[2]}/stacks/tiny"
        push = ("--push", repository, "--sign", str(tmp_path / "cosign.key"), "--json")
        reference = answer(build(checkout, *push, **variables))["pushed"]
        # Once more is not one more.
        assert answer(build(checkout, *push, **variables))["pushed"] == reference
        found = json.loads(output_of("oras", "discover", "--format", "json", reference))["manifests"]
        assert sorted(one["artifactType"] for one in found) == sorted(TYPES.values())
        for one in found:
            output_of("oras", "pull", one["reference"])
        bill = json.loads((tmp_path / SBOM).read_text(encoding="utf-8"))
        assert bill["metadata"]["component"]["hashes"][0]["content"] in built["built"]["id"]
        statement = json.loads((tmp_path / PROVENANCE).read_text(encoding="utf-8"))
        assert statement["subject"] == [
            {"name": repository, "digest": {"sha256": reference.rpartition(":")[2]}}
        ]
        dependencies = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        assert {"images/Dockerfile", "small==1.0"} <= {one["name"] for one in dependencies}
        output_of("cosign", "verify", "--key", "cosign.pub", "--insecure-ignore-tlog=true", reference)
        # Where nothing was built yet.
        client.images.remove(built["built"]["id"], force=True)
        other = another(checkout, tmp_path / "there" / "checkout")._replace(wheelhouse=tmp_path / "empty")
        end = "USER 1000:1000\n"
        stranger = another(checkout, tmp_path / "else" / "checkout", instead=(end, f"{end}# another\n"))
        pulled = answer(pull(other, reference))["built"]
        assert (pulled["id"], pulled["image"]) == (built["built"]["id"], built["built"]["image"])
        refused = pull(stranger, reference)
        assert (refused.returncode, "of other inputs" in refused.stderr) == (3, True), refused.stderr
        refused = pull(other, f"{repository}:{built['built']['image'].rpartition(':')[2]}")
        assert (refused.returncode, "by its digest" in refused.stderr) == (2, True), refused.stderr


def pull(checkout: Checkout, reference: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twinrun", "build", "--stack", STACK, "--pull", reference, "--json"]
    return subprocess.run(
        command, cwd=checkout.root, env=environment(checkout), capture_output=True, text=True, check=False
    )


# Secrets


def planted(home: Path, root: Path) -> tuple[list[str], dict[str, str]]:
    """Return twenty secrets, put wherever secrets lie, and the variables that hold some of them."""
    secrets = [f"planted-{number:02d}-{os.urandom(6).hex()}" for number in range(20)]
    draw = iter(secrets)
    variables = {name: next(draw) for name in ("GITHUB_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD")}
    variables |= {name: next(draw) for name in ("AWS_SECRET_ACCESS_KEY", "SECRET_THING", "BUILD_ARG_AUTH")}
    addresses = (
        "HTTP_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "UV_INDEX_URL",
    )
    variables |= {name: f"http://user:{next(draw)}@127.0.0.1:9/simple" for name in addresses}
    proxies = {"default": {"httpProxy": f"http://user:{next(draw)}@127.0.0.1:9", "noProxy": next(draw)}}
    login = {"auth": base64.b64encode(f"user:{next(draw)}".encode()).decode()}
    files = {
        ".docker/config.json": json.dumps({"proxies": proxies, "auths": {"registry.example": login}}),
        ".netrc": f"machine index.example login user password {next(draw)}\n",
        ".config/pip/pip.conf": f"[global]\nextra-index-url = https://user:{next(draw)}@index.example/simple\n",
        ".git-credentials": f"https://user:{next(draw)}@git.example\n",
    }
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text, encoding="utf-8")
    remote = f"https://user:{next(draw)}@git.example/project.git"
    subprocess.run(["git", "-C", str(root), "remote", "add", "origin", remote], check=True)
    assert next(draw, None) is None
    return secrets, variables | {"HOME": str(home), "NO_PROXY": "*"}


def test_no_secret_gets_anywhere(client: DockerClient, checkout: Checkout, tmp_path: Path) -> None:
    # An image of its own, so that every step runs under these variables.
    end = "USER 1000:1000\n"
    other = another(checkout, tmp_path / "project", instead=(end, f"{end}# another\n"))
    secrets, variables = planted(tmp_path / "home", other.root)
    client.api.prune_builds()
    archive = tmp_path / "image.tar"
    done = build(other, "--save", str(archive), "--json", **variables)
    outcome = answer(done)
    assert outcome["built"]["fresh"]
    facts = client.images.get(outcome["built"]["id"])
    texts = [done.stdout.encode(), done.stderr.encode(), archive.read_bytes()]
    texts += [path.read_bytes() for path in (other.root / "runs").rglob("*") if path.is_file()]
    texts += [json.dumps([facts.attrs, facts.history()]).encode()]
    assert len(texts) > 5
    for secret in secrets:
        for form in (secret.encode(), base64.b64encode(secret.encode())):
            assert not [1 for text in texts if form in text], secret
    assert b"dev.twinrun.stack" in archive.read_bytes()
