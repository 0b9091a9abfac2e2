"""A Slurm cluster on one machine: a compose file of containers, started together, listed, and removed."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import string
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from twinrun.execution.containers import LABEL
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.processes import tool_output
from twinrun.images.apt_archive import KEYRING, address, own_mirror
from twinrun.images.root_filesystem import mmdebstrap
from twinrun.machine.inventory import processor
from twinrun.manifests.cluster import FILE, local_folder

NAME = "twinrun-cluster"
MOST_NODES = 32
_CONTROLLER = "controller"
# A node that is out of service from the start.
_DRAINED = "worker0"
_SUITE = "trixie"
_READY_SECONDS = 60.0


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
        message, allowed = "no such number of nodes", f"1 to {MOST_NODES}"
        raise InputError(message, place="--nodes", found=nodes, allowed=allowed)
    if absent := next((folder for folder in mounts if not folder.is_dir()), None):
        raise InputError("no such folder", place="--mount", found=str(absent))
    # Asks the engine, which making an image does only at its end.
    down()
    shared = tuple(dict.fromkeys((root.resolve(), (root / "runs").resolve(), cache_root(), *mounts)))
    files = local_folder() / "files"
    for folder in (*shared, files):
        folder.mkdir(parents=True, exist_ok=True)
    recipe, cores = root.resolve() / "images/cluster", max(2, len(os.sched_getaffinity(0)))
    for file in (recipe / "etc").iterdir():
        text = file.read_text(encoding="utf-8").format(nodes=nodes, cores=cores)
        write_atomically(files / file.name, text)
    _write_key(files / "munge.key")
    volumes = [f"{path}:{path}:rw" for path in shared] + [f"{one}:{one}:ro" for one in interpreter_paths()]
    volumes += [f"{files}:/twinrun:ro", f"{recipe}:/cluster:ro"]
    write_atomically(_file(), _compose_text(recipe, _ensure_image(root, say=say), volumes, nodes=nodes))
    _compose("up", "--detach")
    _wait(nodes, say)
    client = ["docker", "exec", "--user", f"{os.getuid()}:{os.getgid()}", f"{NAME}-{_CONTROLLER}"]
    site = (recipe / "site.toml.in").read_text(encoding="utf-8")
    values = {"vendor": processor(root), "shared": json.dumps(list(map(str, shared)))}
    text = site.format(nodes=nodes, cores=cores, client=json.dumps(client), **values)
    write_atomically(local_folder() / FILE, text)
    return status()


def status() -> tuple[NodeStatus, ...]:
    """Return the containers of the cluster, none where it is down; raises MachineError."""
    listed = _docker("exec", f"{NAME}-{_CONTROLLER}", "sinfo", "--noheader", "--Node", "--format=%N %T")
    slurm = dict(line.split() for line in listed.splitlines() if line.count(" ") == 1)
    states = _states()
    names = [name for name in (_CONTROLLER, *sorted(states.keys() - {_CONTROLLER})) if name in states]
    # The node that is out of service has no container.
    names += [_DRAINED] if _DRAINED in slurm else []
    said = {_CONTROLLER: "answers" if slurm else "silent"} | slurm
    return tuple(
        NodeStatus(name=name, container=states.get(name, "none"), slurm=said.get(name, "unknown"))
        for name in names
    )


def down() -> int:
    """Remove the cluster and return how many containers it had; raises MachineError."""
    count = len(_states())
    if _file().is_file():
        _compose("down", "--volumes", "--timeout", "1")
        _file().unlink()
    (local_folder() / FILE).unlink(missing_ok=True)
    return count


def _file() -> Path:
    return local_folder() / "compose.yaml"


def _states() -> dict[str, str]:
    """Return the state of each container by its node; raises MachineError where no engine answers."""
    question = ("--filter", f"label={LABEL}=cluster", "--format", "{{.Names}} {{.State}}")
    listed = tool_output(
        ["docker", "ps", "--all", *question],
        failure="the engine does not say which containers there are",
        place="docker ps",
        hint="start it, point DOCKER_HOST at it, or join the group that may use its socket",
        absent="install a container engine",
    )
    return {name.removeprefix(f"{NAME}-"): state for name, state in map(str.split, listed.splitlines())}


def node_names(nodes: int) -> tuple[str, ...]:
    """Return the host names of the workers."""
    return tuple(f"worker{number}" for number in range(1, nodes + 1))


def _ensure_image(root: Path, *, say: Callable[[str], None]) -> str:
    """Return the image of the containers, named after its packages and made where the engine has none."""
    listed = (root / "images/cluster/packages.txt").read_text(encoding="utf-8")
    tag = f"{_SUITE}-{hashlib.sha256(listed.encode()).hexdigest()[:12]}"
    name, packages = f"twinrun/cluster:{tag}", listed.split()
    if not _docker("image", "inspect", name):
        say(f"making {name} of {len(packages)} Debian packages and what they need, once")
        with tempfile.TemporaryDirectory(prefix="twinrun-cluster-") as folder:
            tar = Path(folder) / "root.tar"
            mirror = address(own_mirror(), "debian/").rstrip("/")
            mmdebstrap(
                *("--variant=minbase", f"--keyring={KEYRING}", f"--include={','.join(packages)}"),
                *(_SUITE, str(tar), f"deb {mirror} {_SUITE} main"),
                epoch=round(time.time()),
                hint="check the network, or name a mirror in TWINRUN_DEBIAN_MIRROR",
            )
            tool_output(
                ["docker", "import", str(tar), name], failure="the engine refuses the image", place=name
            )
    return name


def _write_key(key: Path) -> None:
    """Write munge's key, new each time and readable for its owner alone."""
    key.unlink(missing_ok=True)
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))


def _compose_text(recipe: Path, image: str, volumes: list[str], *, nodes: int) -> str:
    template = string.Template((recipe / "compose.yaml.in").read_text(encoding="utf-8"))
    user = json.dumps({"TWINRUN_UID": str(os.getuid()), "TWINRUN_GID": str(os.getgid())})
    told = {"image": image, "volumes": json.dumps(volumes), "user": user, "label": LABEL, "name": NAME}
    workers = (
        f"  {name}: {{<<: *node, hostname: {name}, container_name: {NAME}-{name},"
        " command: [/cluster/start, worker]}\n"
        for name in node_names(nodes)
    )
    return template.substitute(told) + "".join(workers)


def _compose(*words: str) -> None:
    """Run Docker's compose on the cluster's file; raises MachineError."""
    program = ["docker", "compose"] if _docker("compose", "version") else ["docker-compose"]
    tool_output(
        [*program, "--project-name", NAME, "--file", str(_file()), *words],
        failure="the engine cannot run a cluster",
        place=str(_file()),
        absent="install docker-compose, or Docker's plugin of that name",
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


def _wait(nodes: int, say: Callable[[str], None]) -> None:
    """Wait until every node can take a job; raises MachineError with what the containers print."""
    say(f"waiting for {nodes} nodes")
    deadline = time.monotonic() + _READY_SECONDS
    while not {one.name for one in status() if one.slurm == "idle"} >= set(node_names(nodes)):
        states = _states()
        stopped = [name for name, state in states.items() if state != "running"]
        if stopped or time.monotonic() > deadline:
            names = [f"{NAME}-{name}" for name in stopped or states]
            logs = [f"{name}: {_docker('logs', '--tail', '1', name).strip()}" for name in names]
            hint = f"`docker logs {NAME}-{_CONTROLLER}` has the rest; `invoke cluster down` removes it"
            raise MachineError("the cluster does not start", place=NAME, found="\n".join(logs), hint=hint)
        time.sleep(0.5)


def _docker(*words: str) -> str:
    """Return what the engine's client prints; nothing where it fails."""
    done = subprocess.run(
        ["docker", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return "" if done.returncode else done.stdout
