"""Image transfer between the engine and files or registries: load, export, push, save."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from twinrun.foundation.errors import MachineError
from twinrun.foundation.text import redacted
from twinrun.machine.daemon import OWNER, owner

if TYPE_CHECKING:
    from docker import DockerClient

# The engine unpacks, compresses or sends gigabytes before it answers.
_TIMEOUT_SECONDS = 3600
_CHUNK = 1 << 20


@contextlib.contextmanager
def _request(client: DockerClient, what: str) -> Iterator[None]:
    """Raise the timeout and turn errors into MachineError; a full disk stays an OSError."""
    from docker.errors import DockerException

    timeout, client.api.timeout = client.api.timeout, _TIMEOUT_SECONDS
    try:
        yield
    except (DockerException, OSError) as error:
        text = str(getattr(error, "explanation", None) or error)
        if "no space left" in text.lower():
            raise OSError(28, "No space left on device", "the engine") from None
        raise MachineError(f"the engine cannot {redacted(what)}", found=redacted(text)[:300]) from None
    finally:
        client.api.timeout = timeout


def _checked(events: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield events of the engine; raises DockerException for an error among them."""
    from docker.errors import DockerException

    for event in events:
        if "error" in event:
            raise DockerException(event["error"])
        yield event


def load(client: DockerClient, archive: Any, *, what: str, name: str) -> str:
    """Load an archive, tag its image `name` and return what the engine calls it.

    Raises:
        MachineError, OSError: the engine refused, or its disk is full.
    """
    with _request(client, f"load {what}"):
        events = client.api.load_image(archive, quiet=True)  # type: ignore[no-untyped-call]
        lines = [str(event.get("stream", "")) for event in _checked(events)]
        loaded = next((line.strip() for line in lines if "Loaded image" in line), "").partition(": ")[2]
        image = client.images.get(loaded or name)
        image.tag(*name.rsplit(":", 1))
        return str(image.id)


@contextlib.contextmanager
def export_root(client: DockerClient, image: str) -> Iterator[IO[bytes]]:
    """Stream the root file system of an image as a tar; raises MachineError or OSError."""
    with _request(client, f"export {image[:19]}"):
        # The container is never started, so the command need not exist.
        container = client.api.create_container(
            image, command=["/"], network_disabled=True, labels={OWNER: owner()}
        )["Id"]
        try:
            with io.BufferedReader(_ChunkReader(client.api.export(container)), _CHUNK) as stream:
                yield stream
                # Until the last byte is read, the engine holds the container's file system.
                while stream.read(_CHUNK):
                    pass
        finally:
            client.api.remove_container(container, v=True, force=True)


class _ChunkReader(io.RawIOBase):
    """Read-only file of the chunks of an iterator."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        target = memoryview(buffer)
        count = min(len(target), len(self._rest))
        target[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def push(client: DockerClient, image: str, repository: str, tag: str) -> str:
    """Push an image to a repository and return its digest there; raises MachineError."""
    tagged = f"{repository}:{tag}" in client.images.get(image).tags
    with _request(client, f"push to {repository}"):
        client.images.get(image).tag(repository, tag)
        try:
            events = _checked(client.api.push(repository, tag=tag, stream=True, decode=True))
            digests = [event["aux"]["Digest"] for event in events if "Digest" in event.get("aux", {})]
        finally:
            if not tagged:
                client.api.remove_image(f"{repository}:{tag}", noprune=True)
    return str(digests[-1])


def pull(client: DockerClient, reference: str) -> str:
    """Pull an image, `repository@sha256:...`, and return what the engine calls it; raises MachineError."""
    with _request(client, f"pull {reference}"):
        return str(client.images.pull(reference).id)


def save(archive: Iterable[bytes], file: Path) -> None:
    """Write an archive, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.writelines(archive)
        Path(partial).chmod(0o644)
        Path(partial).replace(file)
    finally:
        Path(partial).unlink(missing_ok=True)
