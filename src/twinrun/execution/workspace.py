"""What a selection starts ranks with: the folders of the run, and what composes commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from twinrun.execution.engine import Renderer, Workspace
from twinrun.execution.kernels import package_folders
from twinrun.execution.ranks import RankCommands
from twinrun.execution.saving import source_folder
from twinrun.execution.selection import Selection
from twinrun.foundation.cache import cache_root
from twinrun.planning.project import Project


def workspace_of(project: Project, selection: Selection, run: Path) -> Workspace:
    """Return the folders that a run uses; kernels of the image are not looked for in the checkout."""
    baked = selection.stack.stack.kernels if selection.engine.RUNS_IMAGES else ()
    uses_kernels = selection.workload.uses_kernels(selection.plan.part)
    wanted = selection.recipe.recipe.kernels if uses_kernels else ()
    carried = [name for name in wanted if name not in baked]
    packages = package_folders(project.root, carried)
    return Workspace(
        root=project.root,
        run=run,
        data=cache_root() / "data",
        packages=packages,
        source=source_folder(selection.checkpointing),
    )


def rank_commands(
    selection: Selection, *, renderer: Renderer, workspace: Workspace, variables: Mapping[str, str]
) -> RankCommands:
    """Return what composes the commands of a selection, for `--dry` and for the run alike."""
    return RankCommands(
        renderer=renderer,
        launcher=selection.launcher,
        scheduler=selection.scheduler,
        workspace=workspace,
        cores=selection.cores,
        variables=variables,
    )
