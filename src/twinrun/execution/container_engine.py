"""The engine of containers: each command is a container of its own, started by Docker or Podman."""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinrun.execution.container import (
    DOCKER,
    LABEL,
    PODMAN,
    SHARED_MEMORY,
    TEMPORARY_SIZE,
    WORKING_FOLDER,
    Container,
    Program,
)
from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Say, Workspace
from twinrun.execution.shell import FIRST_NODE
from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.foundation.processes import GRACE_SECONDS, LocalProcess, end_of, last_lines, read_output
from twinrun.manifests.cluster import Bind
from twinrun.manifests.image_identity import image_configuration
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor
from twinrun.protocol.allocation import IMAGE_VARIABLE

# Adapters whose own protocol a process speaks to past the kernel.
_INFINIBAND = ("/dev/infiniband",)
# With which both programs say that they could start nothing.
_REFUSED = (125, 126, 127)
_ANSWER_SECONDS = 30
_VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "1",
    # The user's number has no entry in the image's passwd file.
    "HOME": "/tmp",  # noqa: S108
    "USER": "twinrun",
}


class ContainerRenderer:
    """Writes each command as a container of its own, without privileges."""

    image_digest: str | None = None

    def __init__(
        self,
        *,
        image: str,
        vendor: Vendor,
        workspace: Workspace,
        program: Program = DOCKER,
        rootless: bool = False,
        own: bool = False,
    ) -> None:
        """Take an image and the folders of its containers.

        Args:
            rootless: root in them is the caller.
            own: the image is the user's, and starts another program than its interpreter.
        """
        self._entry = ("--entrypoint", PYTHON) if own else ()
        self._program, self._image, self._vendor, self._workspace = program, image, vendor, workspace
        self._user = "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"
        self._mounts = {
            workspace.run: "/twinrun/run",
            workspace.data: "/twinrun/data",
            workspace.root: WORKING_FOLDER,
            **({workspace.recipe: "/twinrun/recipe"} if workspace.recipe else {}),
            **({workspace.source: "/twinrun/source"} if workspace.source else {}),
            **({workspace.place: "/twinrun/checkpoints"} if workspace.place else {}),
        }

    def inside(self, path: Path) -> str:
        """Return where `path`, in one of the workspace's folders, is mounted."""
        for host, mounted in self._mounts.items():
            if path.is_relative_to(host):
                return str(Path(mounted) / path.relative_to(host))
        raise AssertionError(f"{path} is not mounted")

    def render(self, command: Command) -> NodeCommand:
        """Return the `run` of `command`; never `--privileged`.

        Who runs in it is the caller, root too: without capabilities it may do what an owner of files may.
        """
        assert command.arguments[0] == PYTHON
        access, nodes = self._vendor.container, self._workspace.nodes
        names = {name for group in self._vendor.hidden_by for name in group} & os.environ.keys()
        variables = {
            **_VARIABLES,
            "PYTHONPATH": ":".join(self.inside(folder) for folder in self._workspace.search_path),
            # All devices are given to it, those too that the caller's variables hide.
            **{name: os.environ[name] for name in sorted(names)},
            **command.variables,
        }
        mounts = tuple(self._volumes(command))
        found = Container(
            program=self._program.name,
            image=self._image,
            options=tuple(self._options(command, variables, mounts)),
            arguments=command.arguments[1:],
            variables=variables,
            mounts=mounts,
            groups_of=access.groups_of if nodes else (),
        )
        words, root = found.run_arguments(), self._workspace.root
        return NodeCommand(arguments=words, variables={}, folder=root, container=found)

    def _volumes(self, command: Command) -> Iterator[Bind]:
        writable = self._workspace.writable(data=command.writes_data)
        for host, inside in self._mounts.items():
            yield Bind(host=str(host), inside=inside, mode="rw" if host in writable else "ro")
        yield from self._workspace.nodes.bound if self._workspace.nodes else ()

    def _options(
        self, command: Command, variables: Mapping[str, str], mounts: Sequence[Bind]
    ) -> Iterator[str]:
        access, nodes = self._vendor.container, self._workspace.nodes
        fabric = bool(nodes and nodes.infiniband)
        yield from self._entry
        yield from ("--rm", "--interactive", "--init", "--read-only", "--cap-drop", "ALL")
        yield from ("--security-opt", "no-new-privileges", "--user", self._user, "--shm-size", SHARED_MEMORY)
        yield from ("--label", f"{LABEL}=run", "--tmpfs", f"/tmp:rw,exec,size={TEMPORARY_SIZE}")  # noqa: S108
        if command.reaches_nodes:
            # Without a value: the node's own, which only its script knows.
            yield from ("--network", "host", "--env", IMAGE_VARIABLE)
        else:
            host = self._host()
            yield from ("--network", "none", "--hostname", host, "--add-host", f"{host}:127.0.0.1")
        for mount in mounts:
            yield from ("--volume", f"{mount.host}:{mount.inside}:{mount.mode}")
        for path in (*access.devices, *(_INFINIBAND if fabric else ())):
            yield from ("--device", f"{path}:{path}:rwm")
        if fabric:
            # Adapters with direct access to memory need it locked.
            yield from ("--ulimit", "memlock=-1:-1")
        for group in nodes.groups if nodes else _groups(self._vendor):
            yield from ("--group-add", str(group))
        if access.driver and self._program.gpus:
            # The command line is split at commas, and a list inside it is quoted; it adds `gpu` by itself.
            asked = ",".join(name for name in access.capabilities if name != "gpu")
            yield from ("--gpus", f'driver={access.driver},count=all,"capabilities={asked}"')
        elif access.driver:
            yield from ("--device", f"{access.resource}=all")
        for name, value in variables.items():
            yield from ("--env", f"{name}={value}")
        yield from ("--workdir", WORKING_FOLDER, "--entrypoint", "/bin/sh")

    def _host(self) -> str:
        """Return the name of the machine that runs the container; a site's script alone knows its node's."""
        return f"${FIRST_NODE}" if self._workspace.nodes else platform.node() or "localhost"


class ContainerEngine(ContainerRenderer):
    """Starts on this machine what it renders."""

    def __init__(self, *, program: Program = DOCKER, image: str, **more: Any) -> None:
        rootless = any(
            word in ask(program, "info", "--format", program.rootless) for word in ("rootless", "true")
        )
        super().__init__(image=image, program=program, rootless=rootless, **more)
        self.image_digest = image_id(program, image)

    def changed_files(self, *, whole: bool = False) -> dict[str, str]:
        """Return nothing: the image's ID is the digest of its files."""
        return {}

    def start(self, command: NodeCommand, *, log: Path) -> RunningContainer:
        """Start `command` in a new container, whose output comes into `log` as it is printed."""
        return RunningContainer(self._program, command, log)

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""
        rendered = self.render(command)
        return read_output(rendered.arguments, variables={}, folder=rendered.folder)


class RunningContainer:
    """A started container; nothing of it outlives `stop`, nor this process by more than the time of grace."""

    def __init__(self, program: Program, command: NodeCommand, log: Path) -> None:
        self._program, self._log = program, log
        self._name = f"twinrun-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        run, *options = command.arguments[1:]
        reader, self._held = os.pipe()
        try:
            os.write(self._held, b"%d\n" % GRACE_SECONDS)
            words = (program.name, run, "--name", self._name, *options)
            variables = command.variables
            self._process = LocalProcess(
                words, variables=variables, folder=command.folder, log=log, stdin=reader
            )
        finally:
            os.close(reader)

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs; raises MachineError where nothing was started."""
        if (status := self._process.poll()) in _REFUSED:
            message, found = "cannot run a container of this image", last_lines(end_of(self._log), 4)
            place, hint = f"--engine {self._program.name}", "see the daemon's log"
            raise MachineError(f"{self._program.name} {message}", place=place, found=found, hint=hint)
        return status

    def stop(self) -> None:
        """End the container, politely first, and remove it."""
        try:
            self._process.stop()
        finally:
            if self._held >= 0:
                os.close(self._held)
                self._held = -1
            words = [self._program.name, "rm", "--force", self._name]
            subprocess.run(words, capture_output=True, check=False)


@dataclass(frozen=True)
class ContainerKind:
    """The engine that `program` is: a stack's image, each command a container."""

    program: Program
    RUNS_IMAGES = True
    ADDS_GROUPS = True

    def unusable(self, *, stack: LoadedStack, vendor: Vendor) -> str | None:
        """Return why no container of `stack` can be started here, or None."""
        try:
            image = _find(self.program, stack)
        except MachineError as error:
            return error.message
        return stack.wrong_image(image_id(self.program, image)) if image else f"no image {stack.image()}"

    def renderer(self, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> ContainerRenderer:
        """Return what writes the commands of a daemon that runs as root."""
        image, program, own = stack.image(), self.program, stack.own_image is not None
        return ContainerRenderer(image=image, vendor=vendor, workspace=workspace, program=program, own=own)

    def open_engine(self, *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Say) -> Engine:
        """Return the engine for the image of the stack's lock.

        Raises:
            MachineError: no engine answers, or it does not have the image.
        """
        place, build = f"--engine {self.program.name}", f"`invoke build --stack {stack.stack.name}`"
        image = _find(self.program, stack)
        if image is None:
            hint, message = f"{build} makes it; or use --engine venv", "the image is not on this machine"
            raise MachineError(message, place=place, found=stack.image(), hint=hint)
        if wrong := stack.wrong_image(image_id(self.program, image)):
            message = "the image under this tag is not the one of the locks"
            hint = f"remove it, and {build} makes the right one"
            raise MachineError(message, place=place, found=wrong, hint=hint)
        own = stack.own_image is not None
        return ContainerEngine(image=image, vendor=vendor, workspace=workspace, program=self.program, own=own)


def ask(program: Program, *arguments: str) -> str:
    """Return what the program answers; raises RunError in its words, MachineError without an answer."""
    name = program.name
    if shutil.which(name) is None:
        raise MachineError(f"{name} is not installed", hint="or use --engine venv")
    try:
        return read_output((name, *arguments), variables={}, folder=Path("/"), seconds=_ANSWER_SECONDS)
    except RunError as error:
        found = str(error.found or error.message)
        if "o such" in found or not re.search("daemon|permission|timed out", found):
            raise
        hint = "start it, point DOCKER_HOST at it, or join the group of its socket; or use --engine venv"
        place = os.environ.get("DOCKER_HOST")
        raise MachineError(
            f"the {name} daemon does not answer", place=place, found=found, hint=hint
        ) from None


def image_id(program: Program, image: str) -> str:
    """Return the checksum of an image's configuration, which is its ID in every engine but one.

    Docker with the image store of containerd calls an image by its manifest, which changes with the
    compression of the layers. There the configuration is composed again of all values that the engine tells.
    """
    (found,) = json.loads(ask(program, "image", "inspect", image))
    if program is PODMAN or "io.containerd" not in ask(program, "info", "--format", "{{json .DriverStatus}}"):
        return f"sha256:{str(found['Id']).removeprefix('sha256:')}"
    lines = ask(program, "history", "--no-trunc", "--format", "{{json .}}", image).splitlines()
    configuration = image_configuration(
        platform=f"{found['Os']}/{found['Architecture']}",
        created=found["Created"],
        config={name: value for name, value in found["Config"].items() if value},
        history=[(_utc(one["CreatedAt"]), one["CreatedBy"]) for one in map(json.loads, reversed(lines))],
        diff_ids=found["RootFS"]["Layers"],
    )
    return f"sha256:{sha256_of_bytes(configuration)}"


def _utc(time: str) -> str:
    return datetime.datetime.fromisoformat(time).astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _find(program: Program, stack: LoadedStack) -> str | None:
    """Return the image under the stack's tag, else the one with its ID: pulled by digest it has no tag."""
    words = ("images", "--no-trunc", "--quiet", "--filter")
    tagged = ask(program, *words, f"reference={stack.image()}").split()
    known = stack.known_ids()
    others = [] if tagged or not known else ask(program, *words, f"label={stack.inputs_label()}").split()
    return stack.image() if tagged else next((one for one in others if image_id(program, one) in known), None)


def _groups(vendor: Vendor) -> tuple[int, ...]:
    """Return the groups of this machine whose members may use the vendor's devices."""
    files = [Path(path) for pattern in vendor.container.groups_of for path in glob.glob(pattern)]  # noqa: PTH207
    return tuple(sorted({path.stat().st_gid for path in files}))
