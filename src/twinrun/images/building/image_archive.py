"""Image as `docker load` takes it; the same layers and configuration have the same ID on every machine."""

from __future__ import annotations

import datetime
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.images.building.dockerfile import ContainerConfig

_CHUNK = 1 << 20


class ImageLayer(Frozen):
    """One layer of an image."""

    diff_id: str
    """`sha256:` and the checksum of the uncompressed tar."""
    created_by: str
    """Line of the image's history."""
    file: Path | None = None
    """The tar; None when the engine has the layer."""


class Image(Frozen):
    """Everything that the image ID is computed from."""

    platform: str
    epoch: int
    container_config: ContainerConfig
    labels: dict[str, str]
    layers: tuple[ImageLayer, ...]

    def configuration(self) -> bytes:
        """Return the image configuration; its checksum is the image ID."""
        system, _, architecture = self.platform.partition("/")
        created, config = rfc3339(self.epoch), self.container_config
        content = {
            "architecture": architecture,
            "os": system,
            "created": created,
            "config": {
                "Cmd": ["python3"],
                "Env": [f"{name}={value}" for name, value in config.env.items()],
                "Labels": self.labels,
                "User": config.user,
                "WorkingDir": config.working_dir,
            },
            "history": [{"created": created, "created_by": layer.created_by} for layer in self.layers],
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in self.layers]},
        }
        return canonical_json(content).encode()

    def id(self) -> str:
        """Return the image ID."""
        return f"sha256:{sha256_of_bytes(self.configuration())}"


def rfc3339(epoch: int) -> str:
    """Return seconds since 1970 as an RFC 3339 time."""
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def image_archive(image: Image, tags: list[str], *, delete_below: Path | None = None) -> Iterator[bytes]:
    """Yield the archive that `docker load` takes, without the layers that the engine has.

    An engine looks for a layer under its chain ID before it opens its file.

    Args:
        delete_below: folder whose layers are deleted once sent, so that the disk holds one copy less.
    """
    configuration = image.configuration()
    name = f"{sha256_of_bytes(configuration)}.json"
    files = [f"{layer.diff_id.removeprefix('sha256:')}.tar" for layer in image.layers]
    manifest = [{"Config": name, "RepoTags": tags, "Layers": files}]
    yield from _member(name, configuration)
    yield from _member("manifest.json", json.dumps(manifest).encode())
    for member, layer in zip(files, image.layers, strict=True):
        if layer.file is not None:
            yield from _file_member(member, layer.file)
            if delete_below and layer.file.is_relative_to(delete_below):
                layer.file.unlink()
    yield tarfile.NUL * (2 * tarfile.BLOCKSIZE)


def _member(name: str, content: bytes) -> Iterator[bytes]:
    yield _header(name, len(content))
    yield content
    yield _padding(len(content))


def _file_member(name: str, file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield _header(name, size)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            yield chunk
    yield _padding(size)


def _header(name: str, size: int) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = size
    # The GNU format holds sizes above 8 GiB.
    return header.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return tarfile.NUL * (-size % tarfile.BLOCKSIZE)
