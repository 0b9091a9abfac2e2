"""`invoke build` from its options to its outcome."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twinrun import daemon
from twinrun.building.base import check_base_file
from twinrun.building.build import Builder, Built
from twinrun.building.gather import chosen_alternatives
from twinrun.building.plan import BuildPlan, choose_stack, plan_build
from twinrun.building.progress import BuildDisplay
from twinrun.building.transfer import push, save
from twinrun.errors import InputError
from twinrun.manifest import Frozen, load_json
from twinrun.measured import Contents

if TYPE_CHECKING:
    from docker import DockerClient


class BuildRequest(Frozen):
    """`invoke build` as typed."""

    vendor: str
    stack: str | None = None
    push: str | None = None
    """Repository of a registry."""
    save: Path | None = None
    base: Path | None = None
    wheelhouse: Path | None = None
    allow_unverified: bool = False


class Outcome(Frozen):
    """What a build has left behind."""

    built: Built
    folder: Path
    """Log, manifest page and list of contents."""
    pushed: str | None
    """Repository and digest."""
    saved: Path | None


def planned(root: Path, request: BuildRequest) -> BuildPlan:
    """Resolve the request to a plan; nothing is fetched or started.

    Raises:
        InputError: an option that does not fit, a lock out of date, a base that is no image, or a pin
            that nobody could verify and that was not allowed.
    """
    loaded = choose_stack(root, request.vendor, request.stack)
    carried = {
        "--wheelhouse": (request.wheelhouse, "a folder of wheels, as pip download makes it"),
        "--base": (request.base, "a tar: a root file system of mmdebstrap, or an image of docker save"),
    }
    for option, (path, hint) in carried.items():
        if path is not None and not path.exists():
            raise InputError("no such file or folder", place=option, found=str(path), hint=hint)
    alternatives = chosen_alternatives(loaded.stack, request.wheelhouse)
    plan = plan_build(root, loaded, alternatives=alternatives, base_file=request.base)
    if request.base is not None:
        check_base_file(request.base, plan, allow_unverified=request.allow_unverified)
    return plan


def check_verified(plan: BuildPlan, request: BuildRequest) -> None:
    """Refuse pins that nobody could verify, unless they are allowed; raises InputError."""
    if plan.unverified and not request.allow_unverified:
        raise InputError(
            "pins that nobody could verify",
            place=plan.stack.folder,
            found=plan.unverified,
            hint=f"`invoke lock --stack {plan.stack.stack.name}` verifies them where their origin is reached;"
            " --allow-unverified takes them on trust",
        )


def carry_out(root: Path, plan: BuildPlan, request: BuildRequest, display: BuildDisplay) -> Outcome:
    """Build, describe, push and save as the request says; raises as `Builder.build`."""
    check_verified(plan, request)
    folder = root / "runs" / "images" / plan.stack.stack.name / plan.image.rpartition(":")[2]
    client = daemon.connect()
    try:
        builder = Builder(client, plan, root=root, log=folder / "build.log", display=display)
        built = builder.build(wheelhouse=request.wheelhouse, base_file=request.base)
        _describe(client, built, plan, root=root, folder=folder)
        tag = plan.image.rpartition(":")[2]
        digest = push(client, plan.image, request.push, tag) if request.push else None
        if request.save:
            save(client, plan.image, request.save)
        pushed = f"{request.push}@{digest}" if digest else None
        return Outcome(built=built, folder=folder, pushed=pushed, saved=request.save)
    finally:
        client.close()


def _describe(client: DockerClient, built: Built, plan: BuildPlan, *, root: Path, folder: Path) -> None:
    """Describe the image; in a container it is measured once for all that differ in the source alone."""
    marker, manifest = folder / "measured", folder / "manifest.json"
    below = [plan.environment_sha256, *(layer.diff_id for layer in built.layers[:-1])]
    known = marker.read_text(encoding="utf-8").split() if marker.is_file() and manifest.is_file() else []
    if known == [built.id, *below]:
        return
    # The libraries for the list of contents take longer to import than a plan to make.
    from twinrun.contents import write_artefacts

    alike = load_json(manifest, Contents) if known[1:] == below else None
    write_artefacts(client=client, image=built.id, stack=plan.stack, root=root, folder=folder, alike=alike)
    marker.write_text("\n".join([built.id, *below, ""]), encoding="utf-8")
