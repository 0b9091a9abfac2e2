"""The container daemon, Docker's or Podman behind its compatible socket, and containers left abandoned."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.manifests.image_identity import image_configuration, rfc3339
from twinrun.manifests.vendor import Vendor

if TYPE_CHECKING:
    from docker import DockerClient

SOCKET = "/var/run/docker.sock"
ANSWER_SECONDS = 5
# A daemon that has answered may be slow under load.
WORK_SECONDS = 120
OWNER = "dev.twinrun.owner"
# In /proc/PID/stat, counted after the name of the program.
_START_TIME = 19


def expected() -> bool:
    """Say whether there is a daemon to ask; importing its SDK takes longer than a whole plan."""
    return bool(os.environ.get("DOCKER_HOST")) or Path(SOCKET).exists()


def image_lacks(*, image: str, label: str) -> bool:
    """Say whether the daemon behind a socket of this machine surely has no image of that tag or label.

    Asked without the SDK, which takes longer to import than most plans to make; a daemon that is elsewhere,
    or answers otherwise, is left to it.
    """
    kind, _, path = (os.environ.get("DOCKER_HOST") or f"unix://{SOCKET}").partition("://")
    if kind != "unix":
        return False
    filters = json.dumps({"label": [label]})
    try:
        tagged, _ = _asked(path, f"/images/{quote(image, safe='/:')}/json")
        status, labelled = _asked(path, f"/images/json?filters={quote(filters)}")
    except (OSError, HTTPException, ValueError):
        return False
    return (tagged, status, labelled) == (HTTPStatus.NOT_FOUND, HTTPStatus.OK, [])


def _asked(path: str, question: str) -> tuple[int, object]:
    """Return status and answer of the daemon behind a socket."""
    connection = HTTPConnection("localhost", timeout=ANSWER_SECONDS)
    with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(ANSWER_SECONDS)
        stream.connect(path)
        connection.sock = stream
        connection.request("GET", question)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def connect() -> DockerClient:
    """Return a client of the daemon that DOCKER_HOST or the usual socket names.

    Raises:
        MachineError: it does not answer, or not to this user.
    """
    # The SDK leaves a connection open that was refused.
    kind, _, path = (os.environ.get("DOCKER_HOST") or f"unix://{SOCKET}").partition("://")
    if kind == "unix" and not Path(path).exists():
        raise _silent("no such socket")
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=ANSWER_SECONDS)
    except DockerException as error:
        raise _silent(str(error)[:200]) from None
    client.api.timeout = WORK_SECONDS
    return client


@contextlib.contextmanager
def daemon_errors(what: str) -> Iterator[None]:
    """Turn what the daemon refuses, or its end, into a MachineError."""
    from docker.errors import DockerException

    try:
        yield
    # The SDK passes on what its connection raises, which is an OSError.
    except (DockerException, OSError) as error:
        raise MachineError(
            f"the Docker daemon cannot run {what}",
            place=_place(),
            found=str(getattr(error, "explanation", None) or error)[:200],
            hint="see the daemon's log",
        ) from None


@daemon_errors("containers")
def find_image(client: DockerClient, name: str) -> str | None:
    """Return the digest of the image called `name`, or None."""
    from docker.errors import ImageNotFound

    try:
        return client.images.get(name).id
    except ImageNotFound:
        return None


@daemon_errors("containers")
def labelled_images(client: DockerClient, label: str) -> list[str]:
    """Return the digests of the images with a label, `name=value`: one pulled by digest has no tag."""
    return list(client.api.images(quiet=True, filters={"label": label}))


@daemon_errors("containers")
def image_id(client: DockerClient, image: str) -> str:
    """Return the checksum of an image's configuration, which is its ID in every engine but one.

    Docker with the image store of containerd calls an image by its manifest, which changes with the
    compression of the layers. There the configuration is composed again of all values that the engine tells.
    """
    kept = client.images.get(image)
    found = kept.attrs
    if not _keeps_manifests(client):
        return f"sha256:{str(found['Id']).removeprefix('sha256:')}"
    lines = [(entry["Created"], entry["CreatedBy"]) for entry in reversed(kept.history())]
    configuration = image_configuration(
        platform=f"{found['Os']}/{found['Architecture']}",
        created=found["Created"],
        config={name: value for name, value in found["Config"].items() if value},
        history=[(rfc3339(time), line) for time, line in lines],
        diff_ids=found["RootFS"]["Layers"],
    )
    return f"sha256:{sha256_of_bytes(configuration)}"


def _keeps_manifests(client: DockerClient) -> bool:
    status: list[Any] = client.info().get("DriverStatus") or []
    return ["driver-type", "io.containerd.snapshotter.v1"] in status


@daemon_errors("containers")
def is_rootless(client: DockerClient) -> bool:
    """Say whether root in its containers is the user who runs the daemon."""
    return any("rootless" in option for option in client.info()["SecurityOptions"])


@daemon_errors("containers")
def without_devices(client: DockerClient, vendor: Vendor) -> str | None:
    """Return why the daemon's containers would not see the vendor's devices, or None.

    Podman's compatible socket takes device requests and drops them without a word
    (github.com/containers/podman/issues/22645), so a run would end up on the processor.
    """
    if vendor.container.driver is None:
        return None
    return "Podman's socket passes no device requests on" if is_podman(client) else None


@daemon_errors("containers")
def is_podman(client: DockerClient) -> bool:
    """Say whether the daemon is Podman's compatible service."""
    return "Podman Engine" in {part["Name"] for part in client.version().get("Components", [])}


def _place() -> str:
    return os.environ.get("DOCKER_HOST") or SOCKET


def _silent(found: str) -> MachineError:
    return MachineError(
        "the Docker daemon does not answer",
        place=_place(),
        found=found,
        hint="start it, point DOCKER_HOST at it, or join the group that may use its socket",
    )


def owner() -> str:
    """Return the label of a container of this process: its space of numbers, its number and its start."""
    return f"{_space()} {os.getpid()} {_start_time('self')}"


def remove_abandoned(client: DockerClient) -> list[str]:
    """Remove the containers whose process of this machine is gone, and return their names."""
    from docker.errors import NotFound

    removed = []
    with daemon_errors("containers"):
        for container in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
            if _is_gone(container.labels[OWNER]):
                with contextlib.suppress(NotFound):
                    container.remove(force=True)
                    removed.append(str(container.name))
    return removed


def _is_gone(label: str) -> bool:
    """Say whether the process of a label has ended; one of another machine or container is never said to."""
    space, _, process = label.rpartition(" ")[0].rpartition(" ")
    return space == _space() and process.isdigit() and _start_time(process) != label.rpartition(" ")[2]


def _space() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _start_time(process: str) -> str | None:
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[_START_TIME]
