"""Image as an archive of an OCI layout, and its transfer between engine, file and registry."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import redacted
from twinrun.images.dockerfile import ContainerConfig
from twinrun.machine.daemon import OWNER, owner
from twinrun.manifests.image_identity import image_configuration, rfc3339

if TYPE_CHECKING:
    from docker import DockerClient

_CHUNK = 1 << 20
_BLOBS = "blobs/sha256/"
_MEDIA = "application/vnd.oci.image"
# The engine unpacks, compresses or sends gigabytes before it answers.
_TIMEOUT_SECONDS = 3600


class ImageLayer(Frozen):
    """One layer of an image."""

    diff_id: str
    """`sha256:` and the checksum of the uncompressed tar."""
    created_by: str
    """Line of the image's history."""
    file: Path
    """The tar."""
    reused: bool = False
    """An earlier build has made it."""

    def blob(self) -> str:
        """Return its path in an OCI layout."""
        return _BLOBS + self.diff_id.removeprefix("sha256:")


class Image(Frozen):
    """Everything that the image ID is computed from."""

    platform: str
    epoch: int
    container_config: ContainerConfig
    labels: dict[str, str]
    layers: tuple[ImageLayer, ...]

    def configuration(self) -> bytes:
        """Return the image configuration; its checksum is the image ID."""
        created, config = rfc3339(self.epoch), self.container_config
        return image_configuration(
            platform=self.platform,
            created=created,
            config={
                "Cmd": ["python3"],
                "Env": [f"{name}={value}" for name, value in config.env.items()],
                "Labels": self.labels,
                "User": config.user,
                "WorkingDir": config.working_dir,
            },
            history=[(created, layer.created_by) for layer in self.layers],
            diff_ids=[layer.diff_id for layer in self.layers],
        )

    def id(self) -> str:
        """Return the image ID."""
        return f"sha256:{sha256_of_bytes(self.configuration())}"

    def manifest(self) -> bytes:
        """Return the OCI manifest of the layers as they are, uncompressed."""
        content = {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _descriptor("config.v1+json", self.id(), len(self.configuration())),
            "layers": [
                _descriptor("layer.v1.tar", layer.diff_id, layer.file.stat().st_size) for layer in self.layers
            ],
        }
        return canonical_json(content).encode()


def image_archive(image: Image, name: str) -> Iterator[bytes]:
    """Yield the image as a tar of an OCI layout, with the manifest.json that older engines read."""
    configuration, manifest = image.configuration(), image.manifest()
    files = {f"{_BLOBS}{sha256_of_bytes(content)}": content for content in (configuration, manifest)}
    older = {"Config": next(iter(files)), "RepoTags": [name], "Layers": [one.blob() for one in image.layers]}
    files |= {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": canonical_json(_index(manifest, name)).encode(),
        "manifest.json": json.dumps([older]).encode(),
    }
    # Not every tool makes a folder that no member names.
    for folder in ("blobs", _BLOBS.rstrip("/")):
        yield _header(folder, 0, kind=tarfile.DIRTYPE, mode=0o755)
    for path, content in files.items():
        yield _header(path, len(content)) + content + _padding(len(content))
    for blob, layer in {layer.blob(): layer for layer in image.layers}.items():
        yield from _file_member(blob, layer.file)
    yield tarfile.NUL * (2 * tarfile.BLOCKSIZE)


def _index(manifest: bytes, name: str) -> dict[str, Any]:
    """Return the index of a layout; engines take the whole name, other tools the tag."""
    digest = f"sha256:{sha256_of_bytes(manifest)}"
    names = {
        "io.containerd.image.name": f"docker.io/{name}",
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    entry = _descriptor("manifest.v1+json", digest, len(manifest)) | {"annotations": names}
    return {"schemaVersion": 2, "mediaType": f"{_MEDIA}.index.v1+json", "manifests": [entry]}


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": digest, "size": size}


def _file_member(name: str, file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield _header(name, size)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk
    yield _padding(size)


def _header(name: str, size: int, *, kind: bytes = tarfile.REGTYPE, mode: int = 0o644) -> bytes:
    header = tarfile.TarInfo(name)
    header.size, header.type, header.mode = size, kind, mode
    # The GNU format holds sizes above 8 GiB.
    return header.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return tarfile.NUL * (-size % tarfile.BLOCKSIZE)


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


def remove_image(
    client: DockerClient,
    image: str,
    *,
    say: Callable[[str], None],
    tagged: bool = True,
    noprune: bool = False,
) -> None:
    """Remove an image; one that a container still uses stays, whose layers are shared anyway.

    Args:
        tagged: remove it even where a tag names it.
        noprune: keep its untagged parents.
    """
    from docker.errors import APIError

    try:
        if tagged or not client.images.get(image).tags:
            client.api.remove_image(image, noprune=noprune)
    except APIError as error:
        say(f"kept {image[:19]}: {error.explanation}")


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
