"""The container daemon that images are built by, Docker's or Podman behind its compatible socket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.manifests.image_identity import image_configuration, rfc3339

if TYPE_CHECKING:
    from docker import DockerClient

SOCKET = "/var/run/docker.sock"
ANSWER_SECONDS = 5
# A daemon that has answered may be slow under load.
WORK_SECONDS = 120


def place() -> str:
    """Return where the daemon answers: what DOCKER_HOST names, or the usual socket."""
    return os.environ.get("DOCKER_HOST") or f"unix://{SOCKET}"


def connect() -> DockerClient:
    """Return a client of the daemon.

    Raises:
        MachineError: it does not answer, or not to this user.
    """
    # The SDK leaves a connection open that was refused.
    kind, _, path = place().partition("://")
    if kind == "unix" and not Path(path).exists():
        raise _silent("No such file or directory")
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
            place=place(),
            found=str(getattr(error, "explanation", None) or error)[:200],
            hint="see the daemon's log",
        ) from None


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
    status: list[Any] = client.info().get("DriverStatus") or []
    if ["driver-type", "io.containerd.snapshotter.v1"] not in status:
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


@daemon_errors("containers")
def is_podman(client: DockerClient) -> bool:
    """Say whether the daemon is Podman's compatible service."""
    return "Podman Engine" in {part["Name"] for part in client.version().get("Components", [])}


def _silent(found: str) -> MachineError:
    return MachineError(
        "the Docker daemon does not answer",
        place=place(),
        found=found,
        hint="start it, point DOCKER_HOST at it, or join the group that may use its socket",
    )
