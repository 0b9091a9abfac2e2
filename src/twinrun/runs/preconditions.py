"""What must hold before a run makes its folder or starts anything: each is looked at, and refused by name."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from twinrun.checkpoints import store_at
from twinrun.checkpoints.s3 import is_remote
from twinrun.execution.engine import Engine
from twinrun.execution.environment import demand_packages
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.text import size
from twinrun.machine.checks import demand_device_files
from twinrun.machine.memory import processor_memory
from twinrun.planning.project import Project
from twinrun.runs.data import demand_documents, demand_fetched
from twinrun.runs.launches import script_of, workspace_of
from twinrun.runs.models import demand_model
from twinrun.runs.selection import Selection
from twinrun.workloads.workload import Point

# Logs, metrics, the record and its page; and what interpreters compile.
RUN_BYTES, CACHE_BYTES = 64 << 20, 256 << 20
_ANSWER_SECONDS = 5.0


def demand_ready(project: Project, selection: Selection, *, out: Path) -> None:
    """Look at all that a run will need of this machine; starts nothing and writes nothing.

    Args:
        out: the folder that the folder of the run will be made in.

    Raises:
        InputError: what it should go on from is not there.
        MachineError: something is missing; names it and says what to do.
    """
    demand_documents(selection.description.undocumented, selection.description.given_documents)
    demand_room(out, RUN_BYTES, option="--out")
    demand_room(cache_root(), CACHE_BYTES, option="TWINRUN_CACHE")
    _demand_engine(project, selection, out)
    for request in (selection.description.data, selection.description.documents):
        if request:
            demand_fetched(request, data=cache_root() / "data", recipe=selection.recipe.folder)
    if model := selection.description.model:
        demand_model(model, container=selection.engine.RUNS_IMAGES)
    _demand_checkpoints(selection)
    if selection.site is None:
        demand_memory(selection)
        # A container has an interface of its own.
        if not selection.engine.RUNS_IMAGES:
            demand_loopback()


def demand_devices(selection: Selection) -> None:
    """Raise MachineError where ranks on this machine could not open its GPUs."""
    if selection.site is None:
        devices, grouped = selection.machine.devices, selection.engine.ADDS_GROUPS
        demand_device_files(selection.vendor, devices, grouped=grouped)


def demand_site(selection: Selection, *, detach: bool) -> None:
    """Raise InputError where a run without a site is to go on after its command."""
    if detach and selection.site is None:
        hint = "add --cluster SITE; on this machine a run ends with the command that started it"
        raise InputError("nothing would go on with the run", place="--detach", found="no site", hint=hint)


def demand_interpreter(project: Project, selection: Selection, engine: Engine) -> None:
    """Raise MachineError where the opened engine lacks a package that ranks import when they start.

    An image was checked when it was built.
    """
    if selection.engine.RUNS_IMAGES:
        return
    script = script_of(project.root, selection)
    modules = [*selection.description.modules, *([script] if isinstance(script, str) else [])]
    stems = [project.root / "src" / name.replace(".", "/") for name in modules]
    files = [stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py") for stem in stems]
    own = [script] if isinstance(script, Path) else []
    demand_packages(engine, [*own, *files], name=selection.plan.engine)


def demand_room(folder: Path, needed: int, *, option: str) -> None:
    """Raise MachineError where `folder`, or what will hold it, has less room than `needed` or is closed."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise MachineError(
            "cannot write here",
            place=str(existing),
            found="no folder" if not existing.is_dir() else "a folder that is closed to this user",
            hint=f"choose another place with {option}",
        )
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise MachineError(
            "the disk is full",
            place=str(folder),
            found=f"{size(free)} free",
            allowed=f"{size(needed)} or more",
            hint=f"free some space, or choose another disk with {option}",
        )


def demand_loopback() -> None:
    """Raise MachineError where processes of this machine cannot reach each other, as ranks must."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_ANSWER_SECONDS),
        ):
            pass
    except OSError as error:
        raise MachineError(
            "the loopback interface of this machine does not work, and ranks meet over it",
            place="127.0.0.1",
            found=error.strerror or str(error),
            hint="`ip link set lo up` starts it; in a container or sandbox, give it a network",
        ) from None


def demand_memory(selection: Selection) -> None:
    """Raise MachineError where the ranks of a point need more memory than this machine has free."""
    memory, points = processor_memory(), selection.description.points
    for point in selection.plan.points:
        needed = points[point.id].processor_bytes
        if needed is not None and _on_processor(selection, point) and needed > memory.available_bytes:
            raise MachineError(
                "the ranks need more memory than is free here; the kernel would kill them",
                place=point.id,
                found=f"about {size(needed)} for {point.world_size} rank(s), estimated",
                allowed=f"{size(memory.available_bytes)} free of {size(memory.limit_bytes)}:"
                f" {memory.limited_by}",
                hint=selection.workload.smaller,
            )


def _on_processor(selection: Selection, point: Point) -> bool:
    leg = selection.description.points[point.id].leg
    return not selection.accelerator or (leg is not None and leg.processor)


def _demand_engine(project: Project, selection: Selection, out: Path) -> None:
    """Raise MachineError where the engine cannot start the stack here."""
    engine, stack, vendor = selection.engine, selection.stack, selection.vendor
    if engine.unusable(stack=stack, vendor=vendor):
        # It says itself what helps, before it uses any folder.
        workspace = workspace_of(project, selection, out)
        engine.open_engine(stack=stack, vendor=vendor, workspace=workspace, say=lambda _text: None)


def _demand_checkpoints(selection: Selection) -> None:
    """Ask each place of checkpoints for what it has, so that one that does not answer is named now."""
    for place, option in _places(selection):
        if not is_remote(place):
            if not Path(place).is_dir():
                raise InputError("no such folder", place=option, found=place, hint="name a run folder")
        elif importlib.util.find_spec("boto3"):
            # Without boto3 here only the ranks can ask, where the stack has it.
            store_at(place).steps()


def _places(selection: Selection) -> Iterator[tuple[str, str]]:
    """Yield where checkpoints are saved and read, and the option that says so."""
    asked = selection.checkpointing
    if asked and asked.place:
        yield asked.place, "--checkpoint place"
    if asked and asked.source:
        yield asked.source, "--from"
