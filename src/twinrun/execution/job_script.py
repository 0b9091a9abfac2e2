"""The script of a job: written from a task alone, the same on every node, no longer for more of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinrun.execution import shell
from twinrun.execution.engine import Container, stop_file
from twinrun.execution.task import Task
from twinrun.manifests.cluster import LoadedSite
from twinrun.protocol.allocation import IMAGE_VARIABLE

SCRIPT, STATUS_FILE, LOG = "job.sh", "status", "launcher.log"
# Exit status of a job whose set-up line failed, and of `set_up` in its script.
SET_UP_FAILED = 97
# Exit status of a node that cannot resolve the name of the first.
NAME_UNKNOWN = 96
HOSTS = "TWINRUN_HOSTS"
# Left to the shell, in every word of the script; the plan has no other way to reach it.
_NAMES = ("RUN", HOSTS, shell.FIRST_NODE, shell.NODE, shell.RANK, shell.LOCAL_RANK, shell.PORT)
# Ports of a job: below those that kernels hand out, and different for jobs with numbers near each other.
_FIRST_PORT, _PORTS = 10_000, 20_000


class Dialect:
    """What one scheduler's scripts say in its own words."""

    prefix: str
    """Begins a line that is an option."""
    hosts: str
    """Command that prints the hosts of the job, one a line."""
    node = "$node"
    """Expression for the place of a node among them, where the starter tells each process its own."""
    number: str
    """Arithmetic expression for the number of the job."""
    remote: tuple[str, ...] = ()
    """Words before a host and a command there, of a scheduler without `each_node`."""
    again = ""
    """Command that starts the job again where the ranks have saved and the job may go on."""

    def options(self, task: Task) -> Iterator[str]:
        """Yield the options of a job; cluster.toml holds words alone, so none needs quotes."""
        raise NotImplementedError

    def each_node(self, task: Task, logs: str) -> tuple[str, ...]:
        """Return the words that start a command once on every node; empty with `remote`."""
        return ()


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """The script of `task`, whose folders are `run` and `logs`; pure. A NUL in a word is an InputError."""

    task: Task
    site: LoadedSite
    run: str
    logs: str
    dialect: Dialect

    def text(self) -> str:
        """Return the whole script."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        # A login shell, which alone knows `module`, where something of the site is to be set up.
        yield "#!/bin/bash -l" if self.site.site.modules else "#!/bin/bash"
        yield from (f"{self.dialect.prefix} {option}" for option in self.dialect.options(self.task))
        yield "set -euo pipefail"
        if self.run != "$RUN":
            yield f"RUN={self.word(self.run, names=())}"
        stale = [f"{self.logs}/{STATUS_FILE}"]
        if self.site.site.requeue:
            stale.append(str(stop_file(Path(self.run), self.task.point)))
        yield f"rm --force {' '.join(map(self.word, stale))}"
        yield f'leave() {{ echo "$1" > {self.word(f"{self.logs}/{STATUS_FILE}")}; exit "$1"; }}'
        yield f"{shell.FIRST_NODE}=$({self.dialect.hosts} | sed -n 1p)"
        yield f"{shell.PORT}=$(({_FIRST_PORT} + {self.dialect.number} % {_PORTS}))"
        yield f"export RUN {shell.FIRST_NODE} {shell.PORT}"
        if self.site.site.infiniband:
            yield "ulimit -l unlimited || true"
        if not self.dialect.remote:
            yield from self.set_up()
        yield from ("start() {", *(f"  {line}" for line in self.body()), "}")
        # The scheduler may tell this shell to end as well; with a handler it waits until its ranks have.
        yield "trap : TERM"
        *before, start = self._begin()
        yield from before
        yield f"status=0; {start} || status=$?"
        if self.site.site.requeue and self.dialect.again:
            yield f"if [[ -e {self.word(stale[-1])} ]]; then {self.dialect.again}; fi"
        yield 'leave "$status"'

    def set_up(self) -> Iterator[str]:
        """Yield what loads the modules and runs the user's lines; the first that fails ends the job."""
        one = self.site.site
        lines = [*(f"module load {name}" for name in one.modules), *one.setup]
        if lines:
            failed = f'{{ echo "twinrun: this set-up line failed: $1" >&2; leave {SET_UP_FAILED}; }}'
            # Modules of many sites read variables that are not set.
            yield f'set_up() {{ set +eu; eval "$1" || {failed}; set -eu; }}'
        yield from (f"set_up {self.word(line, names=())}" for line in lines)

    def body(self) -> Iterator[str]:
        """Yield what runs once on every node, or once for every rank."""
        task, (command,) = self.task, self.task.commands
        if task.identity is None:
            yield f'export {shell.NODE}="{self.dialect.node}"'
        else:
            rank, local_rank = task.identity
            yield f'export {shell.RANK}="${rank}" {shell.LOCAL_RANK}="${local_rank}"'
            yield f'export {shell.NODE}="$(({shell.RANK} / {task.ranks_per_node}))"'
            inside = f"/node-${shell.NODE}" if task.nodes > 1 else ""
            folder = self.word(f"{self.logs}{inside}/${shell.LOCAL_RANK}")
            yield f"mkdir -p {folder}"
            yield f"exec > {folder}/stdout.log 2> {folder}/stderr.log"
        yield f"cd {self.word(str(command.folder))}"
        if task.nodes > 1:
            # Ranks would wait for a peer that they cannot name until they give up, minutes later.
            unknown = f'echo "twinrun: $HOSTNAME does not know the name ${shell.FIRST_NODE}" >&2'
            yield f'getent ahosts "${shell.FIRST_NODE}" > /dev/null || {{ {unknown}; exit {NAME_UNKNOWN}; }}'
        interfaces = ",".join(self.site.site.interfaces)
        chosen = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interfaces) if interfaces else {}
        yield from self._exports({**(chosen if task.nodes > 1 else {}), **command.variables})
        words = [self.word(one) for one in command.arguments]
        held = ""
        if command.container:
            place = shell.NODE if task.identity is None else shell.RANK
            yield f'name=twinrun-"${shell.PORT}"-"${place}"'
            yield from _container_lines(command.container)
            words[2:2] = ['--name "$name"', '"${groups[@]}"', '"${cgroup[@]}"']
            # Its own input, which nobody else holds: where this process ends, the container does.
            held = " <> <(echo 0)"
        yield f"exec {' '.join(words)}{held}"

    def _begin(self) -> list[str]:
        """Return the lines that start it everywhere; the last one waits for the end."""
        task, (command,) = self.task, self.task.commands
        lines = []
        starter = task.starter or self.dialect.each_node(task, self.logs)
        if f"${HOSTS}" in starter or not starter:
            lines.append(f"{HOSTS}={self.word(f'{self.logs}/hosts')}")
            slots = f" | sed 's/$/ slots={task.ranks_per_node}/'" if starter else ""
            lines.append(f'{self.dialect.hosts}{slots} > "${HOSTS}"')
        lines += self._exports(command.srun_variables)
        if not starter:
            return [*lines, *self._loop()]
        words = " ".join(self.word(one) for one in (*starter, *command.srun_options))
        return [*lines, f'{words} bash -euc "$(declare -f start); start"']

    def _loop(self) -> Iterator[str]:
        """Yield what starts the nodes' commands one by one, and ends all when one fails."""
        file = self.word(f"{self.logs}/start.sh")
        output = f"{self.word(self.logs)}/launcher-$node.log"
        yield "{"
        yield f'  declare -p RUN {shell.FIRST_NODE} {shell.PORT} | sed "s/^declare -x/export/"'
        yield "  echo 'leave() { exit \"$1\"; }'"
        yield from (f"  printf '%s\\n' {self.word(line, names=())}" for line in self.set_up())
        yield "  declare -f start; echo 'node=$1; start'"
        yield f"}} > {file}"
        yield "everywhere() {"
        yield "  local node=0 host there"
        yield "  while read -r host <&3; do"
        remote = " ".join(self.word(word) for word in self.dialect.remote)
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

    def _exports(self, variables: dict[str, str]) -> Iterator[str]:
        for name, value in variables.items():
            assert re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), name
            yield f"export {name}={self.word(value)}"

    def word(self, text: str, *, names: tuple[str, ...] = _NAMES) -> str:
        """Return `text` as one word of the script, in which only our own variables are replaced."""
        return shell.quoted(text, names, line=True)


def _container_lines(container: Container) -> Iterator[str]:
    """Yield lines of a node's script that set the image's ID and the words `groups` and `cgroup`.

    A container of the name that `$name` has, which nothing else on the node bears, is removed.
    """
    program, (template, fits, words) = container.program, container.cgroup
    yield f"{IMAGE_VARIABLE}=\"$({program} image inspect --format '{{{{.Id}}}}' {container.image})\""
    yield f"export {IMAGE_VARIABLE}"
    yield "groups=() cgroup=()"
    yield f'{program} rm --force "$name" > /dev/null 2>&1 || true'
    if container.groups_of:
        # Their numbers are those of this node, which need not be those of another.
        add = 'groups+=(--group-add "$(stat --format=%g "$file")")'
        yield f"for file in {' '.join(container.groups_of)}; do [[ ! -e $file ]] || {add}; done"
    # The group of Slurm's step, in either version of the kernel's interface, without the task's own part.
    job = r"s/^[^:]*:\(memory\|\):\(.*\/job_.*\)\/[^/]*$/\2/p"
    yield f"parent=$(sed -n '{job}' /proc/self/cgroup | tail -n 1)"
    yield f"[[ -z $parent || $({program} info --format '{template}') != {fits} ]] || cgroup=({words})"
