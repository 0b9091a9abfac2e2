"""One container as data, and its two spellings: the command line and the arguments of the SDK."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from twinrun.foundation.manifest import Frozen
from twinrun.machine.daemon import OWNER, owner
from twinrun.protocol.allocation import IMAGE_VARIABLE

# Ranks exchange batches and gradients through shared memory; the default of 64 MB ends in a bus error.
SHARED_MEMORY = "16g"
# Compiled kernels are loaded from there.
TEMPORARY_FOLDER, TEMPORARY_SIZE = "/tmp", "8g"  # noqa: S108
_TEMPORARY = {TEMPORARY_FOLDER: f"rw,exec,size={TEMPORARY_SIZE}"}
WORKING_FOLDER = "/twinrun/project"
# Every container of ours carries this label, which tells it from others on the machine.
LABEL = "dev.twinrun.container"


class Mount(Frozen):
    """A folder of the host that the container sees."""

    host: str
    inside: str
    mode: Literal["ro", "rw"]


class Container(Frozen):
    """A container without privileges that runs one command under the image's interpreter."""

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
    driver: str | None = None
    """Device driver of the daemon, asked for all devices."""
    capabilities: tuple[str, ...] = ()
    """What the driver is asked for."""
    resource: str | None = None
    """Under which name Kubernetes counts the devices."""
    passed: tuple[str, ...] = ()
    """Variables that it is given as the caller has them; their values, which may be secret, stand nowhere."""

    def run_arguments(self) -> tuple[str, ...]:
        """Return the `docker run` of this container."""
        return ("docker", "run", "--rm", *self._options(), self.image, *self.arguments)

    def inspect_arguments(self) -> tuple[str, ...]:
        """Return the command that prints which image a node has under the name."""
        return ("docker", "image", "inspect", "--format", "{{.Id}}", self.image)

    def _options(self) -> Iterator[str]:
        yield from ("--init", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
        yield from ("--user", self.user, "--shm-size", SHARED_MEMORY, "--label", f"{LABEL}=run")
        yield from _flags("--tmpfs", _TEMPORARY, between=":")
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
        if self.driver:
            # The command line is split at commas, and a list inside it is quoted.
            yield from ("--gpus", f'driver={self.driver},count=all,"capabilities={self._asked()}"')
        yield from _flags("--env", self.variables, between="=")
        for name in self.passed:
            yield from ("--env", name)
        yield from ("--workdir", WORKING_FOLDER, "--entrypoint", "python3")

    def _asked(self) -> str:
        # The command line adds `gpu` by itself.
        return ",".join(name for name in self.capabilities if name != "gpu")

    def sdk_arguments(self) -> dict[str, Any]:
        """Return what the SDK creates this container with."""
        return {
            "image": self.image,
            "entrypoint": ["python3"],
            "command": list(self.arguments),
            "environment": self.variables
            | {name: os.environ[name] for name in self.passed if name in os.environ},
            "working_dir": WORKING_FOLDER,
            "user": self.user,
            "volumes": {mount.host: {"bind": mount.inside, "mode": mount.mode} for mount in self.mounts},
            "read_only": True,
            "tmpfs": _TEMPORARY,
            "shm_size": SHARED_MEMORY,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "init": True,
            "labels": {LABEL: "run", OWNER: owner()},
            **self._network(),
            **self._devices(),
        }

    def _network(self) -> dict[str, Any]:
        """Return the arguments of the network.

        Ranks meet under the host's name, which without a network only the container itself resolves.
        """
        if self.host is None:
            return {"network_mode": "host"}
        return {"network_mode": "none", "hostname": self.host, "extra_hosts": {self.host: "127.0.0.1"}}

    def _devices(self) -> dict[str, Any]:
        from docker.types import DeviceRequest  # noqa: PLC0415 - the SDK is slow to import

        found: dict[str, Any] = {}
        if self.devices:
            found["devices"] = [f"{path}:{path}:rwm" for path in self.devices]
        if self.groups:
            found["group_add"] = list(self.groups)
        if self.driver:
            request = DeviceRequest(driver=self.driver, count=-1, capabilities=[list(self.capabilities)])
            found["device_requests"] = [request]
        return found


def _flags(name: str, values: Mapping[str, str], *, between: str) -> Iterator[str]:
    for key, value in values.items():
        yield from (name, f"{key}{between}{value}")
