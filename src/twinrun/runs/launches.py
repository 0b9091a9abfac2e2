"""What a selection starts at its points, composed once for `--dry` and for the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Renderer, Workspace, job_file, log_folder, point_folder
from twinrun.execution.kernels import package_folders
from twinrun.execution.ranks import METRICS, Launch, RankCommands
from twinrun.execution.shell import RUN, RUN_FOLDER, set_run_folder, shell_line, word
from twinrun.foundation.cache import cache_root
from twinrun.foundation.manifest import Frozen
from twinrun.planning.project import Project
from twinrun.protocol.model_source import CheckpointModel, FolderModel, ModelSource, RepositoryModel
from twinrun.protocol.power import PowerReading
from twinrun.runs.checkpointing import checkpoints_of_point, reaches_store, source_folder
from twinrun.runs.data import PREPARE, data_folder, given_folder, preparation
from twinrun.runs.models import model_folder
from twinrun.runs.selection import Selection
from twinrun.workloads.workload import Point, Run


def workspace_of(project: Project, selection: Selection, run: Path) -> Workspace:
    """Return the folders that a run uses; kernels of the image are not looked for in the checkout."""
    baked = selection.stack.stack.kernels if selection.engine.RUNS_IMAGES else ()
    wanted = selection.recipe.recipe.kernels if selection.description.kernels else ()
    recipe = selection.recipe
    kept = project.root / recipe.folder
    names = [name for name in wanted if name not in baked]
    own = (kept / "kernels",) if recipe.elsewhere and recipe.recipe.name in names else ()
    shared = [name for name in names if not own or name != recipe.recipe.name]
    return Workspace(
        root=project.root,
        recipe=kept if recipe.elsewhere else None,
        run=run,
        data=cache_root() / "data",
        nodes=selection.site.site if selection.site else None,
        packages=package_folders(project.root, shared, own=own),
        source=source_folder(selection.checkpointing) or _folder_of_user(selection),
    )


def script_of(root: Path, selection: Selection) -> Path | str:
    """Return what the ranks run: a file of the recipe, or a module of the project."""
    own = selection.recipe.recipe.script
    return root / selection.recipe.file(own) if own else selection.plan.script


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
    selection: Selection,
    *,
    run: Path,
    data: Path | None,
    documents: Path | None = None,
    inside: Callable[[Path], str],
) -> Run:
    """Return what the jobs of all points share; folders and attempt are filled in for each.

    Args:
        data: folder of the prepared data, None where ranks read none.
        documents: folder of further data; found by what decides it where this run did not prepare it.
        inside: says how the ranks see a folder.
    """
    request, model = selection.description.documents, selection.description.model
    if documents is None and request:
        documents = data_folder(request, data=cache_root() / "data", python="")
    given = selection.description.given_documents
    folders = {
        "data": data,
        "documents": documents,
        "given": given_folder(given) if given else None,
        "model": model_folder(model) if model else None,
    }
    return Run(
        recipe=selection.plan.recipe,
        accelerator=selection.accelerator,
        out="",
        metrics=inside(run / METRICS),
        attempt="",
        checkpointing=selection.checkpointing,
        power=_power(selection),
        sniff_steps=selection.site.site.sniff_steps if selection.site else 0,
        watchdog_seconds=selection.site.site.watchdog_seconds if selection.site else None,
        folders={name: inside(folder) for name, folder in folders.items() if folder},
    )


def _power(selection: Selection) -> PowerReading:
    """Return how the ranks read power and clocks; a card that the table does not know is one device."""
    sensors, gpu = selection.vendor.power.model_dump(), selection.gpu
    if gpu is None:
        return PowerReading(**sensors)
    return PowerReading(**sensors, devices_per_card=gpu.devices_per_card, gpu=gpu.id, clock_mhz=gpu.clock_mhz)


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
        script=script_of(workspace.root, selection),
        job=selection.workload.job(plan.part, point, attempt, settings),
        reaches_store=reaches_store(checkpoints),
    )


# Name of an attempt that nobody counts.
PASTED = "pasted"
# A pasted line does without these.
_LEFT_OUT = {"checkpointing": None, "watchdog_seconds": None}


class RenderedCommand(Frozen):
    """The command of one node, as data and as a line for a shell."""

    arguments: tuple[str, ...]
    variables: dict[str, str]
    line: str
    """For a shell on that node, after `set_run_folder`."""


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
        return {**common, "scripts": scripts}
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


def rendered_scripts(launches: Iterable[Launch], commands: RankCommands) -> dict[str, dict[str, str]]:
    """Return the script of each point, none where the scheduler starts commands as they are.

    The scheduler gives it the run folder as the variable RUN; `prepare` is a line for a shell that makes the
    job file, after `set_run_folder`.
    """
    found = {}
    for launch in launches:
        task = commands.task(launch, attempt=PASTED)
        logs = str(log_folder(RUN_FOLDER, task.point))
        if script := commands.scheduler.script(task, run=RUN, logs=logs):
            found[task.point] = {"prepare": prepare_line(launch), "script": script}
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
