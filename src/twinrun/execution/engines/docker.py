"""A container of the stack's image, without privileges; also through Podman's compatible socket."""

from __future__ import annotations

import contextlib
import glob
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.checkpoints.s3 import VARIABLES
from twinrun.execution.container import Container, Mount
from twinrun.execution.engine import PYTHON, Command, Engine, NodeCommand, Workspace
from twinrun.execution.shell import FIRST_NODE
from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.processes import GRACE_SECONDS, last_lines
from twinrun.machine import daemon
from twinrun.machine.daemon import WORK_SECONDS, daemon_errors, remove_abandoned
from twinrun.manifests.stack import LoadedStack
from twinrun.manifests.vendor import Vendor

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container as DockerContainer

# Who runs in the container of a caller who is root: the user that our images have.
_IMAGE_USER = 1000
# Adapters whose own protocol a process speaks to past the kernel.
_INFINIBAND = ("/dev/infiniband",)

RUNS_IMAGES = True
ADDS_GROUPS = True


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return why no container of `stack` can be started here, or None."""
    if not daemon.expected():
        return "no Docker daemon on this machine"
    if daemon.image_lacks(image=stack.image(), label=stack.inputs_label()):
        return f"no image {stack.image()}"
    try:
        client = daemon.connect()
    except MachineError as error:
        return error.message
    with contextlib.closing(client):
        image = _find(client, stack)
        if image is None:
            return f"no image {stack.image()}"
        if wrong := stack.wrong_image(daemon.image_id(client, image)):
            return wrong
        return daemon.without_devices(client, vendor)


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> ContainerRenderer:
    """Return what writes the commands of a daemon that runs as root."""
    return ContainerRenderer(image=stack.image(), vendor=vendor, workspace=workspace)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Return the engine for the image of the stack's lock.

    Raises:
        MachineError: no daemon answers, it does not have the image, or cannot pass the devices on.
    """
    try:
        client = daemon.connect()
    except MachineError as error:
        hint = f"{error.hint}; or use --engine venv"
        raise MachineError(error.message, place=error.place, found=error.found, hint=hint) from None
    for name in remove_abandoned(client):
        say(f"removed the container {name}, which a killed run had left")
    image = _find(client, stack)
    if image is None:
        client.close()
        command = f"invoke build --vendor {stack.stack.vendor} --stack {stack.stack.name}"
        raise MachineError(
            "the image is not on this machine",
            place="--engine docker",
            found=stack.image(),
            hint=f"`{command}` makes it; or use --engine venv",
        )
    if wrong := stack.wrong_image(daemon.image_id(client, image)):
        client.close()
        raise MachineError(
            "the image under this tag is not the one of the locks",
            place="--engine docker",
            found=wrong,
            hint=f"remove it, and `invoke build --stack {stack.stack.name}` makes the right one",
        )
    if reason := daemon.without_devices(client, vendor):
        client.close()
        raise MachineError(reason, place="--engine docker", hint="use a Docker daemon, or --engine venv")
    return ContainerEngine(client=client, image=image, vendor=vendor, workspace=workspace)


def _find(client: DockerClient, stack: LoadedStack) -> str | None:
    """Return the image under the stack's tag, else the one with its ID: pulled by digest it has no tag."""
    tagged, known = daemon.find_image(client, stack.image()), stack.known_ids()
    others = daemon.labelled_images(client, stack.inputs_label()) if known and not tagged else []
    return tagged or next((one for one in others if daemon.image_id(client, one) in known), None)


class ContainerCommand(NodeCommand):
    """`docker run` with the same as data, for the SDK."""

    container: Container


class ContainerRenderer:
    """Writes each command as a container of its own, without privileges."""

    def __init__(self, *, image: str, vendor: Vendor, workspace: Workspace, rootless: bool = False) -> None:
        """Take an image and the folders of its containers; `rootless`: root in them is the caller."""
        self._image = image
        self._vendor = vendor
        self._workspace = workspace
        self._rootless = rootless
        self._mounts = {
            workspace.run: "/twinrun/run",
            workspace.data: "/twinrun/data",
            workspace.root: "/twinrun/project",
        }
        if workspace.recipe:
            self._mounts[workspace.recipe] = "/twinrun/recipe"
        if workspace.source:
            self._mounts[workspace.source] = "/twinrun/source"

    def inside(self, path: Path) -> str:
        """Return where `path`, in one of the workspace's folders, is mounted."""
        for host, mounted in self._mounts.items():
            if path.is_relative_to(host):
                return str(Path(mounted) / path.relative_to(host))
        raise AssertionError(f"{path} is not mounted")

    def render(self, command: Command) -> ContainerCommand:
        """Return the `docker run` of `command`; never `--privileged`."""
        assert command.arguments[0] == PYTHON
        user, nodes = self._user(command), self._workspace.nodes
        fabric = bool(nodes and nodes.infiniband)
        container = Container(
            image=self._image,
            arguments=command.arguments[1:],
            variables=_VARIABLES
            | {"PYTHONPATH": self._search_path()}
            | self._visibility()
            | command.variables,
            user="{}:{}".format(*user),
            mounts=self._volumes(command),
            host=None if command.reaches_nodes or command.reaches_store else self._host(),
            passed=VARIABLES if command.reaches_store else (),
            devices=(*self._vendor.container.devices, *(_INFINIBAND if fabric else ())),
            locks_memory=fabric,
            groups=nodes.groups if nodes else _groups(self._vendor),
            groups_of=self._vendor.container.groups_of if nodes else (),
            driver=self._vendor.container.driver,
            capabilities=self._vendor.container.capabilities,
            resource=self._vendor.container.resource,
        )
        return ContainerCommand(
            arguments=container.run_arguments(),
            variables={},
            folder=self._workspace.root,
            writer=None if self._rootless or user[0] == os.getuid() else user,
            container=container,
        )

    def _user(self, command: Command) -> tuple[int, int]:
        """Return who runs in the container.

        A caller who is root does so as somebody else, to whom the run folder is handed; a folder that
        runs share is never, so what writes there stays root, without its capabilities.
        """
        if self._rootless:
            return 0, 0
        if os.getuid() or command.writes_data:
            return os.getuid(), os.getgid()
        return _IMAGE_USER, _IMAGE_USER

    def _volumes(self, command: Command) -> tuple[Mount, ...]:
        writable = {self._workspace.run} | ({self._workspace.data} if command.writes_data else set())
        nodes = self._workspace.nodes
        return (
            *(
                Mount(host=str(host), inside=inside, mode="rw" if host in writable else "ro")
                for host, inside in self._mounts.items()
            ),
            *(Mount(**bind.model_dump()) for bind in (nodes.bound if nodes else ())),
        )

    def _host(self) -> str:
        """Return the name of the machine that runs the container; a site's script alone knows its node's."""
        return f"${FIRST_NODE}" if self._workspace.nodes else platform.node() or "localhost"

    def _visibility(self) -> dict[str, str]:
        """Return the caller's variables that hide devices: the container is given all of them."""
        names = (name for group in self._vendor.hidden_by for name in group)
        return {name: os.environ[name] for name in names if name in os.environ}

    def _search_path(self) -> str:
        return ":".join(self.inside(folder) for folder in self._workspace.search_path)


class ContainerEngine(ContainerRenderer):
    """Each command is a container of its own; nothing of it outlives the command."""

    def __init__(self, *, client: DockerClient, image: str, vendor: Vendor, workspace: Workspace) -> None:
        rootless = daemon.is_rootless(client)
        super().__init__(image=image, vendor=vendor, workspace=workspace, rootless=rootless)
        self._client = client
        self.image_digest: str | None = daemon.image_id(client, image)

    def changed_files(self, *, whole: bool = False) -> dict[str, str]:  # noqa: ARG002
        """Return nothing: the image's ID is the digest of its files."""
        return {}

    def start(self, command: NodeCommand, *, log: Path) -> RunningContainer:
        """Start `command` in a new container; its output is in `log` when it has ended.

        Raises:
            MachineError: the daemon refused, for example because it has no driver for the devices.
        """
        assert isinstance(command, ContainerCommand), "the SDK starts what this engine has rendered"
        log.parent.mkdir(parents=True, exist_ok=True)
        self._hand_over(command)
        try:
            container = self._started(command)
        except BaseException:
            self._give_back(command)
            raise
        return RunningContainer(container, log, ended=lambda: self._give_back(command))

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""
        rendered = self.render(command)
        self._hand_over(rendered)
        try:
            return self._output(rendered)
        finally:
            self._give_back(rendered)

    def _output(self, command: ContainerCommand) -> str:
        container = self._started(command)
        with daemon_errors("a container"), contextlib.ExitStack() as stack:
            stack.callback(container.remove, force=True)
            status = container.wait(timeout=WORK_SECONDS)["StatusCode"]
            if status:
                text = container.logs(stdout=False).decode(errors="replace")
                raise RunError("the command failed", place=self._image, found=last_lines(text))
            output: bytes = container.logs(stderr=False)
            return output.decode()

    def _started(self, command: ContainerCommand) -> DockerContainer:
        """Return a started container; one that does not start is removed."""
        with daemon_errors("a container of this image"):
            container = self._client.containers.create(**command.container.sdk_arguments())
            try:
                container.start()
            except BaseException:
                container.remove(force=True)
                raise
            return container

    def _hand_over(self, command: NodeCommand) -> None:
        """Let the container's user, if that is not the caller, write the run folder and nothing else."""
        if command.writer is None:
            return
        # safetensors writes files that their owner alone may read.
        source = self._workspace.source
        for path in (self._workspace.root, *((source, *source.rglob("*")) if source else ())):
            needed = 0o005 if path.is_dir() else 0o004
            if path.stat().st_mode & needed != needed:
                raise MachineError(
                    f"the user in the container cannot read this {'folder' if path.is_dir() else 'file'}",
                    place=str(path),
                    hint="run twinrun as another user than root, or `chmod -R go+rX` the folder",
                )
        change_owner(self._workspace.run, giver=os.getuid(), taker=command.writer)

    def _give_back(self, command: NodeCommand) -> None:
        """Make the caller the owner of what was handed over and of what the container wrote."""
        if command.writer:
            change_owner(self._workspace.run, giver=command.writer[0], taker=(os.getuid(), os.getgid()))


class RunningContainer:
    """A started container; removing it ends everything in it."""

    def __init__(self, container: DockerContainer, log: Path, *, ended: Callable[[], None]) -> None:
        """Follow `container`; `ended` is called when it is gone."""
        self._container = container
        self._log = log
        self._ended = ended
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self._status is None:
            with daemon_errors("the container"):
                self._container.reload()
                state = self._container.attrs["State"]
                if state["Status"] not in ("exited", "dead"):
                    return None
                output = self._container.logs()
            self._log.write_bytes(output)
            self._status = int(state["ExitCode"])
        return self._status

    def stop(self) -> None:
        """End the container, politely first, and remove it, also when the wait is interrupted."""
        with daemon_errors("the container"):
            try:
                if self.poll() is None:
                    # Kills what is left after that; one that has ended by itself is no error.
                    self._container.stop(timeout=round(GRACE_SECONDS))
                    self.poll()
            finally:
                try:
                    self._container.remove(force=True)
                finally:
                    self._ended()


_VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "1",
    # The user's number has no entry in the image's passwd file.
    "HOME": "/tmp",  # noqa: S108
    "USER": "twinrun",
}


def change_owner(folder: Path, *, giver: int, taker: tuple[int, int]) -> None:
    """Give `folder` and all in it that is the giver's to another user and group; raises MachineError."""
    for path in (folder, *folder.rglob("*")):
        try:
            if path.lstat().st_uid == giver:
                os.chown(path, *taker, follow_symlinks=False)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise MachineError(
                f"cannot be given to user {taker[0]}: {error.strerror}",
                place=str(path),
                hint="run twinrun as another user than root, or choose a folder of this machine with --out",
            ) from None


def _groups(vendor: Vendor) -> tuple[int, ...]:
    """Return the groups of this machine whose members may use the vendor's devices."""
    files = [Path(path) for pattern in vendor.container.groups_of for path in glob.glob(pattern)]  # noqa: PTH207
    return tuple(sorted({path.stat().st_gid for path in files}))
