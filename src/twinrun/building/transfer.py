"""Images into the engine and out of it: loaded, pulled, pushed, saved."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from twinrun.building.secrets import redacted
from twinrun.errors import MachineError

if TYPE_CHECKING:
    from docker import DockerClient

# Gigabytes are unpacked, compressed or sent before the engine answers.
_SECONDS = 3600
_CHUNK = 1 << 20


@contextlib.contextmanager
def _patient(client: DockerClient, what: str) -> Iterator[None]:
    """Wait long for the engine, and tell what it refuses; a full disk is left to the caller."""
    from docker.errors import DockerException

    seconds, client.api.timeout = client.api.timeout, _SECONDS
    try:
        yield
    except (DockerException, OSError) as error:
        text = str(getattr(error, "explanation", None) or error)
        if "no space left" in text.lower():
            raise OSError(28, "No space left on device", "the engine") from None
        raise MachineError(f"the engine cannot {what}", found=redacted(text)[:300]) from None
    finally:
        client.api.timeout = seconds


def _checked(events: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield what the engine tells; raises what it tells as an error."""
    from docker.errors import DockerException

    for event in events:
        if "error" in event:
            raise DockerException(event["error"])
        yield event


def load(client: DockerClient, archive: Any, *, what: str, name: str) -> str:
    """Load an archive, call its image `name`, and return its ID; raises MachineError or OSError."""
    with _patient(client, f"load {what}"):
        events = client.api.load_image(archive, quiet=True)  # type: ignore[no-untyped-call]
        told = [str(event.get("stream", "")) for event in _checked(events)]
        loaded = next((text.strip() for text in told if "Loaded image" in text), "").partition(": ")[2]
        image = client.images.get(loaded or name)
        image.tag(*name.rsplit(":", 1))
        return str(image.id)


def pull(
    client: DockerClient,
    repository: str,
    *,
    tag: str | None,
    sha256: str | None,
    name: str,
    say: Callable[[str], None],
) -> None:
    """Pull an image by its digest, or by its tag where nobody knows one, and call it `name`."""
    reference = f"sha256:{sha256}" if sha256 else str(tag)
    say(f"pulling {repository} {reference}")
    with _patient(client, f"pull {repository}"):
        image = client.images.pull(repository, tag=reference)
        image.tag(*name.rsplit(":", 1))


@contextlib.contextmanager
def exported(client: DockerClient, image: str) -> Iterator[IO[bytes]]:
    """Give the root file system of an image as a tar, while it comes; raises MachineError or OSError."""
    with _patient(client, f"export {image[:19]}"):
        # It is never started, so the command need not exist.
        container = client.api.create_container(image, command=["/"], network_disabled=True)["Id"]
        try:
            yield io.BufferedReader(_Chunks(client.api.export(container)), _CHUNK)
        finally:
            client.api.remove_container(container, v=True, force=True)


class _Chunks(io.RawIOBase):
    """A file that is only read from, of pieces as they come."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        wanted = memoryview(buffer)
        count = min(len(wanted), len(self._rest))
        wanted[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def push(client: DockerClient, image: str, repository: str, tag: str) -> str:
    """Push an image under another name and return its digest in the registry; raises MachineError."""
    had = f"{repository}:{tag}" in client.images.get(image).tags
    with _patient(client, f"push to {repository}"):
        client.images.get(image).tag(repository, tag)
        try:
            events = _checked(client.api.push(repository, tag=tag, stream=True, decode=True))
            digests = [event["aux"]["Digest"] for event in events if "Digest" in event.get("aux", {})]
        finally:
            if not had:
                client.api.remove_image(f"{repository}:{tag}", noprune=True)
    return str(digests[-1])


def save(client: DockerClient, image: str, file: Path) -> int:
    """Write an image as an archive that any engine loads, and return its size; raises MachineError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, fresh = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream, _patient(client, f"save {image}"):
            for chunk in client.api.get_image(image):
                stream.write(chunk)
        Path(fresh).chmod(0o644)
        Path(fresh).replace(file)
    finally:
        Path(fresh).unlink(missing_ok=True)
    return file.stat().st_size
