"""A container without privileges as data, and how Docker's and Podman's command line spell it.

A container ends with who started it. Its first process runs beside a reader of standard input, which whoever
starts it holds open: once a line has come, the end of the input ends all processes. So nothing outlives a
client that was killed, whether a scheduler did it or the machine ran out of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from twinrun.foundation.manifest import Frozen
from twinrun.manifests.cluster import Bind
from twinrun.protocol.allocation import IMAGE_VARIABLE

# Ranks exchange batches and gradients through shared memory; the default of 64 MB ends in a bus error.
SHARED_MEMORY = "16g"
# Compiled kernels are loaded from /tmp.
TEMPORARY_SIZE = "8g"
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


_CGROUP = "{{.CgroupDriver}}", "cgroupfs"
DOCKER = Program("docker", _CGROUP, '--cgroup-parent "$parent"', "{{json .SecurityOptions}}", gpus=True)
_RUNTIME = "{{.Host.OCIRuntime.Name}}", "crun"
PODMAN = Program("podman", _RUNTIME, "--cgroups=disabled", "{{.Host.Security.Rootless}}", gpus=False)


class Container(Frozen):
    """A container that runs one command under the image's interpreter."""

    program: str
    image: str
    options: tuple[str, ...]
    """All that its `run` is told before the image."""
    arguments: tuple[str, ...]
    """After the interpreter."""
    variables: dict[str, str]
    mounts: tuple[Bind, ...]
    groups_of: tuple[str, ...] = ()
    """Patterns of files whose groups a script on the node adds: it alone knows their numbers."""

    def run_arguments(self) -> tuple[str, ...]:
        """Return the `run` of this container."""
        guard = ("-c", GUARD, "twinrun")
        return (self.program, "run", *self.options, self.image, *guard, *self.arguments)

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


PROGRAMS = {one.name: one for one in (DOCKER, PODMAN)}
