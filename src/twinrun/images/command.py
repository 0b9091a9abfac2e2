"""`invoke build` from its options to its result and the lines that it prints."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path

from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from twinrun.foundation.errors import InputError, require_equal
from twinrun.foundation.files import demand_absent, demand_replaceable, sha256_of_file
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.terminal import LiveProgress
from twinrun.foundation.text import visible
from twinrun.images.builder import Builder, BuiltImage
from twinrun.images.context import collect
from twinrun.images.engine import push
from twinrun.images.inventory import ImageInventory
from twinrun.images.plan import BuildPlan, BuildRequest, choose_stack, plan_build
from twinrun.machine import daemon
from twinrun.manifests.stack import framework_index

_SHOWN_CHARACTERS = 150
_BY_DIGEST = re.compile(r"[a-z0-9][a-z0-9._:/-]*@sha256:[0-9a-f]{64}")


class BuildProgress(LiveProgress):
    """What a build does now and for how long: a row on a terminal, lines of a log elsewhere."""

    def __init__(self) -> None:
        super().__init__(SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        self._now = self._progress.add_task("", total=None)
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Say what is done from now on."""
        self._progress.update(self._now, description=visible(text)[: max(20, self.console.width - 20)])
        super().say(f"{time.monotonic() - self._started:5.0f} s  {text[:_SHOWN_CHARACTERS]}")


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
        InputError: an option that does not fit, a lock out of date, or a root that is not the locked one.
    """
    loaded = choose_stack(root, request.vendor, request.stack)
    framework_index(loaded.stack, asked=request.index)
    wheelhouse, save = request.wheelhouse, request.save
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise InputError("no such folder", place="--wheelhouse", found=str(wheelhouse))
    if save is not None and (save.suffix == ".tar" or not save.is_dir()):
        demand_replaceable(save)
    # What would be left out without a word.
    if request.context and (save or request.pull or request.push):
        raise InputError("nothing is built", place="--context", hint="leave --save, --pull and --push out")
    if request.pull and (save or request.base or wheelhouse):
        raise InputError("nothing is built", place="--pull", hint="leave --save, --base and --wheelhouse out")
    if request.pull and not _BY_DIGEST.fullmatch(request.pull):
        hint = "a tag can be put on anything; whoever pushed the image was told its digest"
        message, allowed = "an image is taken by its digest", "repository@sha256:..."
        raise InputError(message, place="--pull", found=request.pull, allowed=allowed, hint=hint)
    if request.context is not None:
        demand_absent(request.context)
    plan = plan_build(root, loaded)
    if request.base is not None:
        if not request.base.is_file():
            raise InputError("no such file", place="--base", found=str(request.base), allowed="a tar")
        hint = f"{loaded.folder}/image.lock names it; a machine that has built it has it in its cache"
        message = "not the locked root file system"
        require_equal(sha256_of_file(request.base), plan.root, message, place=str(request.base), hint=hint)
    return plan


def write_context(root: Path, plan: BuildPlan, request: BuildRequest, say: Callable[[str], None]) -> Path:
    """Write the folder that `docker build` takes; raises InputError, MachineError."""
    assert request.context is not None
    collect(plan, root, request, say=say).write(request.context, root)
    return request.context


def run_build(root: Path, plan: BuildPlan, request: BuildRequest, say: Callable[[str], None]) -> BuildResult:
    """Build the image, write its inventory, push it and save it; raises as `Builder.build`."""
    tag = plan.image.rpartition(":")[2]
    folder = root / "runs" / "images" / plan.stack.stack.name / tag
    with contextlib.closing(daemon.connect()) as client:
        builder = Builder(client, plan, root=root, log=folder / "build.log", say=say)
        built = builder.adopt(request.pull) if request.pull else builder.build(request)
        manifest = folder / "manifest.json"
        if not manifest.is_file() or load_json(manifest, ImageInventory).digest != built.id:
            # The libraries of the SBOM are slow to import.
            from twinrun.images.inspection import write_inventory

            write_inventory(client, built.image, plan.stack, root=root, folder=folder, used=built.wheels)
        pushed = f"{request.push}@{push(client, plan.image, request.push, tag)}" if request.push else None
        return BuildResult(built=built, folder=folder, pushed=pushed, saved=request.save)


def plan_lines(plan: BuildPlan) -> list[str]:
    """Return the lines that `invoke build` prints before it starts."""
    suite = plan.stack.stack.base.suite if plan.stack.stack.base else ""
    # The Dockerfile compiles kernels for the emulation on the processor too.
    targets = ", ".join([*plan.stack.stack.archs, *(["the processor"] if plan.kernels else [])])
    return [
        f"image     {plan.image}  ({plan.stack.stack.platform})",
        f"root      {plan.root[:12]}  {len(plan.system.root)} packages of Debian {suite}",
        f"python    {len(plan.python)} wheels, {len(plan.tools)} more to compile kernels",
        f"compiled  {', '.join(plan.kernels) or 'nothing'}{f'  (for {targets})' if targets else ''}",
    ]


def result_lines(result: BuildResult) -> list[str]:
    """Return the image with its layers, and where it is."""
    built = result.built
    layers = [f"{name:9} {digest.removeprefix('sha256:')[:12]}" for name, digest in built.layers.items()]
    lines = [f"{built.image}  {built.id}{'' if built.fresh else '  (nothing had changed)'}"]
    places = {"log and contents": result.folder, "pushed": result.pushed, "saved": result.saved}
    return [*layers, *lines, *(f"{name}: {place}" for name, place in places.items() if place)]
