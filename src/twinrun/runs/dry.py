"""The commands of a plan as text that can be pasted into a shell, before any of its folders exist."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Renderer, job_file, log_folder
from twinrun.execution.ranks import Launch, RankCommands
from twinrun.execution.shell import RUN, RUN_FOLDER, set_run_folder, shell_line, word
from twinrun.foundation.manifest import Frozen
from twinrun.planning.project import Project
from twinrun.protocol.model_source import CheckpointModel, ModelSource, RepositoryModel
from twinrun.runs.data import PREPARE, data_folder, preparation
from twinrun.runs.launches import launch_of, rank_commands, shared_settings, workspace_of
from twinrun.runs.models import model_folder
from twinrun.runs.selection import Selection

# What attempts are called that nobody counts.
PASTED = "pasted"
# What a pasted line does without.
_LEFT_OUT = {"checkpointing": None, "watchdog_seconds": None}


class RenderedCommand(Frozen):
    """The command of one node, as data and as a line for a shell."""

    arguments: tuple[str, ...]
    variables: dict[str, str]
    line: str
    """For a shell on that node, after `set_run_folder`."""


class RenderedScript(Frozen):
    """The script of one point."""

    prepare: str
    """Line for a shell that makes the job file, after `set_run_folder`."""
    script: str
    """For the scheduler, which is given the run folder as the variable RUN."""


def commands_of(project: Project, selection: Selection) -> dict[str, object]:
    """Return the line that makes the run folder, and for each point the command of each node."""
    plan, workspace = selection.plan, workspace_of(project, selection, RUN_FOLDER)
    renderer = selection.engine.renderer(stack=selection.stack, vendor=selection.vendor, workspace=workspace)
    commands = rank_commands(selection, renderer=renderer, workspace=workspace, variables={})
    data, prepare = _data(selection, workspace.data, renderer)
    inside = renderer.inside
    settings = shared_settings(selection, run=RUN_FOLDER, data=data, inside=inside).model_copy(
        update={"accelerator": plan.gpu is not None or selection.accelerator, **_LEFT_OUT}
    )
    launches = [
        launch_of(selection, point, attempt=0, shared=settings, workspace=workspace, inside=inside)
        for point in plan.points
    ]
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
    """Return the folder of the data and the line that prepares what ranks read, None where there is none."""
    request = selection.description.data
    if request is None:
        return None, _model_line(selection.description.model)
    if request.source.kind != "standard-library":
        folder = data_folder(request, data=data, python="")
        return folder, f"invoke data {request.name} --recipe recipes/{selection.plan.recipe}"
    # Which interpreter reads its own sources is known when it runs: they go into the run folder.
    folder = RUN_FOLDER / "data"
    options = preparation(request, renderer.inside(folder))
    command = Command(arguments=(PYTHON, "-m", PREPARE, *options), variables={}, writes_data=True)
    return folder, shell_line(renderer.render(command))


def _model_line(source: ModelSource | None) -> str | None:
    """Return the line that brings a model to where the ranks look for it; None where it lies there."""
    match source:
        case RepositoryModel(repository=repository, revision=revision):
            return f"invoke data {repository}@{revision}"
        case CheckpointModel(place=place, step=step):
            target = word(str(model_folder(source)))
            return f"invoke checkpoint convert {word(place)} --step {step} --out {target}"
        case _:
            return None


def rendered_commands(
    launches: Iterable[Launch], commands: RankCommands
) -> dict[str, tuple[RenderedCommand, ...]]:
    """Return the command of each node for each point; the run folder of `commands` is RUN_FOLDER."""
    return {launch.placement.id: _rendered(launch, commands) for launch in launches}


def rendered_scripts(launches: Iterable[Launch], commands: RankCommands) -> dict[str, RenderedScript]:
    """Return the script of each point, none where the scheduler starts commands as they are."""
    found = {}
    for launch in launches:
        task = commands.task(launch, attempt=PASTED)
        logs = str(log_folder(RUN_FOLDER, task.point))
        if script := commands.scheduler.script(task, run=RUN, logs=logs):
            found[task.point] = RenderedScript(prepare=prepare_line(launch), script=script)
    return found


def _rendered(launch: Launch, commands: RankCommands) -> tuple[RenderedCommand, ...]:
    prepare = prepare_line(launch)
    return tuple(
        RenderedCommand(
            arguments=command.arguments,
            variables=command.variables,
            line=f"{prepare} && {shell_line(command)}",
        )
        for command in commands.render(launch, attempt=PASTED)
    )


def prepare_line(launch: Launch) -> str:
    """Return the line that makes the folders and the job file of a launch."""
    point = launch.placement.id
    file, logs = job_file(RUN_FOLDER, point), log_folder(RUN_FOLDER, point)
    folders = " ".join(word(str(folder)) for folder in (file.parent, logs))
    job = launch.job.model_copy(update={"attempt": PASTED}).model_dump_json()
    return f"mkdir -p {folders} && printf '%s\\n' {word(job)} > {word(str(file))}"
