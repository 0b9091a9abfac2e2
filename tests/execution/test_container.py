"""Containers as arguments, of a command line and of the SDK alike, and what they may read."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from docker import DockerClient

from twinrun.execution.container import Container
from twinrun.execution.engine import Command, Workspace
from twinrun.execution.engines.docker import ContainerEngine, ContainerRenderer
from twinrun.foundation.errors import MachineError
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor, load_vendors

pytestmark = pytest.mark.docker

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cpu() -> Vendor:
    return load_vendors(ROOT)["cpu"]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(root=tmp_path / "project", run=tmp_path / "run", data=tmp_path / "data")
    for folder in (made.root, made.run, made.data):
        folder.mkdir()
    (made.root / "src").mkdir()
    (made.root / "src" / "ours.py").write_text("NAME = 'of the project'\n", encoding="utf-8")
    return made


def python(program: str, **variables: str) -> Command:
    return Command(arguments=("python", "-c", program), variables=variables)


def rendered(vendor: Vendor, workspace: Workspace) -> Container:
    """Return the container of a command, with what it has of the vendor's devices."""
    renderer = ContainerRenderer(image="image", vendor=vendor, workspace=workspace)
    return renderer.render(python("pass")).container


def test_devices_are_as_the_vendors_manifest_says(workspace: Workspace, tmp_path: Path) -> None:
    vendors = load_vendors(ROOT)
    containers = {name: rendered(vendor, workspace) for name, vendor in vendors.items()}
    for container in containers.values():
        arguments = container.sdk_arguments()
        assert not arguments.get("privileged")
        assert arguments["cap_drop"] == ["ALL"]
        assert "cap_add" not in arguments
        assert "--privileged" not in container.run_arguments()
        assert "--cap-add" not in container.run_arguments()
    assert not containers["cpu"].sdk_arguments().keys() & {"devices", "device_requests", "group_add"}
    (request,) = containers["cuda"].sdk_arguments()["device_requests"]
    assert request == {
        "Driver": "nvidia",
        "Count": -1,
        "DeviceIDs": [],
        "Capabilities": [["gpu", "compute", "utility"]],
        "Options": {},
    }
    assert 'driver=nvidia,count=all,"capabilities=compute,utility"' in containers["cuda"].run_arguments()
    assert containers["rocm"].sdk_arguments()["devices"] == ["/dev/kfd:/dev/kfd:rwm", "/dev/dri:/dev/dri:rwm"]

    # Stands for device files that belong to a group of this machine.
    file = tmp_path / "renderD128"
    file.touch()
    access = vendors["rocm"].container.model_copy(update={"groups_of": (f"{tmp_path}/renderD*",)})
    joined = rendered(vendors["rocm"].model_copy(update={"container": access}), workspace)
    assert joined.sdk_arguments()["group_add"] == [file.stat().st_gid]
    assert ("--group-add", str(file.stat().st_gid)) in zip(
        joined.run_arguments(), joined.run_arguments()[1:], strict=False
    )


def test_several_nodes_share_the_hosts_network(workspace: Workspace, cpu: Vendor) -> None:
    renderer = ContainerRenderer(image="image", vendor=cpu, workspace=workspace)
    command = python("pass").model_copy(update={"reaches_nodes": True})
    arguments = renderer.render(command).arguments
    assert arguments[arguments.index("--network") + 1] == "host"
    assert "--hostname" not in arguments


def test_who_saves_in_an_object_store_has_a_network_and_the_callers_credentials(
    workspace: Workspace, cpu: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    renderer = ContainerRenderer(image="image", vendor=cpu, workspace=workspace)
    container = renderer.render(python("pass").model_copy(update={"reaches_store": True})).container
    arguments = container.run_arguments()
    assert arguments[arguments.index("--network") + 1] == "host"
    assert ("--env", "AWS_SECRET_ACCESS_KEY") in pairwise(arguments)
    # The plan, the record and what is printed name them alone.
    assert "hidden" not in str(arguments)
    assert "hidden" not in container.model_dump_json()
    environment = container.sdk_arguments()["environment"]
    assert environment["AWS_SECRET_ACCESS_KEY"] == "hidden"
    assert "AWS_SESSION_TOKEN" not in environment
    assert not rendered(cpu, workspace).passed


def test_checkpoints_of_another_run_are_seen_and_not_written(workspace: Workspace, cpu: Vendor) -> None:
    source = workspace.run.parent / "other"
    with_source = workspace.model_copy(update={"source": source})
    renderer = ContainerRenderer(image="image", vendor=cpu, workspace=with_source)
    container = renderer.render(python("pass")).container
    assert [one.mode for one in container.mounts if one.host == str(source)] == ["ro"]
    assert renderer.inside(source / "checkpoints" / "leg=1") == "/twinrun/source/checkpoints/leg=1"


def test_a_file_of_a_source_that_the_container_cannot_read_is_told(
    client: DockerClient, stack: LoadedStack, cpu: Vendor, workspace: Workspace, tmp_path: Path
) -> None:
    if os.getuid():
        pytest.skip("only callers who are root run containers as somebody else")
    source = tmp_path / "source"
    source.mkdir(mode=0o755)
    weights = source / "model.safetensors"
    weights.touch(mode=0o600)
    given = Workspace(root=workspace.root, run=workspace.run, data=workspace.data, source=source)
    engine = ContainerEngine(client=client, image=stack.image(), vendor=cpu, workspace=given)
    with pytest.raises(MachineError, match="cannot read this file") as caught:
        engine.read(python("pass"))
    assert caught.value.place == str(weights)
    weights.chmod(0o644)
    engine.read(python("pass"))
