"""`invoke build` from its options to its result and the lines that it prints."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import demand_replaceable
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.images.archive import push
from twinrun.images.artifact_cache import find_alternatives
from twinrun.images.attachments import SBOM, attach, check_signer
from twinrun.images.builder import Builder, BuiltImage
from twinrun.images.buildkit import BuildProgress, megabytes
from twinrun.images.inventory import ImageInventory
from twinrun.images.plan import BuildPlan, choose_stack, plan_build
from twinrun.images.root_filesystem import check_base_file
from twinrun.images.stages import files_of
from twinrun.machine import daemon
from twinrun.manifests.stack import framework_index

if TYPE_CHECKING:
    from docker import DockerClient

_BY_DIGEST = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")


class BuildRequest(Frozen):
    """Options of `invoke build`."""

    vendor: str | None = None
    stack: str | None = None
    pull: str | None = None
    """Image of a registry to take instead of building it, `repository@sha256:...`."""
    push: str | None = None
    """Repository of a registry."""
    sign: str | None = None
    """Key of cosign that signs what is pushed: a file, or the address of a key service."""
    save: Path | None = None
    base: Path | None = None
    wheelhouse: Path | None = None
    index: str | None = None
    """A further package index, for wheels that only the framework's own has."""
    allow_unverified: bool = False


class BuildResult(Frozen):
    """Image and files that a build has written."""

    built: BuiltImage
    folder: Path
    """Folder of the log, the package inventory and the SBOM."""
    pushed: str | None
    """Reference by digest in the registry."""
    saved: Path | None


def plan_request(root: Path, request: BuildRequest) -> BuildPlan:
    """Resolve the request to a plan; nothing is downloaded or started.

    Raises:
        InputError: an option that does not fit, a lock out of date, or a base that is not the locked one.
    """
    loaded = choose_stack(root, request.vendor, request.stack)
    framework_index(loaded.stack, asked=request.index)
    base, wheelhouse, save = request.base, request.wheelhouse, request.save
    if wheelhouse is not None and not wheelhouse.is_dir():
        hint = "a folder of wheels, as pip download makes it"
        raise InputError("no such folder", place="--wheelhouse", found=str(wheelhouse), hint=hint)
    if base is not None and not base.exists():
        hint = "the tar of the locked root file system"
        raise InputError("no such file", place="--base", found=str(base), hint=hint)
    if save is not None and (save.suffix == ".tar" or not save.is_dir()):
        demand_replaceable(save)
    _check_registry_options(request)
    alternatives = find_alternatives(loaded.stack, request.wheelhouse)
    plan = plan_build(root, loaded, alternatives=alternatives)
    if request.base is not None:
        check_base_file(request.base, plan)
    return plan


def _check_registry_options(request: BuildRequest) -> None:
    """Refuse what would be left out without a word; raises InputError, or MachineError without a signer."""
    if request.pull and (request.save or request.base or request.wheelhouse):
        raise InputError("nothing is built", place="--pull", hint="leave --save, --base and --wheelhouse out")
    if request.pull and not _BY_DIGEST.fullmatch(request.pull):
        raise InputError(
            "an image is taken by its digest",
            place="--pull",
            found=request.pull,
            allowed="repository@sha256:...",
            hint="a tag can be put on anything; whoever pushed the image was told its digest",
        )
    if request.sign and not request.push:
        raise InputError("what is signed is in a registry", place="--sign", hint="add --push REPOSITORY")
    if request.sign:
        check_signer()


def check_verified(plan: BuildPlan, request: BuildRequest) -> None:
    """Refuse unverified pins unless they are allowed; raises InputError."""
    if plan.unverified and not request.allow_unverified:
        raise InputError(
            "pins that nobody could verify",
            place=plan.stack.folder,
            found=plan.unverified,
            hint=f"`invoke lock --stack {plan.stack.stack.name}` verifies them where their origin is reached;"
            " give it the framework's own index with --index; --allow-unverified takes them on trust",
        )


def run_build(root: Path, plan: BuildPlan, request: BuildRequest, progress: BuildProgress) -> BuildResult:
    """Build the image, write its inventory, push it and save it; raises as `Builder.build`."""
    check_verified(plan, request)
    tag = plan.image.rpartition(":")[2]
    folder = root / "runs" / "images" / plan.stack.stack.name / tag
    client = daemon.connect()
    try:
        builder = Builder(client, plan, root=root, log=folder / "build.log", progress=progress)
        adopted = builder.adopt(request.pull) if request.pull else None
        built = adopted or builder.build(
            wheelhouse=request.wheelhouse,
            base_file=request.base,
            index=framework_index(plan.stack.stack, asked=request.index),
            save_to=request.save,
        )
        _write_inventory(client, built, plan, root=root, folder=folder)
        pushed = None
        if request.push:
            pushed = f"{request.push}@{push(client, plan.image, request.push, tag)}"
            attach(pushed, folder, plan=plan, root=root, key=request.sign, say=progress.say)
        return BuildResult(built=built, folder=folder, pushed=pushed, saved=request.save)
    finally:
        client.close()


def _write_inventory(
    client: DockerClient, built: BuiltImage, plan: BuildPlan, *, root: Path, folder: Path
) -> None:
    """Write the package inventory, once for an image."""
    manifest = folder / "manifest.json"
    whole = manifest.is_file() and (folder / SBOM).is_file()
    if whole and load_json(manifest, ImageInventory).digest == built.id:
        return
    # The libraries of the SBOM are slow to import.
    from twinrun.images.inspection import write_inventory

    used = files_of(plan, [layer.diff_id for layer in built.layers])
    write_inventory(client=client, image=built.image, stack=plan.stack, root=root, folder=folder, used=used)


def plan_lines(plan: BuildPlan) -> list[str]:
    """Return the lines that `invoke build` prints before it starts."""
    counts = Counter(artifact.folder.partition("/")[0] for artifact in plan.artifacts)
    lines = [
        f"image     {plan.image}  ({plan.stack.stack.platform})",
        f"base      {plan.stack.stack.base.suite if plan.stack.stack.base else ''}  {plan.base[:12]}",
        f"layers    {', '.join(plan.stages)}",
        f"files     {', '.join(f'{count} {folder}' for folder, count in counts.items())}",
    ]
    compiled = plan.stack.stack.archs
    if plan.kernels or compiled:
        # The Dockerfile compiles kernels for the emulation on the processor too.
        targets = [*compiled, *(["the processor"] if plan.kernels else [])]
        lines.append(f"compiled  {', '.join(plan.kernels) or 'nothing'}  (for {', '.join(targets)})")
    lines += map(str, plan.attested_wheels)
    if plan.unverified:
        lines.append(f"on trust  {', '.join(plan.unverified)}")
    return lines


def result_table(result: BuildResult) -> Group:
    """Return the layers of an image, and where it is."""
    table = Table("layer", "digest", "size", box=None)
    for layer in result.built.layers:
        size = "as it was" if layer.bytes is None else megabytes(layer.bytes)
        table.add_row(layer.name, layer.diff_id.removeprefix("sha256:")[:12], Text(size, justify="right"))
    built = result.built
    lines = [f"{built.image}  {built.id}{'' if built.fresh else '  (nothing had changed)'}"]
    lines.append(f"log, manifest and contents: {result.folder}")
    lines += [f"pushed: {result.pushed}"] if result.pushed else []
    lines += [f"saved: {result.saved}"] if result.saved else []
    return Group(table, *(Text(line, overflow="fold") for line in lines))
