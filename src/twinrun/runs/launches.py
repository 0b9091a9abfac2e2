"""What a selection starts at its points, composed once for `--dry` and for the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from twinrun.execution.engine import Renderer, Workspace, point_folder
from twinrun.execution.kernels import package_folders
from twinrun.execution.ranks import METRICS, Launch, RankCommands
from twinrun.foundation.cache import cache_root
from twinrun.planning.project import Project
from twinrun.protocol.model_source import FolderModel
from twinrun.protocol.power import PowerReading
from twinrun.runs.checkpointing import checkpoints_of_point, reaches_store, source_folder
from twinrun.runs.data import data_folder
from twinrun.runs.models import model_folder
from twinrun.runs.selection import Selection
from twinrun.workloads.workload import Point, Run


def workspace_of(project: Project, selection: Selection, run: Path) -> Workspace:
    """Return the folders that a run uses; kernels of the image are not looked for in the checkout."""
    baked = selection.stack.stack.kernels if selection.engine.RUNS_IMAGES else ()
    wanted = selection.recipe.recipe.kernels if selection.description.kernels else ()
    return Workspace(
        root=project.root,
        run=run,
        data=cache_root() / "data",
        nodes=selection.site.site if selection.site else None,
        packages=package_folders(project.root, [name for name in wanted if name not in baked]),
        source=source_folder(selection.checkpointing) or _folder_of_user(selection),
    )


def _folder_of_user(selection: Selection) -> Path | None:
    """Return the folder of a model that lies outside the cache; None where there is none."""
    source = selection.description.model
    return model_folder(source) if isinstance(source, FolderModel) else None


def rank_commands(
    selection: Selection, *, renderer: Renderer, workspace: Workspace, variables: Mapping[str, str]
) -> RankCommands:
    """Return what composes the commands of a selection's launches."""
    return RankCommands(
        renderer=renderer,
        launcher=selection.launcher,
        scheduler=selection.scheduler,
        workspace=workspace,
        cores=selection.cores,
        variables={**variables, **(selection.site.site.environment if selection.site else {})},
    )


def shared_settings(
    selection: Selection, *, run: Path, data: Path | None, inside: Callable[[Path], str]
) -> Run:
    """Return what the jobs of all points share; folders and attempt are filled in for each.

    Args:
        data: folder of the prepared data, None where ranks read none.
        inside: says how the ranks see a folder.
    """
    documents, model = selection.description.documents, selection.description.model
    read = data_folder(documents, data=cache_root() / "data", python="") if documents else None
    return Run(
        recipe=selection.plan.recipe,
        accelerator=selection.accelerator,
        data=inside(data) if data else "",
        out="",
        metrics=inside(run / METRICS),
        attempt="",
        checkpointing=selection.checkpointing,
        power=_power(selection),
        sniff_steps=selection.site.site.sniff_steps if selection.site else 0,
        watchdog_seconds=selection.site.site.watchdog_seconds if selection.site else None,
        documents=inside(read) if read else "",
        model=inside(model_folder(model)) if model else "",
    )


def _power(selection: Selection) -> PowerReading:
    """Return how the ranks read power; a card that the table does not know is taken for one device."""
    per_card = selection.gpu.devices_per_card if selection.gpu else 1
    return PowerReading(**selection.vendor.power.model_dump(), devices_per_card=per_card)


def launch_of(
    selection: Selection,
    point: Point,
    *,
    attempt: int,
    shared: Run,
    workspace: Workspace,
    inside: Callable[[Path], str],
) -> Launch:
    """Return what is started for one attempt at a point."""
    plan, run = selection.plan, workspace.run
    checkpoints = checkpoints_of_point(
        shared.checkpointing,
        point=point.id,
        continued=selection.description.points[point.id].leg,
        known=[one.id for one in plan.points],
        # Not in the folder of the point, which each start makes anew.
        folder=run / "checkpoints",
        inside=inside,
    )
    out = inside(point_folder(run, point.id))
    settings = shared.model_copy(update={"out": out, "checkpointing": checkpoints})
    return Launch(
        placement=point,
        script=workspace.root / plan.script if plan.script.endswith(".py") else plan.script,
        job=selection.workload.job(plan.part, point, attempt, settings),
        reaches_store=reaches_store(checkpoints),
    )
