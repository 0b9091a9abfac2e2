"""The commands of a plan as text that can be pasted into a shell."""

from __future__ import annotations

from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Renderer
from twinrun.execution.layout import point_folder
from twinrun.execution.preparation import PREPARE, data_folder
from twinrun.execution.ranks import METRICS, Launch
from twinrun.execution.rendering import (
    RUN_FOLDER,
    rendered_commands,
    rendered_scripts,
    set_run_folder,
    shell_line,
)
from twinrun.execution.selection import Selection
from twinrun.execution.workspace import rank_commands, workspace_of
from twinrun.planning.project import Project
from twinrun.workloads.workload import Point, Run


def commands_of(project: Project, selection: Selection) -> dict[str, object]:
    """Return the line that makes the run folder, and for each point the command of each node."""
    plan, workspace = selection.plan, workspace_of(project, selection, RUN_FOLDER)
    renderer = selection.engine.renderer(stack=selection.stack, vendor=selection.vendor, workspace=workspace)
    commands = rank_commands(selection, renderer=renderer, workspace=workspace, variables={})
    data, prepare = _data(selection, workspace.data, renderer)
    launches = [_launch(project, selection, point, renderer, data) for point in plan.points]
    folder = project.root / "runs" / plan.recipe / plan.sha256()[:8]
    common = {"set_run_folder": set_run_folder(folder), "prepare_data": prepare}
    if scripts := rendered_scripts(launches, commands):
        return {**common, "scripts": {point: script.model_dump() for point, script in scripts.items()}}
    rendered = rendered_commands(launches, commands)
    return {
        **common,
        "commands": {
            point: [command.model_dump(mode="json") for command in nodes] for point, nodes in rendered.items()
        },
    }


def _data(selection: Selection, data: Path, renderer: Renderer) -> tuple[Path | None, str | None]:
    """Return the folder of the data, and the line that prepares it; None where ranks read none."""
    request = selection.workload.data(selection.plan.part)
    if request is None:
        return None, None
    source, sequence = request.source, request.sequence
    if source.kind != "standard-library":
        folder = data_folder(data=data, source=source, name=request.name, sequence=sequence, python="")
        return folder, f"invoke data {request.name} --recipe recipes/{selection.plan.recipe}"
    # Which interpreter reads its own sources is known when it runs: they go into the run folder.
    folder = RUN_FOLDER / "data"
    options = ("--source", source.kind, "--sequence", str(sequence), "--out", renderer.inside(folder))
    command = Command(arguments=(PYTHON, "-m", PREPARE, *options), variables={}, writes_data=True)
    return folder, shell_line(renderer.render(command))


def _launch(
    project: Project, selection: Selection, point: Point, renderer: Renderer, data: Path | None
) -> Launch:
    """Return the first attempt at a point."""
    plan = selection.plan
    run = Run(
        recipe=plan.recipe,
        accelerator=plan.gpu is not None or selection.accelerator,
        data=renderer.inside(data) if data else "",
        out=renderer.inside(point_folder(RUN_FOLDER, point.id)),
        metrics=renderer.inside(RUN_FOLDER / METRICS),
        attempt="",
    )
    job = selection.workload.job(plan.part, point, attempt=0, run=run)
    return Launch(placement=point, script=project.root / plan.script, job=job)
