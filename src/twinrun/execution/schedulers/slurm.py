"""Slurm: one batch job a point, whose script is written from the plan alone, polled until it ends."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.engine import NodeCommand, stop_file
from twinrun.execution.schedulers import Start, Task
from twinrun.execution.slurm_client import JobState, SlurmClient
from twinrun.foundation.errors import InputError, MachineError, RunError, RunInterruptedError, TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.manifests.cluster import LoadedSite, Site
from twinrun.protocol.allocation import IMAGE_VARIABLE

SCRIPT = "job.sh"
# A controller that restarts is silent for a moment; one that stays away is gone.
PATIENCE_SECONDS = 60.0
# Beyond the time in which Slurm kills what it has told to end.
CANCEL_SECONDS = 90.0
# Jobs that somebody or something else has ended, and that may go on.
_STOPPED = ("CANCELLED", "PREEMPTED", "TIMEOUT", "DEADLINE", "REVOKED")
HOSTS = "TWINRUN_HOSTS"
# Left to the shell, in every word of the script; the plan has no other way to reach it.
_NAMES = ("RUN", HOSTS, shell.FIRST_NODE, shell.NODE, shell.RANK, shell.LOCAL_RANK)


def open_scheduler(*, site: LoadedSite | None) -> Slurm:
    """Return the Slurm of a site; raises InputError without one."""
    if site is None:
        hint = "add --cluster SITE; `invoke cluster up` makes the site `local`"
        raise InputError("Slurm is at a site", place="--scheduler slurm", found="no --cluster", hint=hint)
    return Slurm(site)


class Slurm:
    """The scheduler of one site."""

    name = "slurm"

    def __init__(self, site: LoadedSite) -> None:
        self.site = site
        self._client = SlurmClient(site)

    def unusable(self, *, nodes: int) -> str | None:
        """Return why so many nodes cannot be had, or None."""
        try:
            found = self._client.size()
        except RunError as error:
            return f"Slurm does not answer: {str(error.found).strip()}"
        if nodes > found:
            return f"the plan has points of up to {nodes} nodes, and {found} of the site are up"
        return None

    def first_node(self) -> str:
        """Return the variable of the script that has the first node."""
        return f"${shell.FIRST_NODE}"

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return one variable: all nodes start the same command."""
        return (f"${shell.NODE}",)

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the sbatch script of `task`; pure."""
        return batch_script(task, site=self.site, run=run, logs=logs)

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> SlurmJob:
        """Write the script of `task` to its logs and hand it to sbatch.

        Raises:
            InputError: sbatch refuses what cluster.toml says, or nodes do not see the run folder.
            MachineError: Slurm does not know this machine.
        """
        self._demand_shared(run)
        file = logs / SCRIPT
        write_atomically(file, self.script(task, run=str(run), logs=str(logs)))
        output = f"--output={str(logs).replace('%', '%%')}/launcher.log"
        try:
            printed = self._client.ask("sbatch", "--parsable", output, f"--chdir={run}", str(file))
        except RunError as error:
            raise InputError(
                "sbatch refuses the job",
                place=self.site.place,
                found=str(error.found).strip(),
                hint=f"the options are the first lines of {file}",
            ) from None
        return SlurmJob(printed.strip().partition(";")[0], client=self._client, logs=logs, point=task.point)

    def _demand_shared(self, run: Path) -> None:
        shared = self.site.site.shared
        if not any(run.is_relative_to(folder) for folder in shared):
            raise InputError(
                "the nodes do not see the run folder",
                place=f"{self.site.place}.shared",
                found=str(run),
                allowed=shared,
                hint="choose a folder below one of them with --out",
            )


class SlurmJob:
    """A submitted job."""

    def __init__(self, number: str, *, client: SlurmClient, logs: Path, point: str) -> None:
        self._number = number
        self._client = client
        self._logs = logs
        self._point = point
        self._last: JobState | None = None
        self._asked = self._answered = time.monotonic()
        self._nodes: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the host names of the nodes; empty while the job waits."""
        return self._nodes

    def poll(self) -> int | None:
        """Return the exit status, None until the job has ended; asks no oftener than the site wants.

        Raises:
            Interrupted: the job was cancelled, preempted, or out of time.
            RunError: a node died, or Slurm has not answered for a minute.
        """
        now = time.monotonic()
        if self._last and now - self._asked < self._client.site.site.poll_seconds:
            return None
        self._asked = now
        try:
            state = self._last = self._client.job(self._number)
        except (RunError, MachineError) as error:
            if now - self._answered > PATIENCE_SECONDS:
                raise self._silent(error) from None
            return None
        self._answered = now
        if state.nodes and not self._nodes:
            with contextlib.suppress(RunError):
                self._nodes = self._client.hosts(state.nodes)
        return self._status(state) if state.ended else None

    def logs(self) -> tuple[Path, ...]:
        """Return the files of the script and of each node, as far as they are there."""
        agents = sorted(self._logs.glob("launcher-*.log"), key=lambda path: (len(path.name), path.name))
        return tuple(path for path in (self._logs / "launcher.log", *agents) if path.exists())

    def cancel(self) -> None:
        """End the job and wait until its nodes are given back; one that has ended is no error."""
        if self._last and self._last.ended:
            return
        # A Slurm that is gone can be asked for nothing; its nodes end the job at its time limit.
        with contextlib.suppress(RunError, MachineError):
            self._client.ask("scancel", "--quiet", self._number)
            deadline = time.monotonic() + CANCEL_SECONDS
            while not (state := self._client.job(self._number)).ended and time.monotonic() < deadline:
                time.sleep(min(0.5, self._client.site.site.poll_seconds))
            self._last = state

    def _status(self, state: JobState) -> int:
        late = state.limit_seconds - self._client.site.site.signal_seconds - 1
        if state.state in _STOPPED or (state.status and state.run_seconds >= late):
            raise RunInterruptedError(
                f"job {state.id} was ended: {state.state}",
                place=self._point,
                found=f"{state.reason}, after {state.run_seconds:.0f} s on {state.nodes or 'no node'}",
                hint="the same command with --resume runs the points that are left",
            )
        if state.state in ("NODE_FAIL", "BOOT_FAIL"):
            raise RunError(
                f"job {state.id} lost a node: {state.state}",
                place=self._point,
                found=f"of {state.nodes}: {self._client_down()}",
                hint="after mending it, or with it in `exclude` of cluster.toml, --resume goes on",
            )
        return state.status or int(state.state != "COMPLETED")

    def _client_down(self) -> str:
        try:
            listed = self._client.ask("sinfo", "--noheader", "--Node", "--states=down", "--format=%N %E")
        except RunError as error:
            return error.message
        return ", ".join(dict.fromkeys(listed.splitlines())) or "no node is down any more"

    def _silent(self, error: TwinrunError) -> RunError:
        return RunError(
            f"Slurm has not answered for {PATIENCE_SECONDS:.0f} s",
            place=self._point,
            found=str(error.found or error.message).strip(),
            hint=f"job {self._number} may still run: when Slurm is back, `scancel` it and --resume",
        )


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
