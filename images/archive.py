"""Writes an image as an archive, each folder one layer, with one time for all files: its ID is a digest.

It is the last step of images/Dockerfile, run by the image's own Python, and needs the standard library alone.
The host copies the tar of the root file system with it.

    archive.py root TAR COPY EPOCH
    archive.py image CONTEXT FOLDER...
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import string
import sys
import tarfile
import time
from pathlib import Path
from typing import IO, Any, cast

# Files that differ from build to build, or that only the installation of packages needs.
_EXCLUDED = re.compile(
    r"(?:tmp|run|proc|sys|dev|var/tmp|var/log|var/cache/apt|var/cache/ldconfig|var/lib/apt/lists|root/\.cache)/.+"
    # Backups of package tools.
    r"|var/cache/debconf/(?:.+-old|tmp\..*)|var/lib/dpkg/.+-old|etc/(?:passwd|group|shadow|gshadow|subuid|subgid)-"
    # What an engine mounts, and what names the machine.
    r"|etc/(?:resolv\.conf|hosts|hostname|machine-id|mtab)|\.dockerenv"
)
_ATTRIBUTE = "SCHILY.xattr."
_CHUNK = 1 << 20
# Where the image has its Python environment, with the kernels in it.
_PLACE = "opt/twinrun/python"
_MEDIA = "application/vnd.oci.image"
# PATH that engines set for an image without one.
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class _HashingFile:
    """File that hashes what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size


def _header(name: str, member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """Return a header without what depends on the machine or the time of the build."""
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.size = member.type, member.mode & 0o7777, member.size
    header.uid, header.gid, header.mtime = member.uid, member.gid, epoch
    header.linkname = member.linkname.removeprefix("./") if member.islnk() else member.linkname
    header.devmajor, header.devminor = member.devmajor, member.devminor
    attributes = {key: value for key, value in member.pax_headers.items() if key.startswith(_ATTRIBUTE)}
    header.pax_headers = attributes
    return header


def _writer(out: IO[bytes] | _HashingFile) -> tarfile.TarFile:
    return tarfile.TarFile(
        fileobj=cast("IO[bytes]", out), mode="w", format=tarfile.PAX_FORMAT, copybufsize=_CHUNK
    )


def write_root(stream: IO[bytes], out: IO[bytes], *, epoch: int) -> str:
    """Copy the tar of a root file system without what varies, and return the digest of the copy.

    Args:
        epoch: modification time of every path, in seconds since 1970.

    Raises:
        tarfile.TarError: the stream is no tar.
    """
    hashed = _HashingFile(out)
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK) as source, _writer(hashed) as tar:
        for member in source:
            name = member.name.removeprefix("./").strip("/")
            if name not in ("", ".") and not _EXCLUDED.fullmatch(name):
                tar.addfile(
                    _header(name, member, epoch), source.extractfile(member) if member.isreg() else None
                )
    return hashed.digest.hexdigest()


def _write_tree(folder: Path, out: IO[bytes], *, epoch: int) -> tuple[str, int]:
    """Write a folder as the layer that has it as the environment; return the layer's digest and its bytes."""
    hashed = _HashingFile(out)
    with _writer(hashed) as tar:

        def add(name: str, path: Path) -> None:
            member = tar.gettarinfo(path, name)
            # Two names of one file are two files: which of them is the link would depend on the file system.
            if member.islnk():
                member.type, member.size = tarfile.REGTYPE, path.stat().st_size
            if not member.isreg():
                tar.addfile(_header(name, member, epoch))
                return
            with path.open("rb") as content:
                tar.addfile(_header(name, member, epoch), content)

        for parent in map(str, reversed(Path(_PLACE).parents[:-1])):
            above = tarfile.TarInfo(parent)
            above.type, above.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(_header(parent, above, epoch))
        for found, folders, files in os.walk(folder):
            folders.sort()
            here, place = Path(found), Path(_PLACE, Path(found).relative_to(folder)).as_posix()
            add(place, here)
            links = [one for one in folders if (here / one).is_symlink()]
            for one in sorted([*files, *links]):
                add(f"{place}/{one}", here / one)
    return hashed.digest.hexdigest(), hashed.size


def _container(dockerfile: Path) -> dict[str, Any]:
    """Return environment, labels, user and folder of a container, as the last stage says them."""
    text = re.sub(r"\\\n", " ", dockerfile.read_text(encoding="utf-8"))
    env, labels, told = {"PATH": _PATH}, {}, {}
    for line in re.split(r"^FROM ", text, flags=re.MULTILINE)[-1].splitlines()[1:]:
        word, _, rest = line.strip().partition(" ")
        for name, _, value in (part.partition("=") for part in shlex.split(rest) if word in ("ENV", "LABEL")):
            if word == "ENV":
                env[name] = string.Template(value).safe_substitute(env)
            else:
                labels[name] = value
        told[word] = rest.strip()
    return {
        "Cmd": ["python3"],
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": dict(sorted(labels.items())),
        "User": told["USER"],
        "WorkingDir": told["WORKDIR"],
    }


def _descriptor(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"{_MEDIA}.{kind}", "digest": f"sha256:{digest}", "size": size}


def _json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def write_image(context: Path, folders: list[Path], out: Path) -> str:
    """Write an OCI layout with the manifest.json that older engines read; return the image ID.

    Args:
        context: of the build, with `root.tar`, `Dockerfile` and `image.json`.
        folders: what becomes a layer above the root, parts of the environment; an empty one is left out.
        out: empty folder.
    """
    told = json.loads((context / "image.json").read_text(encoding="utf-8"))
    epoch, blobs = int(told["epoch"]), out / "blobs/sha256"
    blobs.mkdir(parents=True)
    written: list[tuple[str, int, str]] = []
    partial = blobs / "partial"
    for layer in (context / "root.tar", *(one for one in folders if any(one.iterdir()))):
        with partial.open("wb") as copy:
            if layer.is_dir():
                digest, size = _write_tree(layer, copy, epoch=epoch)
            else:
                hashed = _HashingFile(copy)
                with layer.open("rb") as stream:
                    while chunk := stream.read(_CHUNK):
                        hashed.write(chunk)
                digest, size = hashed.digest.hexdigest(), hashed.size
        partial.rename(blobs / digest)
        written.append((digest, size, f"images/Dockerfile [{layer.stem}]"))
    system, _, architecture = told["platform"].partition("/")
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))
    configuration = {
        "architecture": architecture,
        "os": system,
        "created": created,
        "config": _container(context / "Dockerfile"),
        "history": [{"created": created, "created_by": line} for _, _, line in written],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest, _, _ in written]},
    }

    def blob(content: object) -> tuple[str, int]:
        text = _json(content)
        digest = hashlib.sha256(text).hexdigest()
        (blobs / digest).write_bytes(text)
        return digest, len(text)

    identity = blob(configuration)
    entries = [_descriptor("layer.v1.tar", digest, size) for digest, size, _ in written]
    manifest = blob(
        {
            "schemaVersion": 2,
            "mediaType": f"{_MEDIA}.manifest.v1+json",
            "config": _descriptor("config.v1+json", *identity),
            "layers": entries,
        }
    )
    names = {
        "io.containerd.image.name": f"docker.io/{told['name']}",
        "org.opencontainers.image.ref.name": told["name"].rpartition(":")[2],
    }
    index = _descriptor("manifest.v1+json", *manifest) | {"annotations": names}
    older = {
        "Config": f"blobs/sha256/{identity[0]}",
        "RepoTags": [told["name"]],
        "Layers": [f"blobs/sha256/{digest}" for digest, _, _ in written],
    }
    files = {
        "oci-layout": {"imageLayoutVersion": "1.0.0"},
        "index.json": {"schemaVersion": 2, "mediaType": f"{_MEDIA}.index.v1+json", "manifests": [index]},
        "manifest.json": [older],
    }
    for name, content in files.items():
        (out / name).write_bytes(_json(content))
    return f"sha256:{identity[0]}"


def main(what: str, *words: str) -> None:
    """Print the digest of the root file system, or the ID of the image."""
    if what == "root":
        with Path(words[0]).open("rb") as stream, Path(words[1]).open("wb") as out:
            print(write_root(stream, out, epoch=int(words[2])))
    else:
        print(write_image(Path(words[0]), [Path(folder) for folder in words[1:]], Path("/")))


if __name__ == "__main__":
    main(*sys.argv[1:])
