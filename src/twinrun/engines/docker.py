"""A container of the stack's image, without privileges; also through Podman's compatible socket."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinrun.engine import PYTHON, Command, Engine, Site
from twinrun.errors import MachineError, RunError
from twinrun.hardware import Vendor
from twinrun.process import GRACE_SECONDS, last_lines
from twinrun.stack import LoadedStack

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

_SOCKET = "/var/run/docker.sock"
_ANSWER_SECONDS = 5
# A daemon that has answered may be slow under load.
_WORK_SECONDS = 120
# Ranks exchange batches and gradients through shared memory; the default of 64 MB ends in a bus error.
_SHARED_MEMORY = "16g"


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return why no container of `stack` can be started here, or None."""
    # Looked at first because importing the SDK takes longer than all the rest of a plan.
    if not os.environ.get("DOCKER_HOST") and not Path(_SOCKET).exists():
        return "no Docker daemon on this machine"
    try:
        client = _client()
    except MachineError as error:
        return error.message
    try:
        return None if _find(client, stack) else f"no image {stack.image()}"
    finally:
        client.close()


def open_engine(*, stack: LoadedStack, vendor: Vendor, site: Site, say: Callable[[str], None]) -> Engine:
    """Return the engine for the image of the stack's lock.

    Raises:
        MachineError: no daemon answers, or it does not have the image.
    """
    client = _client()
    image = _find(client, stack)
    if image is None:
        client.close()
        raise MachineError(
            "the image is not on this machine",
            place="--engine docker",
            found=stack.image(),
            hint="load the image under this name, or use --engine venv",
        )
    return ContainerEngine(client=client, image=image, vendor=vendor, site=site)


class ContainerEngine:
    """Each command is a container of its own; nothing of it outlives the command."""

    def __init__(self, *, client: DockerClient, image: str, vendor: Vendor, site: Site) -> None:
        self._client = client
        self._image = image
        self._vendor = vendor
        self._mounts = {
            site.run: ("/twinrun/run", "rw"),
            site.data: ("/twinrun/data", "rw"),
            site.root: ("/twinrun/project", "ro"),
        }
        self.image_digest: str | None = image

    def inside(self, path: Path) -> str:
        """Return where `path`, in one of the site's folders, is mounted."""
        for host, (mounted, _) in self._mounts.items():
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
        with _told("a container"), contextlib.ExitStack() as stack:
            stack.callback(container.remove, force=True)
            status = container.wait(timeout=_WORK_SECONDS)["StatusCode"]
            if status:
                text = container.logs(stdout=False).decode(errors="replace")
                raise RunError("the command failed", place=self._image, found=last_lines(text))
            output: bytes = container.logs(stderr=False)
            return output.decode()

    def _started(self, command: Command) -> Container:
        """Return a started container; one that does not start is removed."""
        with _told("a container of this image"):
            container = self._client.containers.create(**self.arguments(command))
            try:
                container.start()
            except BaseException:
                container.remove(force=True)
                raise
            return container

    def arguments(self, command: Command) -> dict[str, Any]:
        """Return what the SDK creates the container with; never `privileged`."""
        assert command.arguments[0] == PYTHON
        return {
            "image": self._image,
            "entrypoint": ["python3"],
            "command": list(command.arguments[1:]),
            "environment": _VARIABLES | command.variables,
            "working_dir": "/twinrun/project",
            "user": f"{os.getuid()}:{os.getgid()}",
            "volumes": {str(host): {"bind": at, "mode": mode} for host, (at, mode) in self._mounts.items()},
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
            with _told("the container"):
                self._container.reload()
                state = self._container.attrs["State"]
                if state["Status"] not in ("exited", "dead"):
                    return None
                output = self._container.logs()
            self._log.write_bytes(output)
            self._status = int(state["ExitCode"])
        return self._status

    def stop(self) -> None:
        """End the container, politely first, and remove it."""
        if self.poll() is None:
            with _told("the container"):
                # Kills what is left after that; one that has ended by itself is no error.
                self._container.stop(timeout=round(GRACE_SECONDS))
            self.poll()
        with _told("the container"):
            self._container.remove(force=True)


_VARIABLES = {
    "PYTHONPATH": "/twinrun/project/src",
    "PYTHONDONTWRITEBYTECODE": "1",
    # The user's number has no entry in the image's passwd file.
    "HOME": "/tmp",  # noqa: S108
    "USER": "twinrun",
}


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


def _client() -> DockerClient:
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=_ANSWER_SECONDS)
    except DockerException as error:
        raise MachineError(
            "the Docker daemon does not answer",
            place=os.environ.get("DOCKER_HOST") or _SOCKET,
            found=str(error)[:200],
            hint="start it, join the group that may use its socket, or use --engine venv",
        ) from None
    client.api.timeout = _WORK_SECONDS
    return client


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn what the daemon refuses, or its end, into a MachineError."""
    from docker.errors import DockerException

    try:
        yield
    # The SDK passes on what its connection raises, which is an OSError.
    except (DockerException, OSError) as error:
        raise MachineError(
            f"the Docker daemon cannot run {what}",
            place=os.environ.get("DOCKER_HOST") or _SOCKET,
            found=str(getattr(error, "explanation", None) or error)[:200],
            hint="see the daemon's log, or use --engine venv",
        ) from None


def _find(client: DockerClient, stack: LoadedStack) -> str | None:
    """Return the digest of the image that belongs to the stack's lock."""
    from docker.errors import ImageNotFound

    try:
        return client.images.get(stack.image()).id
    except ImageNotFound:
        return None
