"""The script of a job: written from a task alone, the same on every node, no longer for more of them.

Its words and lines are a shell's, in which nothing is replaced but variables that we name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinrun.execution.engine import Container, NodeCommand, stop_file
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import LocalProcess
from twinrun.manifests.cluster import LoadedSite
from twinrun.protocol.allocation import IMAGE_VARIABLE

# Variables of a scheduler's script for what is known only where a command starts.
FIRST_NODE, NODE, RANK, LOCAL_RANK, PORT = (
    f"TWINRUN_{name}" for name in ("FIRST_NODE", "NODE", "RANK", "LOCAL_RANK", "PORT")
)
# The shell variable that stands for the run folder, and the folder of a workspace to render with.
RUN = "$RUN"
RUN_FOLDER = Path(RUN)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
STATUS_FILE, LOG = "status", "launcher.log"
# Exit status of a job whose set-up line failed, and of `set_up` in its script.
SET_UP_FAILED = 97
# Exit status of a node that cannot resolve the name of the first.
NAME_UNKNOWN = 96
HOSTS = "TWINRUN_HOSTS"
# Left to the shell, in every word of the script; the plan has no other way to reach it.
_NAMES = ("RUN", HOSTS, FIRST_NODE, NODE, RANK, LOCAL_RANK, PORT)
# Ports of a job: below those that kernels hand out, and different for jobs with numbers near each other.
_FIRST_PORT, _PORTS = 10_000, 20_000
# Starts a command on this machine with its output in a file, as the engine does it that rendered it.
Start = Callable[[NodeCommand, Path], LocalProcess]


class Task(Frozen):
    """What is started for one point."""

    point: str
    nodes: int
    ranks_per_node: int
    cores_per_rank: int = 1
    commands: tuple[NodeCommand, ...]
    """One for each of `node_names`, or the one that `starter` starts for every rank."""
    starter: tuple[str, ...] = ()
    """Words of the launcher before a command; empty where each node starts its own."""
    identity: tuple[str, str] | None = None
    """Variables in which the starter tells each process its rank, and its rank on its node."""

    @property
    def job_name(self) -> str:
        """Return the name of a job, in which no scheduler finds a letter that it refuses."""
        return f"twinrun-{re.sub(r'[^A-Za-z0-9_.=@-]', '_', self.point)[:60]}"


class Dialect:
    """What one scheduler's scripts say in its own words."""

    site: LoadedSite
    first_node, port = f"${FIRST_NODE}", f"${PORT}"
    """Variables of a script with the first node, and with a port of the job's own."""
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

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return one variable: all nodes start the same command."""
        return (f"${NODE}",)

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
    run: str
    logs: str
    dialect: Dialect

    def text(self) -> str:
        """Return the whole script."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        # A login shell, which alone knows `module`, where something of the site is to be set up.
        yield "#!/bin/bash -l" if self.dialect.site.site.modules else "#!/bin/bash"
        yield from (f"{self.dialect.prefix} {option}" for option in self.dialect.options(self.task))
        yield "set -euo pipefail"
        if self.run != "$RUN":
            yield f"RUN={word(self.run, names=())}"
        stale = [f"{self.logs}/{STATUS_FILE}"]
        if self.dialect.site.site.requeue:
            stale.append(str(stop_file(Path(self.run), self.task.point)))
        yield f"rm --force {' '.join(map(word, stale))}"
        yield f'leave() {{ echo "$1" > {word(f"{self.logs}/{STATUS_FILE}")}; exit "$1"; }}'
        yield f"{FIRST_NODE}=$({self.dialect.hosts} | sed -n 1p)"
        yield f"{PORT}=$(({_FIRST_PORT} + {self.dialect.number} % {_PORTS}))"
        yield f"export RUN {FIRST_NODE} {PORT}"
        if self.dialect.site.site.infiniband:
            yield "ulimit -l unlimited || true"
        if not self.dialect.remote:
            yield from self.set_up()
        yield from ("start() {", *(f"  {line}" for line in self.body()), "}")
        # The scheduler may tell this shell to end as well; with a handler it waits until its ranks have.
        yield "trap : TERM"
        *before, start = self._begin()
        yield from before
        yield f"status=0; {start} || status=$?"
        if self.dialect.site.site.requeue and self.dialect.again:
            yield f"if [[ -e {word(stale[-1])} ]]; then {self.dialect.again}; fi"
        yield 'leave "$status"'

    def set_up(self) -> Iterator[str]:
        """Yield what loads the modules and runs the user's lines; the first that fails ends the job."""
        one = self.dialect.site.site
        lines = [*(f"module load {name}" for name in one.modules), *one.setup]
        if lines:
            failed = f'{{ echo "twinrun: this set-up line failed: $1" >&2; leave {SET_UP_FAILED}; }}'
            # Modules of many sites read variables that are not set.
            yield f'set_up() {{ set +eu; eval "$1" || {failed}; set -eu; }}'
        yield from (f"set_up {word(line, names=())}" for line in lines)

    def body(self) -> Iterator[str]:
        """Yield what runs once on every node, or once for every rank."""
        task, (command,) = self.task, self.task.commands
        if task.identity is None:
            yield f'export {NODE}="{self.dialect.node}"'
        else:
            rank, local_rank = task.identity
            yield f'export {RANK}="${rank}" {LOCAL_RANK}="${local_rank}"'
            yield f'export {NODE}="$(({RANK} / {task.ranks_per_node}))"'
            inside = f"/node-${NODE}" if task.nodes > 1 else ""
            folder = word(f"{self.logs}{inside}/${LOCAL_RANK}")
            yield f"mkdir -p {folder}"
            yield f"exec > {folder}/stdout.log 2> {folder}/stderr.log"
        yield f"cd {word(str(command.folder))}"
        if task.nodes > 1:
            # Ranks would wait for a peer that they cannot name until they give up, minutes later.
            unknown = f'echo "twinrun: $HOSTNAME does not know the name ${FIRST_NODE}" >&2'
            yield f'getent ahosts "${FIRST_NODE}" > /dev/null || {{ {unknown}; exit {NAME_UNKNOWN}; }}'
        interfaces = ",".join(self.dialect.site.site.interfaces)
        chosen = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interfaces) if interfaces else {}
        yield from self._exports({**(chosen if task.nodes > 1 else {}), **command.variables})
        words = [word(one) for one in command.arguments]
        held = ""
        if command.container:
            place = NODE if task.identity is None else RANK
            yield f'name=twinrun-"${PORT}"-"${place}"'
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
            lines.append(f"{HOSTS}={word(f'{self.logs}/hosts')}")
            slots = f" | sed 's/$/ slots={task.ranks_per_node}/'" if starter else ""
            lines.append(f'{self.dialect.hosts}{slots} > "${HOSTS}"')
        lines += self._exports(command.srun_variables)
        if not starter:
            return [*lines, *self._loop()]
        words = " ".join(word(one) for one in (*starter, *command.srun_options))
        return [*lines, f'{words} bash -euc "$(declare -f start); start"']

    def _loop(self) -> Iterator[str]:
        """Yield what starts the nodes' commands one by one, and ends all when one fails."""
        file = word(f"{self.logs}/start.sh")
        output = f"{word(self.logs)}/launcher-$node.log"
        yield "{"
        yield f'  declare -p RUN {FIRST_NODE} {PORT} | sed "s/^declare -x/export/"'
        yield "  echo 'leave() { exit \"$1\"; }'"
        yield from (f"  printf '%s\\n' {word(line, names=())}" for line in self.set_up())
        yield "  declare -f start; echo 'node=$1; start'"
        yield f"}} > {file}"
        yield "everywhere() {"
        yield "  local node=0 host there"
        yield "  while read -r host <&3; do"
        remote = " ".join(map(word, self.dialect.remote))
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
            yield f"export {name}={word(value)}"


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


def word(text: str, *, names: Sequence[str] = _NAMES) -> str:
    """Return `text` as one word of bash on one line; each `$NAME` of `names` in it is left to the shell.

    Raises:
        InputError: a NUL, which no argument has, or what is no Unicode.
    """
    if "\0" in text or (not text.isprintable() and text.encode(errors="replace").decode() != text):
        message, found = "no argument has a NUL, or what is no Unicode", ascii(text)[:80]
        raise InputError(message, place="script", found=found)
    pattern = "|".join(rf"\${re.escape(name)}(?![A-Za-z0-9_])" for name in names)
    parts = enumerate(re.split(f"({pattern})", text) if names else [text])
    return "".join(f'"{part}"' if number % 2 else _quoted(part) for number, part in parts if part) or "''"


def _quoted(part: str) -> str:
    """Return a part of a word in which nothing is replaced, and nothing begins a line."""
    if not _CONTROL.search(part):
        return shlex.quote(part)
    escaped = part.replace("\\", "\\\\").replace("'", "\\'")
    octal = _CONTROL.sub(lambda one: "".join(f"\\{byte:03o}" for byte in one[0].encode()), escaped)
    return f"$'{octal}'"
