"""What is in an image, measured inside a running container, and the artefacts of a build made of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun import daemon
from twinrun.contents_page import page
from twinrun.engine import PYTHON, Command, Site
from twinrun.engines.docker import ContainerEngine
from twinrun.errors import InputError, RunError
from twinrun.files import write_atomically
from twinrun.manifest import validate
from twinrun.measured import Contents, Measured, lock_differences
from twinrun.sbom import bill_of_materials
from twinrun.stack import LoadedStack
from twinrun.vendor import load_vendors

if TYPE_CHECKING:
    from docker import DockerClient

PROGRAM = Path("images") / "contents.py"
LABELS = "org.opencontainers.image"
OWN_LABELS = "dev.twinrun"


def write_artefacts(
    *,
    client: DockerClient,
    image: str,
    stack: LoadedStack,
    root: Path,
    folder: Path,
    alike: Contents | None = None,
) -> dict[str, Path]:
    """Measure `image` and write manifest.json, manifest.md and sbom.cdx.json into `folder`.

    Args:
        alike: of an image with the same layers below the source; nothing is run then.

    Returns:
        The three paths by their names.

    Raises:
        MachineError: the engine refused to run a container of it.
        RunError: the image cannot say what is in it, or is not what the stack's locks say.
    """
    contents = measure(client=client, image=image, stack=stack, root=root, alike=alike)
    differences = lock_differences(contents, stack, root)
    if differences:
        raise RunError("the image is not what its locks say", place=image, found=differences)
    texts = {
        "manifest.json": contents.model_dump_json(indent=1) + "\n",
        "manifest.md": page(contents),
        "sbom.cdx.json": bill_of_materials(contents, stack, root),
    }
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return {name: folder / name for name in texts}


def measure(
    *, client: DockerClient, image: str, stack: LoadedStack, root: Path, alike: Contents | None = None
) -> Contents:
    """Return what the engine says of `image`, and what images/contents.py says in a container of it.

    Args:
        alike: of an image in which it says the same; it is not run then.

    Raises:
        MachineError, RunError: as `write_artefacts`.
    """
    with daemon.told("containers"):
        facts = client.images.get(image).attrs
    labels = facts["Config"].get("Labels") or {}
    _check_labels(labels, stack, image)
    digest = facts["Id"] if facts["Id"].startswith("sha256:") else f"sha256:{facts['Id']}"
    measured_in = (alike.measured_in or alike.digest) if alike else digest
    return Contents(
        stack=stack.stack.name,
        image=stack.image(),
        digest=digest,
        lock_sha256=stack.lock_sha256,
        platform=f"{facts['Os']}/{facts['Architecture']}",
        created=facts["Created"],
        size_bytes=facts["Size"],
        labels=dict(sorted(labels.items())),
        measured_in=None if measured_in == digest else measured_in,
        measured=alike.measured if alike else _measured(client, image, root),
    )


def _measured(client: DockerClient, image: str, root: Path) -> Measured:
    """Run the program as a recipe would run, without devices."""
    plain = next(vendor for vendor in load_vendors(root).values() if not vendor.probe)
    with tempfile.TemporaryDirectory() as folder:
        site = Site(root=root, run=Path(folder, "run"), data=Path(folder, "data"))
        for path in (site.run, site.data):
            path.mkdir()
        engine = ContainerEngine(client=client, image=image, vendor=plain, site=site)
        printed = engine.read(Command(arguments=(PYTHON, engine.inside(root / PROGRAM)), variables={}))
    try:
        return validate(json.loads(printed), Measured, place=str(PROGRAM))
    except (ValueError, InputError) as error:
        raise RunError("the image does not say what is in it", place=image, found=str(error)) from None


def _check_labels(labels: dict[str, str], stack: LoadedStack, image: str) -> None:
    """Compare the labels with the stack; raises RunError naming the first that is not as it must be."""
    expected = {
        f"{OWN_LABELS}.lock-sha256": stack.lock_sha256,
        f"{OWN_LABELS}.stack": stack.stack.name,
        f"{OWN_LABELS}.archs": " ".join(stack.stack.archs),
    }
    for name, value in expected.items():
        if labels.get(name, "") != value:
            raise RunError(
                "the image is not labelled as this stack's",
                place=f"{image}: {name}",
                found=labels.get(name),
                allowed=value,
                hint=f"`invoke build --vendor {stack.stack.vendor} --stack {stack.stack.name}` makes it",
            )
    for name in ("title", "source", "version"):
        if not labels.get(f"{LABELS}.{name}"):
            raise RunError("the image lacks a label", place=f"{image}: {LABELS}.{name}")
