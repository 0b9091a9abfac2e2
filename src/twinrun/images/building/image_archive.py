"""Image as an archive of an OCI layout; the same layers and configuration have the same ID everywhere."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.foundation.manifest import Frozen
from twinrun.images.building.dockerfile import ContainerConfig
from twinrun.manifests.image_identity import image_configuration, rfc3339

_CHUNK = 1 << 20
_BLOBS = "blobs/sha256/"
_MEDIA = "application/vnd.oci.image"


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
        yield _folder(folder)
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


def _folder(name: str) -> bytes:
    header = tarfile.TarInfo(name)
    header.type, header.mode = tarfile.DIRTYPE, 0o755
    return header.tobuf(tarfile.GNU_FORMAT)


def _header(name: str, size: int) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = size
    # The GNU format holds sizes above 8 GiB.
    return header.tobuf(tarfile.GNU_FORMAT)


def _padding(size: int) -> bytes:
    return tarfile.NUL * (-size % tarfile.BLOCKSIZE)
