"""What is measured in an image and written about it, against a real daemon and a small image made here."""

from __future__ import annotations

import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from cyclonedx.schema import SchemaVersion
from docker import DockerClient

from tests.cli.refusals import copied_project
from tests.tiny_image import SECONDS, loaded, make_root_file_system, write_image
from twinrun.foundation.errors import RunError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.manifest import load_toml
from twinrun.images.inspection import write_inventory
from twinrun.manifests.locks import (
    AptLock,
    ImageLock,
    SystemPackage,
    apt_lock_text,
    image_lock_text,
)
from twinrun.manifests.stack import LoadedStack, Stack, load_stack, stamp

pytestmark = pytest.mark.docker

MANIFEST = """
name = "tiny"
vendor = "cpu"
title = "A Debian with Python"
python = ">=3.11,<3.13"
image = "twinrun-test/contents"

[base]
suite = "bookworm"
"""
# As a wheel leaves it; the program asks the interpreter, which reads this.
METADATA = b"Metadata-Version: 2.1\nName: Example_Package\nVersion: 1.2.3\n"
WHEELS = ("a" * 64, "b" * 64)


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tar = make_root_file_system(tmp_path_factory.mktemp("layer") / "layer.tar")
    with tarfile.open(tar, "a") as stream:
        entry = tarfile.TarInfo("./usr/lib/python3/dist-packages/Example_Package-1.2.3.dist-info/METADATA")
        entry.size = len(METADATA)
        stream.addfile(entry, io.BytesIO(METADATA))
    return tar


@pytest.fixture(scope="module")
def installed(layer: Path) -> dict[str, str]:
    """The packages by the file that the package manager keeps, name to version."""
    with tarfile.open(layer) as stream:
        status = stream.extractfile("./var/lib/dpkg/status")
        assert status is not None
        text = status.read().decode()
    return dict(re.findall(r"^Package: (\S+)$.*?^Version: (\S+)$", text, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, installed: dict[str, str]) -> Path:
    """A project with a stack whose locks name what is in the image."""
    project = copied_project(tmp_path_factory.mktemp("project") / "project")
    folder = project / "images" / "stacks" / "tiny"
    folder.mkdir()
    (folder / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    stack = load_toml(folder / "stack.toml", Stack)
    packages = tuple(
        SystemPackage(
            name=name,
            version=version,
            sha256=sha256_of_bytes(name.encode()),
            size=1,
            path=f"debian/pool/{name}.deb",
        )
        for name, version in installed.items()
    )
    (folder / "apt.lock").write_text(apt_lock_text(stack.system_stamp(), AptLock(root=packages)), "utf-8")
    lock = ImageLock(epoch=1735689600, root="0" * 64)
    (folder / "image.lock").write_text(image_lock_text(stack.image_stamp(), lock), encoding="utf-8")
    requirements = folder / "requirements.in"
    requirements.write_text("example-package==1.2.3\n", encoding="utf-8")
    hashes = "".join(f" \\\n    --hash=sha256:{digest}" for digest in WHEELS)
    text = f"{stamp(requirements)}\nexample-package==1.2.3{hashes}\n"
    (folder / "requirements.lock").write_text(text, encoding="utf-8")
    return project


@pytest.fixture(scope="module")
def stack(root: Path) -> LoadedStack:
    return load_stack(root, "tiny")


@pytest.fixture(scope="module")
def client() -> Iterator[DockerClient]:
    made: DockerClient = docker.from_env(timeout=SECONDS)
    yield made
    made.close()


def labels_of(stack: LoadedStack) -> dict[str, str]:
    return {
        "org.opencontainers.image.title": stack.stack.title,
        "dev.twinrun.stack": stack.stack.name,
        "dev.twinrun.inputs-sha256": stack.inputs_sha256,
    }


@pytest.fixture(scope="module")
def image(
    client: DockerClient, layer: Path, stack: LoadedStack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    archive = tmp_path_factory.mktemp("archive") / "image.tar"
    write_image(archive, layer=layer, name=stack.image(), labels=labels_of(stack))
    with loaded(client, archive, stack.image()):
        archive.unlink()
        yield str(client.images.get(stack.image()).id)


def written(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}


def test_what_is_written_was_measured_inside(
    client: DockerClient,
    image: str,
    stack: LoadedStack,
    root: Path,
    tmp_path: Path,
    installed: dict[str, str],
) -> None:
    write_inventory(client, image, stack, root=root, folder=tmp_path)
    assert written(tmp_path).keys() == {"manifest.json", "sbom.cdx.json"}
    contents = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert contents["digest"] == image
    assert contents["lock_sha256"] == stack.lock_sha256
    assert contents["created"].startswith("2025-01-01T00:00:00")
    assert contents["size_bytes"] > 100_000_000
    assert len(contents["layers"]) == 1
    measured = contents["measured"]
    assert measured["system"] == "Debian GNU/Linux 12 (bookworm)"
    assert re.fullmatch(r"3\.11\.[0-9]+", measured["python"])
    assert measured["user"] == "root"
    assert measured["python_packages"] == {"Example_Package": "1.2.3"}
    found = {name: value.partition(" ")[0] for name, value in measured["system_packages"].items()}
    assert found == installed
    assert client.containers.list(all=True, filters={"ancestor": image}) == []


def test_the_bill_of_materials_names_every_package_with_its_digests(
    client: DockerClient,
    image: str,
    stack: LoadedStack,
    root: Path,
    tmp_path: Path,
    installed: dict[str, str],
) -> None:
    # It takes a second to import, in every process that collects the tests.
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415

    write_inventory(client, image, stack, root=root, folder=tmp_path)
    text = (tmp_path / "sbom.cdx.json").read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bill = json.loads(text)
    components: dict[str, Any] = {part["purl"].partition("?")[0]: part for part in bill["components"]}
    assert len(components) == len(installed) + 1
    python = components["pkg:pypi/example-package@1.2.3"]
    assert sorted(entry["content"] for entry in python["hashes"]) == sorted(WHEELS)
    for name, version in installed.items():
        (part,) = [one for one in bill["components"] if one["name"] == name]
        assert part["version"] == version
        assert part["purl"].startswith(f"pkg:deb/debian/{name}@".replace("+", "%2B"))
        assert "distro=debian-12" in part["purl"]
        assert [entry["content"] for entry in part["hashes"]] == [sha256_of_bytes(name.encode())]
    assert bill["metadata"]["component"]["hashes"][0]["content"] == image.removeprefix("sha256:")


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("requirements.lock", "==1.2.3", "==1.2.4", "example-package 1.2.3, lock has 1.2.4"),
        ("requirements.lock", "example-package", "other-package", "other-package absent, lock has 1.2.3"),
        ("apt.lock", r"^(python3)=\S+", r"\1=9", r"python3 \S+, lock has 9$"),
        ("apt.lock", r"^python3=.*\n", "", r"python3 \S+, lock has none$"),
    ],
)
def test_an_image_that_is_not_what_its_locks_say_is_refused(
    client: DockerClient,
    image: str,
    stack: LoadedStack,
    root: Path,
    tmp_path: Path,
    file: str,
    old: str,
    new: str,
    expected: str,
) -> None:
    changed = tmp_path / "project"
    shutil.copytree(root, changed)
    lock = changed / "images" / "stacks" / "tiny" / file
    text = re.sub(old, new, lock.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lock.write_text(text, encoding="utf-8")
    folder = tmp_path / "out"
    with pytest.raises(RunError, match="not what its locks say") as caught:
        write_inventory(client, image, stack, root=changed, folder=folder)
    assert any(re.search(expected, difference) for difference in caught.value.found)  # type: ignore[attr-defined]
    assert not [path for path in folder.rglob("*") if path.is_file()]
