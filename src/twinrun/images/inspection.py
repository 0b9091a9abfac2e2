"""What is in an image: of our own, which its locks must name, and of a user's, which a record names."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.execution.containers import Docker, Podman
from twinrun.execution.engine import PYTHON, Command, Engine, Workspace
from twinrun.execution.environment import steering_variables
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import validate
from twinrun.images.inventory import ImageInventory, PackageInventory, differences_from_lock
from twinrun.images.sbom import sbom_json
from twinrun.machine import daemon
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import load_vendors

if TYPE_CHECKING:
    from docker import DockerClient

_PROGRAM = Path("images") / "contents.py"


def image_contents(engine: Engine, root: Path) -> PackageInventory:
    """Return what is in the image that `engine` runs, whoever made it, measured in a container of it.

    The variables are those that steer a run; secrets are hidden.

    Raises:
        RunError: the image has no Python 3.10 or later, or does not answer.
    """
    program = (root / _PROGRAM).read_text(encoding="utf-8")
    printed = engine.read(Command(arguments=(PYTHON, "-c", program), variables={}))
    try:
        found = validate(json.loads(printed), PackageInventory, place=str(_PROGRAM))
    except (ValueError, InputError) as error:
        raise RunError(
            "the image does not say what is in it", place=str(_PROGRAM), found=str(error)
        ) from None
    return found.model_copy(update={"variables": steering_variables(found.variables)})


def write_inventory(
    client: DockerClient,
    image: str,
    stack: LoadedStack,
    *,
    root: Path,
    folder: Path,
    used: Collection[str] = (),
) -> None:
    """Inspect `image` and write manifest.json and sbom.cdx.json into `folder`.

    Args:
        used: checksums of the wheels that it was made of, where they are known.

    Raises:
        MachineError: the engine refused to run a container of it.
        RunError: the program failed in the image, or the image is not what the stack's locks say.
    """
    inventory = inspect_image(client, image, stack, root=root)
    differences = differences_from_lock(inventory, stack, root)
    if differences:
        raise RunError("the image is not what its locks say", place=image, found=differences)
    write_atomically(folder / "sbom.cdx.json", sbom_json(inventory, stack, root, used=used))
    text = inventory.model_dump_json(indent=1, exclude_defaults=True)
    write_atomically(folder / "manifest.json", f"{text}\n")


def inspect_image(client: DockerClient, image: str, stack: LoadedStack, *, root: Path) -> ImageInventory:
    """Return the attributes of `image` in the engine, and what images/contents.py prints in a container.

    The container has no network and no privileges, and writes nothing.

    Raises:
        MachineError, RunError: as `write_inventory`.
    """
    with daemon.daemon_errors("containers"):
        attributes = client.images.get(image).attrs
    deviceless = next(vendor for vendor in load_vendors(root).values() if not vendor.probe)
    with tempfile.TemporaryDirectory() as name:
        workspace = Workspace(root=root, run=Path(name, "run"), data=Path(name, "data"))
        for path in (workspace.run, workspace.data):
            path.mkdir()
        kind = Podman if daemon.is_podman(client) else Docker
        engine = kind(image=attributes["Id"], vendor=deviceless, workspace=workspace).opened()
        measured = image_contents(engine, root)
    user = attributes["Config"]["User"] or "root"
    return ImageInventory(
        stack=stack.stack.name,
        image=stack.image(),
        digest=daemon.image_id(client, attributes["Id"]),
        lock_sha256=stack.lock_sha256,
        platform=f"{attributes['Os']}/{attributes['Architecture']}",
        created=attributes["Created"],
        size_bytes=attributes["Size"],
        layers=tuple(attributes["RootFS"]["Layers"]),
        labels=dict(sorted((attributes["Config"].get("Labels") or {}).items())),
        measured=measured.model_copy(update={"variables": {}, "user": user}),
    )
