"""An image written by hand: the same layers and settings give the same ID, whoever builds it when."""

from __future__ import annotations

import datetime
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from twinrun.building.dockerfile import Settings
from twinrun.files import canonical_json, sha256_of_bytes
from twinrun.manifest import Frozen

_CHUNK = 1 << 20


class ImageLayer(Frozen):
    """One layer of an image."""

    diff_id: str
    """`sha256:` and the digest of the uncompressed tar."""
    made_by: str
    """One line for the history of the image."""
    file: Path | None = None
    """The tar; None where the engine has the layer."""


class Image(Frozen):
    """All that an image ID is taken over."""

    platform: str
    epoch: int
    settings: Settings
    labels: dict[str, str]
    layers: tuple[ImageLayer, ...]

    def configuration(self) -> bytes:
        """Return the image's configuration; its digest is the image ID."""
        system, _, architecture = self.platform.partition("/")
        made = time_of(self.epoch)
        content = {
            "architecture": architecture,
            "os": system,
            "created": made,
            "config": {
                "Cmd": ["python3"],
                "Env": [f"{name}={value}" for name, value in self.settings.variables.items()],
                "Labels": self.labels,
                "User": self.settings.user,
                "WorkingDir": self.settings.folder,
            },
            "history": [{"created": made, "created_by": layer.made_by} for layer in self.layers],
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in self.layers]},
        }
        return canonical_json(content).encode()

    def id(self) -> str:
        """Return the image ID."""
        return f"sha256:{sha256_of_bytes(self.configuration())}"


def time_of(epoch: int) -> str:
    """Return seconds since 1970 as RFC 3339 writes them."""
    return datetime.datetime.fromtimestamp(epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def labels_of(variables: Mapping[str, str | None]) -> dict[str, str]:
    """Return the labels that have a value, sorted."""
    return {name: value for name, value in sorted(variables.items()) if value}


def archive_of(image: Image, names: list[str], *, spent: Path | None = None) -> Iterator[bytes]:
    """Yield the archive that `docker load` takes, without the layers that the engine has.

    An engine looks for a layer under its chain ID before it opens its file.

    Args:
        spent: folder whose files are deleted once they are sent, so that one copy less is on the disk.
    """
    configuration = image.configuration()
    own = f"{sha256_of_bytes(configuration)}.json"
    files = [f"{layer.diff_id.removeprefix('sha256:')}.tar" for layer in image.layers]
    manifest = [{"Config": own, "RepoTags": names, "Layers": files}]
    yield from _member(own, configuration)
    yield from _member("manifest.json", json.dumps(manifest).encode())
    for name, layer in zip(files, image.layers, strict=True):
        if layer.file is not None:
            yield from _file_member(name, layer.file)
            if spent and layer.file.is_relative_to(spent):
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
    # GNU's form holds sizes above 8 GiB.
    return header.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return tarfile.NUL * (-size % tarfile.BLOCKSIZE)
