"""Docker and Podman: each command is a container of its own, without privileges, by the command line.

A container ends with who started it. Its first process runs beside a reader of standard input, which whoever
starts it holds open: once a line has come, the end of the input ends all processes. So nothing outlives a
client that was killed, whether a scheduler did it or the machine ran out of memory.
"""

from __future__ import annotations

import datetime
import glob
import json
import os
import platform
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

from twinrun.execution.engine import PYTHON, Command, Container, Engine, NodeCommand, Say, Workspace
from twinrun.execution.job_script import FIRST_NODE
from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.processes import GRACE_SECONDS, LocalProcess, read_output
from twinrun.manifests.image_identity import image_configuration
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor
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
# Adapters whose own protocol a process speaks to past the kernel.
_INFINIBAND = ("/dev/infiniband",)
_ANSWER_SECONDS = 30
_VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "1",
    # The user's number has no entry in the image's passwd file.
    "HOME": "/tmp",  # noqa: S108
    "USER": "twinrun",
}


class ContainerEngine(Engine):
    """A stack's image, each command a container of its own."""

    RUNS_IMAGES = ADDS_GROUPS = True
    program: ClassVar[str]
    cgroup: ClassVar[tuple[str, str, str]]
    """See `Container`."""
    rootless: ClassVar[str]
    """Template of `info` whose answer has the word `rootless` or `true` where root inside is the caller."""
    gpus = False
    """Whether `--gpus` asks for a driver's devices; else each has a name (container device interface)."""

    def __init__(self, *, image: str, vendor: Vendor, workspace: Workspace) -> None:
        """Take an image and the folders of its containers; they are a daemon's that runs as root."""
        self._image, self._vendor, self._workspace = image, vendor, workspace
        self._user = f"{os.getuid()}:{os.getgid()}"

    @classmethod
    def unusable(cls, *, stack: LoadedStack, vendor: Vendor) -> str | None:
        """Return why no container of `stack` can be started here, or None."""
        try:
            cls._found(stack)
        except MachineError as error:
            return error.message
        return None

    @classmethod
    def renderer(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> Self:
        """Return what writes the commands of a daemon that runs as root."""
        return cls(image=stack.image(), vendor=vendor, workspace=workspace)

    @classmethod
    def open_engine(cls, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Say) -> Self:
        """Return the engine for the image of the stack's lock.

        Raises:
            MachineError: no engine answers, or it does not have the image.
        """
        return cls(image=cls._found(stack), vendor=vendor, workspace=workspace).opened()

    def opened(self) -> Self:
        """Return the engine, which knows now who runs in its containers, and the image's ID."""
        told = self.ask("info", "--format", self.rootless)
        # Root in them is the caller.
        self._user = "0:0" if "rootless" in told or "true" in told else self._user
        self.image_digest = self.image_id(self._image)
        return self

    def inside(self, path: Path) -> str:
        """Return where `path`, in one of the workspace's folders, is mounted."""
        fitting = [one for one in self._workspace.folders.items() if path.is_relative_to(one[1])]
        # The inner of two folders.
        name, host = max(fitting, key=lambda one: len(one[1].parts))
        return str(Path("/twinrun", name) / path.relative_to(host))

    def render(self, command: Command) -> NodeCommand:
        """Return the `run` of `command`; never `--privileged`.

        Who runs in it is the caller, root too: without capabilities it may do what an owner of files may.
        """
        assert command.arguments[0] == PYTHON
        nodes, workspace = self._workspace.nodes, self._workspace
        names = {name for group in self._vendor.hidden_by for name in group} & os.environ.keys()
        variables = {
            **_VARIABLES,
            "PYTHONPATH": ":".join(map(self.inside, workspace.search_path)),
            # All devices are given to it, those too that the caller's variables hide.
            **{name: os.environ[name] for name in sorted(names)},
            **command.variables,
        }
        found = Container(
            program=self.program,
            image=self._image,
            arguments=command.arguments[1:],
            variables=variables,
            mounts=workspace.binds(self.inside, data=command.writes_data),
            groups_of=self._vendor.container.groups_of if nodes else (),
            cgroup=self.cgroup,
        )
        guard = (self._image, "-c", GUARD, "twinrun", *found.arguments)
        words = (found.program, "run", *self._options(command, found), *guard)
        return NodeCommand(arguments=words, variables={}, folder=workspace.root, container=found)

    def _options(self, command: Command, container: Container) -> Iterator[str]:
        access, nodes = self._vendor.container, self._workspace.nodes
        fabric = bool(nodes and nodes.infiniband)
        yield from ("--rm", "--interactive", "--init", "--read-only", "--cap-drop", "ALL")
        yield from ("--security-opt", "no-new-privileges", "--user", self._user, "--shm-size", SHARED_MEMORY)
        yield from ("--label", f"{LABEL}=run", "--tmpfs", f"/tmp:rw,exec,size={TEMPORARY_SIZE}")  # noqa: S108
        if command.reaches_nodes:
            # Without a value: the node's own, which only its script knows.
            yield from ("--network", "host", "--env", IMAGE_VARIABLE)
        else:
            # The name of the machine that runs it; a site's script alone knows its node's.
            host = f"${FIRST_NODE}" if nodes else platform.node() or "localhost"
            yield from ("--network", "none", "--hostname", host, "--add-host", f"{host}:127.0.0.1")
        for mount in container.mounts:
            yield from ("--volume", f"{mount.host}:{mount.inside}:{mount.mode}")
        for path in (*access.devices, *(_INFINIBAND if fabric else ())):
            yield from ("--device", f"{path}:{path}:rwm")
        if fabric:
            # Adapters with direct access to memory need it locked.
            yield from ("--ulimit", "memlock=-1:-1")
        for group in nodes.groups if nodes else _groups(self._vendor):
            yield from ("--group-add", str(group))
        if access.driver and self.gpus:
            # The command line is split at commas, and a list inside it is quoted; it adds `gpu` by itself.
            asked = ",".join(name for name in access.capabilities if name != "gpu")
            yield from ("--gpus", f'driver={access.driver},count=all,"capabilities={asked}"')
        elif access.driver:
            yield from ("--device", f"{access.resource}=all")
        for name, value in container.variables.items():
            yield from ("--env", f"{name}={value}")
        yield from ("--workdir", WORKING_FOLDER, "--entrypoint", "/bin/sh")

    def start(self, command: NodeCommand, log: Path) -> RunningContainer:
        """Start `command` in a new container, whose output comes into `log` as it is printed."""
        return RunningContainer(command, log)

    @classmethod
    def ask(cls, *arguments: str) -> str:
        """Return what the program answers; raises RunError in its words, MachineError without an answer."""
        name = cls.program
        if shutil.which(name) is None:
            raise MachineError(f"{name} is not installed", hint="install it, or use --engine venv")
        try:
            return read_output((name, *arguments), variables={}, folder=Path("/"), seconds=_ANSWER_SECONDS)
        except RunError as error:
            found = str(error.found or error.message)
            if "o such" in found or not re.search("daemon|permission|timed out", found):
                raise
            hint = "start it, point DOCKER_HOST at it, or join the group of its socket; or use --engine venv"
            place, message = os.environ.get("DOCKER_HOST"), f"the {name} daemon does not answer"
            raise MachineError(message, place=place, found=found, hint=hint) from None

    @classmethod
    def image_id(cls, image: str) -> str:
        """Return the checksum of an image's configuration, which is its ID in every engine but one.

        Docker with the image store of containerd calls an image by its manifest, which changes with the
        compression of the layers. There the configuration is composed again of all that the engine tells.
        """
        (found,) = json.loads(cls.ask("image", "inspect", image))
        stores = ("info", "--format", "{{json .DriverStatus}}")
        if cls.program == "podman" or "io.containerd" not in cls.ask(*stores):
            return f"sha256:{str(found['Id']).removeprefix('sha256:')}"
        lines = cls.ask("history", "--no-trunc", "--format", "{{json .}}", image).splitlines()
        configuration = image_configuration(
            platform=f"{found['Os']}/{found['Architecture']}",
            created=found["Created"],
            config={name: value for name, value in found["Config"].items() if value},
            history=[(_utc(one["CreatedAt"]), one["CreatedBy"]) for one in map(json.loads, reversed(lines))],
            diff_ids=found["RootFS"]["Layers"],
        )
        return f"sha256:{sha256_of_bytes(configuration)}"

    @classmethod
    def _found(cls, stack: LoadedStack) -> str:
        """Return the image under the stack's tag, else that of its ID: pulled by digest it has no tag."""
        words, known = ("images", "--no-trunc", "--quiet", "--filter"), stack.known_ids()
        place, build = f"--engine {cls.program}", f"`invoke build --stack {stack.stack.name}`"
        image = stack.image()
        if not cls.ask(*words, f"reference={image}").split():
            others = cls.ask(*words, f"label={stack.inputs_label()}").split() if known else []
            image = next((one for one in others if cls.image_id(one) in known), "")
        if not image:
            hint = f"{build} makes it; or use --engine venv"
            raise MachineError(f"no image {stack.image()} on this machine", place=place, hint=hint)
        if wrong := stack.wrong_image(cls.image_id(image)):
            message = "the image under this tag is not the one of the locks"
            hint = f"remove it, and {build} makes the right one"
            raise MachineError(message, place=place, found=wrong, hint=hint)
        return image


class Docker(ContainerEngine):
    """Containers of Docker."""

    program, gpus, rootless = "docker", True, "{{json .SecurityOptions}}"
    cgroup = ("{{.CgroupDriver}}", "cgroupfs", '--cgroup-parent "$parent"')


class Podman(ContainerEngine):
    """Containers of Podman."""

    program, rootless = "podman", "{{.Host.Security.Rootless}}"
    cgroup = ("{{.Host.OCIRuntime.Name}}", "crun", "--cgroups=disabled")


class RunningContainer(LocalProcess):
    """A started container; nothing of it outlives `stop`, nor this process by more than the time of grace."""

    def __init__(self, command: NodeCommand, log: Path) -> None:
        program, run, *options = command.arguments
        name = f"twinrun-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._remove = (program, "rm", "--force", name)
        reader, writer = os.pipe()
        self._held = os.fdopen(writer, "wb", buffering=0)
        with os.fdopen(reader) as given:
            self._held.write(b"%d\n" % GRACE_SECONDS)
            words, self.stdin = (program, run, "--name", name, *options), given.fileno()
            super().__init__(words, variables=command.variables, folder=command.folder, log=log)

    def stop(self) -> None:
        """End the container, politely first, and remove it."""
        try:
            super().stop()
        finally:
            self._held.close()
            subprocess.run(self._remove, capture_output=True, check=False)


def _utc(time: str) -> str:
    return datetime.datetime.fromisoformat(time).astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _groups(vendor: Vendor) -> tuple[int, ...]:
    """Return the groups of this machine whose members may use the vendor's devices."""
    files = [Path(path) for pattern in vendor.container.groups_of for path in glob.glob(pattern)]  # noqa: PTH207
    return tuple(sorted({path.stat().st_gid for path in files}))
