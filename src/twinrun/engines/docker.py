"""A container of the stack's image, without privileges; also through Podman's compatible socket."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinrun import daemon
from twinrun.daemon import WORK_SECONDS, told
from twinrun.engine import PYTHON, Command, Engine, Site
from twinrun.errors import MachineError, RunError
from twinrun.hardware import Vendor
from twinrun.process import GRACE_SECONDS, last_lines
from twinrun.stack import LoadedStack

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

# Ranks exchange batches and gradients through shared memory; the default of 64 MB ends in a bus error.
_SHARED_MEMORY = "16g"
# Who runs in the container of a caller who is root: the user that our images have.
_IMAGE_USER = 1000

# What every container of ours carries, so that they are told from others on the machine.
LABEL = "dev.twinrun.container"

RUNS_IMAGES = True


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return why no container of `stack` can be started here, or None."""
    if not daemon.expected():
        return "no Docker daemon on this machine"
    try:
        client = daemon.connect()
    except MachineError as error:
        return error.message
    with contextlib.closing(client):
        if daemon.find_image(client, stack.image()) is None:
            return f"no image {stack.image()}"
        return daemon.without_devices(client, vendor)


def open_engine(*, stack: LoadedStack, vendor: Vendor, site: Site, say: Callable[[str], None]) -> Engine:
    """Return the engine for the image of the stack's lock.

    Raises:
        MachineError: no daemon answers, it does not have the image, or cannot pass the devices on.
    """
    client = daemon.connect()
    image = daemon.find_image(client, stack.image())
    if image is None:
        client.close()
        command = f"invoke build --vendor {stack.stack.vendor} --stack {stack.stack.name}"
        raise MachineError(
            "the image is not on this machine",
            place="--engine docker",
            found=stack.image(),
            hint=f"`{command}` makes it; or use --engine venv",
        )
    if reason := daemon.without_devices(client, vendor):
        client.close()
        raise MachineError(reason, place="--engine docker", hint="use a Docker daemon, or --engine venv")
    return ContainerEngine(client=client, image=image, vendor=vendor, site=site)


class ContainerEngine:
    """Each command is a container of its own; nothing of it outlives the command."""

    def __init__(self, *, client: DockerClient, image: str, vendor: Vendor, site: Site) -> None:
        self._client = client
        self._image = image
        self._vendor = vendor
        self._site = site
        self._rootless = daemon.is_rootless(client)
        self._mounts = {site.run: "/twinrun/run", site.data: "/twinrun/data", site.root: "/twinrun/project"}
        self.image_digest: str | None = image

    def inside(self, path: Path) -> str:
        """Return where `path`, in one of the site's folders, is mounted."""
        for host, mounted in self._mounts.items():
            if path.is_relative_to(host):
                return str(Path(mounted) / path.relative_to(host))
        raise AssertionError(f"{path} is not mounted")

    def start(self, command: Command, *, log: Path) -> RunningContainer:
        """Start `command` in a new container; its output is in `log` when it has ended.

        Raises:
            MachineError: the daemon refused, for example because it has no driver for the devices.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        return RunningContainer(self._started(command), log)

    def read(self, command: Command) -> str:
        """Run a short `command` and return its standard output; raises RunError."""
        container = self._started(command)
        with told("a container"), contextlib.ExitStack() as stack:
            stack.callback(container.remove, force=True)
            status = container.wait(timeout=WORK_SECONDS)["StatusCode"]
            if status:
                text = container.logs(stdout=False).decode(errors="replace")
                raise RunError("the command failed", place=self._image, found=last_lines(text))
            output: bytes = container.logs(stderr=False)
            return output.decode()

    def _started(self, command: Command) -> Container:
        """Return a started container; one that does not start is removed."""
        self._hand_over(command)
        with told("a container of this image"):
            container = self._client.containers.create(**self.arguments(command))
            try:
                container.start()
            except BaseException:
                container.remove(force=True)
                raise
            return container

    def _hand_over(self, command: Command) -> None:
        """Let the container's user, who is not the caller if that is root, write where it must."""
        if os.getuid() or self._rootless:
            return
        if self._site.root.stat().st_mode & 0o005 != 0o005:
            raise MachineError(
                "the user in the container cannot read the project",
                place=str(self._site.root),
                hint="run twinrun as another user than root, or `chmod -R go+rX` the project",
            )
        prepared = [self._site.data] if command.writes_data else []
        for path in (self._site.run, *self._site.run.rglob("*"), *prepared):
            _give_to_image_user(path)

    def _user(self) -> str:
        """Return who runs in the container; in a rootless engine its root is the caller."""
        if self._rootless:
            return "0:0"
        caller = (os.getuid(), os.getgid()) if os.getuid() else (_IMAGE_USER, _IMAGE_USER)
        return "{}:{}".format(*caller)

    def _volumes(self, command: Command) -> dict[str, dict[str, str]]:
        writable = {self._site.run} | ({self._site.data} if command.writes_data else set())
        return {
            str(host): {"bind": mounted, "mode": "rw" if host in writable else "ro"}
            for host, mounted in self._mounts.items()
        }

    def _visibility(self) -> dict[str, str]:
        """Return the caller's variables that hide devices: the container is given all of them."""
        names = (name for group in self._vendor.hidden_by for name in group)
        return {name: os.environ[name] for name in names if name in os.environ}

    def _search_path(self) -> str:
        own = (self._site.root / "src", *self._site.packages)
        return ":".join(self.inside(folder) for folder in own)

    def arguments(self, command: Command) -> dict[str, Any]:
        """Return what the SDK creates the container with; never `privileged`."""
        assert command.arguments[0] == PYTHON
        return {
            "image": self._image,
            "entrypoint": ["python3"],
            "command": list(command.arguments[1:]),
            "environment": _VARIABLES
            | {"PYTHONPATH": self._search_path()}
            | self._visibility()
            | command.variables,
            "working_dir": "/twinrun/project",
            "user": self._user(),
            "volumes": self._volumes(command),
            "read_only": True,
            # Compiled kernels are loaded from there.
            "tmpfs": {"/tmp": "rw,exec,size=8g"},  # noqa: S108
            "shm_size": _SHARED_MEMORY,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "network_mode": "none",
            # Ranks meet under the host's name, and without a network no other name resolves.
            "hostname": "localhost",
            "init": True,
            "labels": {LABEL: "run"},
            **devices(self._vendor),
        }


class RunningContainer:
    """A started container; removing it ends everything in it."""

    def __init__(self, container: Container, log: Path) -> None:
        self._container = container
        self._log = log
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self._status is None:
            with told("the container"):
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
        with told("the container"):
            try:
                if self.poll() is None:
                    # Kills what is left after that; one that has ended by itself is no error.
                    self._container.stop(timeout=round(GRACE_SECONDS))
                    self.poll()
            finally:
                self._container.remove(force=True)


_VARIABLES = {
    "PYTHONDONTWRITEBYTECODE": "1",
    # The user's number has no entry in the image's passwd file.
    "HOME": "/tmp",  # noqa: S108
    "USER": "twinrun",
}


def _give_to_image_user(path: Path) -> None:
    try:
        os.chown(path, _IMAGE_USER, _IMAGE_USER, follow_symlinks=False)
    except OSError as error:
        raise MachineError(
            f"cannot be given to the user in the container: {error.strerror}",
            place=str(path),
            hint="run twinrun as another user than root, or choose a folder of this machine with --out",
        ) from None


def devices(vendor: Vendor) -> dict[str, Any]:
    """Return what the vendor's containers need so that they can use the GPUs."""
    from docker.types import DeviceRequest

    wanted = vendor.container
    arguments: dict[str, Any] = {}
    if wanted.devices:
        arguments["devices"] = [f"{path}:{path}:rwm" for path in wanted.devices]
    if wanted.groups_of:
        files = [Path(path) for pattern in wanted.groups_of for path in glob.glob(pattern)]  # noqa: PTH207
        arguments["group_add"] = sorted({path.stat().st_gid for path in files})
    if wanted.driver:
        request = DeviceRequest(driver=wanted.driver, count=-1, capabilities=[list(wanted.capabilities)])
        arguments["device_requests"] = [request]
    return arguments
