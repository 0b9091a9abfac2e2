"""The folders that a run uses."""

from __future__ import annotations

from pathlib import Path

from twinrun.execution import engines
from twinrun.execution.engine import EngineModule, Workspace
from twinrun.execution.kernels import package_folders
from twinrun.execution.saving import source_folder
from twinrun.execution.selection import Selection
from twinrun.foundation.cache import cache_root
from twinrun.foundation.discovery import load_part
from twinrun.planning.project import Project
from twinrun.workloads import load_workload


def workspace_of(project: Project, selection: Selection, run: Path) -> Workspace:
    """Return the folders that a run uses; kernels of the image are not looked for in the checkout."""
    part: EngineModule = load_part(engines, selection.plan.engine)
    baked = selection.stack.stack.kernels if part.RUNS_IMAGES else ()
    plan = selection.plan
    wanted = selection.recipe.recipe.kernels if load_workload(plan.workload).uses_kernels(plan.part) else ()
    carried = [name for name in wanted if name not in baked]
    packages = package_folders(project.root, carried)
    return Workspace(
        root=project.root,
        run=run,
        data=cache_root() / "data",
        packages=packages,
        source=source_folder(selection.checkpointing),
    )
