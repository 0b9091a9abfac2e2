"""The script of a job: written from a task alone, the same on every node, no longer for more of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.engine import NodeCommand, stop_file
from twinrun.execution.task import Task
from twinrun.foundation.errors import InputError, MachineError, RunError
from twinrun.foundation.processes import end_of, last_lines
from twinrun.manifests.cluster import LoadedSite
from twinrun.protocol.allocation import IMAGE_VARIABLE

SCRIPT, STATUS_FILE, LOG = "job.sh", "status", "launcher.log"
# Exit status of a job whose set-up line failed, and of `set_up` in its script.
SET_UP_FAILED = 97
HOSTS = "TWINRUN_HOSTS"
# Left to the shell, in every word of the script; the plan has no other way to reach it.
_NAMES = ("RUN", HOSTS, shell.FIRST_NODE, shell.NODE, shell.RANK, shell.LOCAL_RANK, shell.PORT)
# Ports of a job: below those that kernels hand out, and different for jobs with numbers near each other.
_FIRST_PORT, _PORTS = 10_000, 20_000


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """What one scheduler's scripts say in their own words."""

    prefix: str
    """Begins a line that is an option."""
    options: Sequence[str]
    hosts: str
    """Command that prints the hosts of the job, one a line."""
    node: str
    """Expression for the place of a node among them, where the starter tells each process its own."""
    number: str
    """Arithmetic expression for the number of the job."""
    each_node: tuple[str, ...] = ()
    """Words that start a command once on every node."""
    remote: tuple[str, ...] = ()
    """Words before a host and a command there, of a scheduler without `each_node`."""
    again: str = ""
    """Command that starts the job again where the ranks have saved and the job may go on."""


def batch_script(task: Task, *, site: LoadedSite, run: str, logs: str, dialect: Dialect) -> str:
    """Return the script of `task`; pure.

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
    writer = _Writer(task=task, command=command, site=site, run=run, logs=logs, dialect=dialect)
    return "\n".join([*writer.lines(), ""])


@dataclass(frozen=True, kw_only=True)
class _Writer:
    task: Task
    command: NodeCommand
    site: LoadedSite
    run: str
    logs: str
    dialect: Dialect

    def lines(self) -> Iterator[str]:
        # A login shell, which alone knows `module`, where something of the site is to be set up.
        yield "#!/bin/bash -l" if self.site.site.modules else "#!/bin/bash"
        yield from (f"{self.dialect.prefix} {option}" for option in self.dialect.options)
        yield "set -euo pipefail"
        if self.run != "$RUN":
            yield f"RUN={self._word(self.run, names=())}"
        stale = [f"{self.logs}/{STATUS_FILE}"]
        if self.site.site.requeue:
            stale.append(str(stop_file(Path(self.run), self.task.point)))
        yield f"rm --force {' '.join(map(self._word, stale))}"
        yield f'leave() {{ echo "$1" > {self._word(f"{self.logs}/{STATUS_FILE}")}; exit "$1"; }}'
        yield f"{shell.FIRST_NODE}=$({self.dialect.hosts} | sed -n 1p)"
        yield f"{shell.PORT}=$(({_FIRST_PORT} + {self.dialect.number} % {_PORTS}))"
        yield f"export RUN {shell.FIRST_NODE} {shell.PORT}"
        if self.site.site.infiniband:
            yield "ulimit -l unlimited || true"
        if not self.dialect.remote:
            yield from self._set_up()
        yield from ("start() {", *(f"  {line}" for line in self._start()), "}")
        # The scheduler may tell this shell to end as well; with a handler it waits until its ranks have.
        yield "trap : TERM"
        *before, start = self._begin()
        yield from before
        yield f"status=0; {start} || status=$?"
        if self.site.site.requeue and self.dialect.again:
            stopped = self._word(stale[-1])
            yield f"if [[ -e {stopped} ]]; then {self.dialect.again}; fi"
        yield 'leave "$status"'

    def _set_up(self) -> Iterator[str]:
        """Yield what loads the modules and runs the user's lines; the first that fails ends the job."""
        one = self.site.site
        lines = [*(f"module load {name}" for name in one.modules), *one.setup]
        if not lines:
            return
        failed = f'{{ echo "twinrun: this set-up line failed: $1" >&2; leave {SET_UP_FAILED}; }}'
        # Modules of many sites read variables that are not set.
        yield f'set_up() {{ set +eu; eval "$1" || {failed}; set -eu; }}'
        yield from (f"set_up {self._word(line, names=())}" for line in lines)

    def _start(self) -> Iterator[str]:
        """Yield the body of what runs once on every node, or once for every rank."""
        task, command = self.task, self.command
        if task.identity is None:
            yield f'export {shell.NODE}="{self.dialect.node}"'
        else:
            rank, local_rank = task.identity
            yield f'export {shell.RANK}="${rank}" {shell.LOCAL_RANK}="${local_rank}"'
            yield f'export {shell.NODE}="$(({shell.RANK} / {task.ranks_per_node}))"'
            inside = f"/node-${shell.NODE}" if task.nodes > 1 else ""
            folder = self._word(f"{self.logs}{inside}/${shell.LOCAL_RANK}")
            yield f"mkdir -p {folder}"
            yield f"exec > {folder}/stdout.log 2> {folder}/stderr.log"
        yield f"cd {self._word(str(command.folder))}"
        interfaces = ",".join(self.site.site.interfaces)
        chosen = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interfaces) if interfaces else {}
        variables = {**(chosen if task.nodes > 1 else {}), **command.variables}
        for name, value in variables.items():
            yield f"export {_variable(name)}={self._word(value)}"
        words = [self._word(one) for one in command.arguments]
        if command.container:
            inspect = " ".join(self._word(one) for one in command.container.inspect_arguments())
            yield f'{IMAGE_VARIABLE}="$({inspect})"'
            yield f"export {IMAGE_VARIABLE}"
            if command.container.groups_of:
                # Their numbers are those of this node, which need not be those of another.
                files = " ".join(command.container.groups_of)
                number = '"$(stat --format=%g "$file")"'
                yield "groups=()"
                yield f"for file in {files}; do [[ ! -e $file ]] || groups+=(--group-add {number}); done"
                words[2:2] = ['"${groups[@]}"']
        yield f"exec {' '.join(words)}"

    def _begin(self) -> list[str]:
        """Return the lines that start it everywhere; the last one waits for the end."""
        task, lines = self.task, []
        starter = task.starter or self.dialect.each_node
        if f"${HOSTS}" in starter or not starter:
            lines.append(f"{HOSTS}={self._word(f'{self.logs}/hosts')}")
            slots = f" | sed 's/$/ slots={task.ranks_per_node}/'" if starter else ""
            lines.append(f'{self.dialect.hosts}{slots} > "${HOSTS}"')
        lines += [
            f"export {_variable(name)}={self._word(value)}"
            for name, value in self.command.srun_variables.items()
        ]
        if not starter:
            return [*lines, *self._loop()]
        words = " ".join(self._word(one) for one in (*starter, *self.command.srun_options))
        return [*lines, f'{words} bash -euc "$(declare -f start); start"']

    def _loop(self) -> Iterator[str]:
        """Yield what starts the nodes' commands one by one, and ends all when one fails."""
        file = self._word(f"{self.logs}/start.sh")
        output = f"{self._word(self.logs)}/launcher-$node.log"
        yield "{"
        yield f'  declare -p RUN {shell.FIRST_NODE} {shell.PORT} | sed "s/^declare -x/export/"'
        yield "  echo 'leave() { exit \"$1\"; }'"
        yield from (f"  printf '%s\\n' {self._word(line, names=())}" for line in self._set_up())
        yield "  declare -f start; echo 'node=$1; start'"
        yield f"}} > {file}"
        yield "everywhere() {"
        yield "  local node=0 host there"
        yield "  while read -r host <&3; do"
        remote = " ".join(self._word(word) for word in self.dialect.remote)
        # The first node is this one; a scheduler may count the script as its one process there.
        yield f'    there=({remote} "$host"); ((node > 0)) || there=()'
        yield f'    "${{there[@]}}" /bin/bash -eu {file} "$node" > {output} 2>&1 < /dev/null &'
        yield "    node=$((node + 1))"
        yield f'  done 3< "${HOSTS}"'
        yield f"  for ((node = 0; node < {self.task.nodes}; node++)); do"
        yield "    wait -n || { status=$?; kill $(jobs -p) 2> /dev/null; wait; return $status; }"
        yield "  done"
        yield "}"
        yield "everywhere"

    def _word(self, text: str, *, names: tuple[str, ...] = _NAMES) -> str:
        return shell.quoted_in_line(text, names, place=f"the script for {self.site.name}")


def refuse_own_options(site: LoadedSite, known: Sequence[str]) -> None:
    """Raise InputError for an option that the script has anyway, from another key of the site."""
    for option in site.site.options:
        name = re.split("[= ]", option.lstrip("-"), maxsplit=1)[0]
        if name in known:
            raise InputError(
                "the script has this option from another key",
                place=f"{site.place}.options",
                found=option,
                hint="see the keys of a site in docs/guides/run-on-a-cluster.md",
            )


def job_name(task: Task) -> str:
    """Return the name of a job, in which no scheduler finds a letter that it refuses."""
    return f"twinrun-{re.sub(r'[^A-Za-z0-9_.=@-]', '_', task.point)[:60]}"


def demand_shared(site: LoadedSite, run: Path) -> None:
    """Raise InputError where the nodes of the site do not see the run folder."""
    shared = site.site.shared
    if not any(run.is_relative_to(folder) for folder in shared):
        raise InputError(
            "the nodes do not see the run folder",
            place=f"{site.place}.shared",
            found=str(run),
            allowed=shared,
            hint="choose a folder below one of them with --out",
        )


def written_status(logs: Path) -> int | None:
    """Return the exit status that the script of a job has left, None where it did not come to its end."""
    file = logs / STATUS_FILE
    text = file.read_text(encoding="ascii", errors="replace").strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None


def refuse_failed_set_up(status: int, *, site: LoadedSite, logs: Path) -> None:
    """Raise RunError with what it printed where a set-up line of the site ended the job."""
    if status != SET_UP_FAILED:
        return
    texts = [end_of(path) for path in sorted(logs.glob("launcher*.log"))]
    raise RunError(
        "a set-up line of the site failed, and no rank was started",
        place=f"{site.place}.setup",
        found=last_lines("\n".join(texts)),
        hint="the same line in a job of your own shows more; --dry prints the script",
    )


def _variable(name: str) -> str:
    assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), name
    return name
