"""Inspection of an image in a running container, and the inventory files that a build leaves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.execution.container_engine import ContainerEngine
from twinrun.execution.engine import PYTHON, Command, Workspace
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import validate
from twinrun.images.inventory import ImageInventory, PackageInventory, differences_from_lock, inventory_page
from twinrun.images.sbom import sbom_json
from twinrun.machine import daemon
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import load_vendors

if TYPE_CHECKING:
    from docker import DockerClient

_PROGRAM = Path("images") / "contents.py"


def write_inventory(
    *,
    client: DockerClient,
    image: str,
    stack: LoadedStack,
    root: Path,
    folder: Path,
    used: Collection[str] = (),
) -> None:
    """Inspect `image` and write manifest.json, manifest.md and sbom.cdx.json into `folder`.

    Args:
        used: checksums of the files that it was made of, where they are known.

    Raises:
        MachineError: the engine refused to run a container of it.
        RunError: the program failed in the image, or the image is not what the stack's locks say.
    """
    inventory = inspect_image(client=client, image=image, stack=stack, root=root)
    differences = differences_from_lock(inventory, stack, root)
    if differences:
        raise RunError("the image is not what its locks say", place=image, found=differences)
    texts = {
        "manifest.json": inventory.model_dump_json(indent=1) + "\n",
        "manifest.md": inventory_page(inventory),
        "sbom.cdx.json": sbom_json(inventory, stack, root, used=used),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text)


def inspect_image(
    *,
    client: DockerClient,
    image: str,
    stack: LoadedStack,
    root: Path,
) -> ImageInventory:
    """Return the attributes of `image` in the engine and the output of images/contents.py in a container.

    Raises:
        MachineError, RunError: as `write_inventory`.
    """
    with daemon.daemon_errors("containers"):
        attributes = client.images.get(image).attrs
    labels = attributes["Config"].get("Labels") or {}
    return ImageInventory(
        stack=stack.stack.name,
        image=stack.image(),
        digest=daemon.image_id(client, attributes["Id"]),
        lock_sha256=stack.lock_sha256,
        platform=f"{attributes['Os']}/{attributes['Architecture']}",
        created=attributes["Created"],
        size_bytes=attributes["Size"],
        layers=tuple(attributes["RootFS"]["Layers"]),
        labels=dict(sorted(labels.items())),
        measured=_run_program(attributes["Id"], root),
    )


def _run_program(image: str, root: Path) -> PackageInventory:
    """Run images/contents.py in a container as a recipe would run, without devices."""
    deviceless = next(vendor for vendor in load_vendors(root).values() if not vendor.probe)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(root=root, run=Path(folder, "run"), data=Path(folder, "data"))
        for path in (workspace.run, workspace.data):
            path.mkdir()
        engine = ContainerEngine(image=image, vendor=deviceless, workspace=workspace)
        printed = engine.read(Command(arguments=(PYTHON, engine.inside(root / _PROGRAM)), variables={}))
    try:
        return validate(json.loads(printed), PackageInventory, place=str(_PROGRAM))
    except (ValueError, InputError) as error:
        raise RunError("the image does not say what is in it", place=image, found=str(error)) from None
