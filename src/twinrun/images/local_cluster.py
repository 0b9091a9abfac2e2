"""A Slurm cluster on one machine: containers started together, listed, and removed together."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.execution.container import LABEL
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.images.cluster_files import (
    CONTROLLER,
    DRAINED,
    ensure_image,
    recipe_folder,
    site_text,
    write_files,
)
from twinrun.machine import daemon
from twinrun.machine.daemon import daemon_errors
from twinrun.machine.inventory import processor
from twinrun.manifests.cluster import FILE, local_folder

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

NAME = "twinrun-cluster"
MOST_NODES = 32
_READY_SECONDS = 60.0
_SHARED_MEMORY = "1g"


class NodeStatus(Frozen):
    """One container, and what Slurm says of it."""

    name: str
    container: str
    """State of the container, for example `running`."""
    slurm: str
    """State of the node in Slurm, or whether the controller answers."""


def up(
    root: Path, *, nodes: int, mounts: tuple[Path, ...], say: Callable[[str], None]
) -> tuple[NodeStatus, ...]:
    """Start a cluster and wait until its nodes are idle; it replaces one that is there.

    Args:
        mounts: folders that nodes see beside the checkout, the interpreter and the cache.

    Raises:
        InputError: a number of nodes that no cluster on one machine has, or a folder that is not there.
        MachineError: no engine answers, it refuses, or the nodes are not idle within a minute.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise InputError(
            "no such number of nodes", place="--nodes", found=nodes, allowed=f"1 to {MOST_NODES}"
        )
    for folder in mounts:
        if not folder.is_dir():
            raise InputError("no such folder", place="--mount", found=str(folder))
    with contextlib.closing(daemon.connect()) as client:
        with daemon_errors("a cluster"):
            architecture = str(client.version()["Arch"])
        image = ensure_image(client, root, architecture=architecture, say=say)
        _remove(client)
        files = local_folder() / "files"
        write_files(root, files, nodes=nodes)
        shared = tuple(dict.fromkeys((root.resolve(), (root / "runs").resolve(), cache_root(), *mounts)))
        _start(client, image, root, nodes=nodes, files=files, shared=shared)
        _wait(client, nodes, say)
        text = site_text(
            root,
            nodes=nodes,
            vendor=processor(root),
            shared=shared,
            client=("docker", "exec", "--user", f"{os.getuid()}:{os.getgid()}", f"{NAME}-{CONTROLLER}"),
        )
        write_atomically(local_folder() / FILE, text)
        return _status(client)


def status() -> tuple[NodeStatus, ...]:
    """Return the containers of the cluster, none where it is down; raises MachineError."""
    with contextlib.closing(daemon.connect()) as client:
        return _status(client)


def down() -> int:
    """Remove the cluster and return how many containers it had; raises MachineError."""
    with contextlib.closing(daemon.connect()) as client:
        count = _remove(client)
    (local_folder() / FILE).unlink(missing_ok=True)
    return count


def node_names(nodes: int) -> tuple[str, ...]:
    """Return the host names of the workers."""
    return tuple(f"worker{number}" for number in range(1, nodes + 1))


@daemon_errors("a cluster")
def _start(
    client: DockerClient, image: str, root: Path, *, nodes: int, files: Path, shared: tuple[Path, ...]
) -> None:
    network = client.networks.create(NAME, labels={LABEL: "cluster"})
    volumes = {str(folder): {"bind": str(folder), "mode": "rw"} for folder in shared}
    volumes |= {str(path): {"bind": str(path), "mode": "ro"} for path in interpreter_paths()}
    volumes[str(files)] = {"bind": "/twinrun", "mode": "ro"}
    volumes[str(recipe_folder(root.resolve()))] = {"bind": "/cluster", "mode": "ro"}
    for folder in shared:
        folder.mkdir(parents=True, exist_ok=True)
    for name in (CONTROLLER, *node_names(nodes)):
        client.containers.run(
            image,
            ["/cluster/start", "controller" if name == CONTROLLER else "worker"],
            name=f"{NAME}-{name}",
            hostname=name,
            network=network.name,
            environment={"TWINRUN_UID": str(os.getuid()), "TWINRUN_GID": str(os.getgid())},
            volumes=volumes,
            shm_size=_SHARED_MEMORY,
            labels={LABEL: "cluster"},
            init=True,
            detach=True,
        )


def interpreter_paths() -> tuple[Path, ...]:
    """Return what the running interpreter needs of this machine, its environment included.

    One of the system shares its prefix with everything else, so only its own parts are taken.
    """
    base = Path(sys.base_prefix).resolve()
    environment = () if sys.prefix == sys.base_prefix else (Path(sys.prefix),)
    if base != Path("/usr"):
        return tuple(dict.fromkeys((Path(sys.base_prefix), base, *environment)))
    library = sysconfig.get_config_var("LDLIBRARY") or ""
    shared = Path(sysconfig.get_config_var("LIBDIR") or "", library)
    parts = [Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))]
    dynamic = [shared.resolve()] if library.endswith(".so") and shared.exists() else []
    return tuple(dict.fromkeys((*parts, *dynamic, *environment)))


def _wait(client: DockerClient, nodes: int, say: Callable[[str], None]) -> None:
    """Wait until every node can take a job; raises MachineError with what the containers print."""
    say(f"waiting for {nodes} nodes")
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        found = _slurm_states(client)
        if all(found.get(name) == "idle" for name in node_names(nodes)):
            return
        stopped = [one for one in _containers(client) if one.status != "running"]
        if stopped or time.monotonic() > deadline:
            logs = {one.name: one.logs(tail=1) for one in stopped or _containers(client)}
            printed = [f"{name}: {log.decode(errors='replace').strip()}" for name, log in logs.items()]
            raise MachineError(
                "the cluster does not start",
                place=NAME,
                found="\n".join(printed),
                hint=f"`docker logs {NAME}-{CONTROLLER}` has the rest; `invoke cluster down` removes it",
            )
        time.sleep(0.5)


def _status(client: DockerClient) -> tuple[NodeStatus, ...]:
    found = _slurm_states(client)
    answers = "answers" if found else "silent"
    return tuple(
        NodeStatus(
            name=(name := str(one.name).removeprefix(f"{NAME}-")),
            container=one.status,
            slurm=answers if name == CONTROLLER else found.get(name, "unknown"),
        )
        for one in _containers(client)
    ) + tuple(
        NodeStatus(name=name, container="none", slurm=state)
        for name, state in found.items()
        if name == DRAINED
    )


def _slurm_states(client: DockerClient) -> dict[str, str]:
    """Return what Slurm says of each node; empty where the controller does not answer."""
    for one in _containers(client):
        if one.name == f"{NAME}-{CONTROLLER}" and one.status == "running":
            with daemon_errors("a command of the controller"):
                done = one.exec_run(["sinfo", "--noheader", "--Node", "--format=%N %T"], stderr=False)
            assert isinstance(done.output, bytes)
            lines = done.output.decode().splitlines() if done.exit_code == 0 else []
            return {name: state for name, _, state in (line.strip().partition(" ") for line in lines)}
    return {}


@daemon_errors("a cluster")
def _containers(client: DockerClient) -> list[Container]:
    found = client.containers.list(all=True, filters={"label": f"{LABEL}=cluster"})
    return sorted(found, key=lambda one: str(one.name))


@daemon_errors("a cluster")
def _remove(client: DockerClient) -> int:
    containers = _containers(client)
    for container in containers:
        container.remove(force=True, v=True)
    for network in client.networks.list(names=[NAME]):
        network.remove()
    return len(containers)
