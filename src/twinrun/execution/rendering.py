"""The commands of a run as text that a shell runs, before any of its folders exist."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.engine import NodeCommand
from twinrun.execution.layout import job_file, log_folder
from twinrun.execution.ranks import Launch, RankCommands
from twinrun.foundation.manifest import Frozen

# The shell variable that stands for the run folder, and the folder of a workspace to render with.
RUN = "$RUN"
RUN_FOLDER = Path(RUN)
# What attempts are called that nobody counts.
PASTED = "pasted"


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


def set_run_folder(folder: Path) -> str:
    """Return the line that makes the run folder and sets the variable that stands for it."""
    return f"RUN={shlex.quote(str(folder))} && mkdir -p {quoted(RUN)}"


def shell_line(command: NodeCommand) -> str:
    """Return `command` as one line for a shell, its variables first."""
    assignments = [f"{name}={quoted(value)}" for name, value in command.variables.items()]
    line = " ".join([*assignments, *map(quoted, command.arguments)])
    line = f"cd {quoted(str(command.folder))} && {line}"
    if command.writer:
        user, group = command.writer
        back = f"chown -R $(id -u):$(id -g) {quoted(RUN)}"
        line = f"chown -R {user}:{group} {quoted(RUN)} && {line}; status=$?; {back} && exit $status"
    return f"({line})"


def quoted(text: str) -> str:
    """Return `text` as one word of a shell in which nothing but the run folder is replaced."""
    return shell.quoted(text, (RUN.removeprefix("$"),))


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
    folders = " ".join(quoted(str(folder)) for folder in (file.parent, logs))
    job = launch.job.model_copy(update={"attempt": PASTED}).model_dump_json()
    return f"mkdir -p {folders} && printf '%s\\n' {quoted(job)} > {quoted(str(file))}"
