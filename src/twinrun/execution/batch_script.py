"""The script that a batch scheduler runs on the first node, whole and from the plan alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.engine import NodeCommand, stop_file
from twinrun.execution.schedulers import Task
from twinrun.foundation.errors import MachineError
from twinrun.manifests.cluster import LoadedSite, Site
from twinrun.protocol.allocation import IMAGE_VARIABLE

HOSTS = "TWINRUN_HOSTS"
# Left to the shell, in every word of the script; the plan has no other way to reach it.
_NAMES = ("RUN", HOSTS, shell.FIRST_NODE, shell.NODE, shell.RANK, shell.LOCAL_RANK)


def batch_script(task: Task, *, site: LoadedSite, run: str, logs: str) -> str:
    """Return the sbatch script of `task`; pure.

    Raises:
        InputError: a string that no script can hold.
        MachineError: a command that must hand the run folder over, which only this machine can.
    """
    (command,) = task.commands
    if command.writer:
        raise MachineError(
            "on a cluster, containers run as their caller, who must not be root",
            place=f"{site.place}.engine",
            found=site.site.engine,
            hint="run twinrun as another user, or set the engine to venv",
        )
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in _options(task, site.site))]
    lines += ["set -euo pipefail", *([] if run == "$RUN" else [f"RUN={_word(run, site, names=())}"])]
    lines += [f'{shell.FIRST_NODE}=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)']
    body = (f"  {line}" for line in _start(task, command, site, logs))
    lines += [f"export RUN {shell.FIRST_NODE}", "start() {", *body, "}"]
    starter = list(_begin(task, command, site, logs))
    if site.site.requeue:
        return "\n".join([*lines, *_again(starter, _word(str(stop_file(Path(run), task.point)), site)), ""])
    return "\n".join([*lines, *starter[:-1], f"exec {starter[-1]}", ""])


def _options(task: Task, site: Site) -> Iterator[str]:
    """Yield the options of sbatch; cluster.toml holds words alone, so none needs quotes."""
    yield f"--job-name=twinrun-{re.sub(r'[^A-Za-z0-9_.=@-]', '_', task.point)[:60]}"
    yield f"--nodes={task.nodes}"
    yield f"--ntasks-per-node={task.ranks_per_node}"
    yield f"--time={site.minutes}"
    for name in ("partition", "account", "qos"):
        if value := getattr(site, name):
            yield f"--{name}={value}"
    if site.gres:
        yield f"--gres={site.gres}:{task.ranks_per_node}"
    if site.exclude:
        yield f"--exclude={','.join(site.exclude)}"
    if site.signal_seconds:
        yield f"--signal=TERM@{site.signal_seconds}"
    yield "--requeue" if site.requeue else "--no-requeue"


def _start(task: Task, command: NodeCommand, site: LoadedSite, logs: str) -> Iterator[str]:
    """Yield the body of what runs once on every node, or once for every rank."""
    if task.identity is None:
        yield f'export {shell.NODE}="$SLURM_NODEID"'
    else:
        rank, local_rank = task.identity
        yield f'export {shell.RANK}="${rank}" {shell.LOCAL_RANK}="${local_rank}"'
        yield f'export {shell.NODE}="$(({shell.RANK} / {task.ranks_per_node}))"'
        inside = f"/node-${shell.NODE}" if task.nodes > 1 else ""
        folder = _word(f"{logs}{inside}/${shell.LOCAL_RANK}", site)
        yield f"mkdir -p {folder}"
        yield f"exec > {folder}/stdout.log 2> {folder}/stderr.log"
    yield f"cd {_word(str(command.folder), site)}"
    interfaces = ",".join(site.site.interfaces)
    chosen = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interfaces) if interfaces else {}
    variables = {**(chosen if task.nodes > 1 else {}), **command.variables}
    for name, value in variables.items():
        yield f"export {_variable(name)}={_word(value, site)}"
    if command.container:
        inspect = " ".join(_word(one, site) for one in command.container.inspect_arguments())
        yield f'{IMAGE_VARIABLE}="$({inspect})"'
        yield f"export {IMAGE_VARIABLE}"
    yield f"exec {' '.join(_word(one, site) for one in command.arguments)}"


def _begin(task: Task, command: NodeCommand, site: LoadedSite, logs: str) -> Iterator[str]:
    """Yield what starts it everywhere."""
    starter = task.starter or (
        *("srun", f"--nodes={task.nodes}", f"--ntasks={task.nodes}", "--ntasks-per-node=1"),
        *("--kill-on-bad-exit=1", "--input=none", f"--output={_pattern(logs)}/launcher-%n.log"),
    )
    if f"${HOSTS}" in starter:
        yield f"{HOSTS}={_word(f'{logs}/hosts', site)}"
        slots = f"sed 's/$/ slots={task.ranks_per_node}/'"
        yield f'scontrol show hostnames "$SLURM_JOB_NODELIST" | {slots} > "${HOSTS}"'
    for name, value in command.srun_variables.items():
        yield f"export {_variable(name)}={_word(value, site)}"
    words = " ".join(_word(one, site) for one in (*starter, *command.srun_options))
    yield f'{words} bash -euc "$(declare -f start); start"'


def _again(starter: list[str], stopped: str) -> Iterator[str]:
    """Yield what starts it and asks for another start where the ranks were told to end and have saved."""
    # Slurm may tell this shell as well; with a handler it waits until its ranks have ended.
    yield "trap : TERM"
    yield f"rm --force {stopped}"
    yield from starter[:-1]
    yield f"status=0; {starter[-1]} || status=$?"
    # Slurm itself requeues what it preempts; asked as well, it would start the job once more than needed.
    yield """state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)"""
    yield f'if [[ -e {stopped} && $state == RUNNING ]]; then scontrol requeue "$SLURM_JOB_ID"; fi'
    yield 'exit "$status"'


def _pattern(path: str) -> str:
    """Return a path in which Slurm replaces nothing."""
    return path.replace("%", "%%")


def _word(text: str, site: LoadedSite, *, names: tuple[str, ...] = _NAMES) -> str:
    return shell.quoted_in_line(text, names, place=f"the script for {site.name}")


def _variable(name: str) -> str:
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), name
    return name
