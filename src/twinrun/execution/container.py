"""A container without privileges as data, and how Docker's and Podman's command line spell it.

A container ends with who started it. Its first process runs beside a reader of standard input, which whoever
starts it holds open: once a line has come, the end of the input ends all processes. So nothing outlives a
client that was killed, whether a scheduler did it or the machine ran out of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.allocation import IMAGE_VARIABLE

# Ranks exchange batches and gradients through shared memory; the default of 64 MB ends in a bus error.
SHARED_MEMORY = "16g"
# Compiled kernels are loaded from there.
TEMPORARY_FOLDER, TEMPORARY_SIZE = "/tmp", "8g"  # noqa: S108
WORKING_FOLDER = "/twinrun/project"
# Every container of ours carries this label, which tells it from others on the machine.
LABEL = "dev.twinrun.container"
# The line that comes first says for how many seconds processes that are told to end are waited for.
GUARD = (
    "exec 3<&0 </dev/null; { read -r seconds <&3 && { while read -r _ <&3; do :; done; "
    'kill -TERM -1; sleep "$seconds"; kill -KILL -1; }; } 2>/dev/null & exec 3<&-; exec python3 "$@"'
)


class Program(NamedTuple):
    """A program that runs containers, with what is its own."""

    name: str
    cgroup_if: tuple[str, str]
    """What its `info` says, by a template, where a container can be put into the group of its job."""
    cgroup: str
    """Words that do it; `$parent` is the job's group."""
    rootless: str
    """Template of `info` whose answer has the word `rootless` or `true` where root inside is the caller."""
    gpus: bool
    """Whether `--gpus` asks for a driver's devices; else each has a name (container device interface)."""


DOCKER = Program(
    name="docker",
    cgroup_if=("{{.CgroupDriver}}", "cgroupfs"),
    cgroup='--cgroup-parent "$parent"',
    rootless="{{json .SecurityOptions}}",
    gpus=True,
)
PODMAN = Program(
    name="podman",
    cgroup_if=("{{.Host.OCIRuntime.Name}}", "crun"),
    cgroup="--cgroups=disabled",
    rootless="{{.Host.Security.Rootless}}",
    gpus=False,
)


class Mount(Frozen):
    """A folder of the host that the container sees."""

    host: str
    inside: str
    mode: Literal["ro", "rw"]


class Container(Frozen):
    """A container that runs one command under the image's interpreter."""

    program: str = "docker"
    image: str
    arguments: tuple[str, ...]
    """After the interpreter."""
    variables: dict[str, str]
    user: str
    """Numbers of user and group."""
    mounts: tuple[Mount, ...]
    host: str | None
    """Name of the machine for a container without a network; null for one with the host's."""
    devices: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    groups_of: tuple[str, ...] = ()
    """Patterns of files whose groups a script on the node adds: it alone knows their numbers."""
    locks_memory: bool = False
    """Whether it may lock memory without limit, as adapters with direct access to memory need."""
    accelerators: tuple[str, ...] = ()
    """Words that ask for a driver's devices."""
    passed: tuple[str, ...] = ()
    """Variables that it is given as the caller has them; their values, which may be secret, stand nowhere."""

    def run_arguments(self) -> tuple[str, ...]:
        """Return the `run` of this container."""
        guard = ("-c", GUARD, "twinrun")
        return (self.program, "run", "--rm", *self._options(), self.image, *guard, *self.arguments)

    def node_lines(self) -> Iterator[str]:
        """Yield lines of a node's script that set the image's ID and the words `groups` and `cgroup`.

        A container of the name that `$name` has, which nothing else on the node bears, is removed.
        """
        yield f"{IMAGE_VARIABLE}=\"$({self.program} image inspect --format '{{{{.Id}}}}' {self.image})\""
        yield f"export {IMAGE_VARIABLE}"
        yield "groups=() cgroup=()"
        yield f'{self.program} rm --force "$name" > /dev/null 2>&1 || true'
        if self.groups_of:
            # Their numbers are those of this node, which need not be those of another.
            add = 'groups+=(--group-add "$(stat --format=%g "$file")")'
            yield f"for file in {' '.join(self.groups_of)}; do [[ ! -e $file ]] || {add}; done"
        # The group of Slurm's step, in either version of the kernel's interface, without the task's own part.
        job = r"s/^[^:]*:\(memory\|\):\(.*\/job_.*\)\/[^/]*$/\2/p"
        (template, fits), words = PROGRAMS[self.program].cgroup_if, PROGRAMS[self.program].cgroup
        asked = f"$({self.program} info --format '{template}')"
        yield f"parent=$(sed -n '{job}' /proc/self/cgroup | tail -n 1)"
        yield f"[[ -z $parent || {asked} != {fits} ]] || cgroup=({words})"

    def _options(self) -> Iterator[str]:
        yield from ("--interactive", "--init", "--read-only", "--cap-drop", "ALL")
        yield from ("--security-opt", "no-new-privileges", "--user", self.user, "--shm-size", SHARED_MEMORY)
        yield from ("--label", f"{LABEL}=run", "--tmpfs", f"{TEMPORARY_FOLDER}:rw,exec,size={TEMPORARY_SIZE}")
        if self.host:
            yield from ("--network", "none", "--hostname", self.host, "--add-host", f"{self.host}:127.0.0.1")
        else:
            # Without a value: the node's own, which only its script knows.
            yield from ("--network", "host", "--env", IMAGE_VARIABLE)
        for mount in self.mounts:
            yield from ("--volume", f"{mount.host}:{mount.inside}:{mount.mode}")
        for path in self.devices:
            yield from ("--device", f"{path}:{path}:rwm")
        if self.locks_memory:
            yield from ("--ulimit", "memlock=-1:-1")
        for group in self.groups:
            yield from ("--group-add", str(group))
        yield from self.accelerators
        for name, value in self.variables.items():
            yield from ("--env", f"{name}={value}")
        for name in self.passed:
            yield from ("--env", name)
        yield from ("--workdir", WORKING_FOLDER, "--entrypoint", "/bin/sh")


PROGRAMS = {one.name: one for one in (DOCKER, PODMAN)}
