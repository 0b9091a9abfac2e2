"""Layers: the difference between the root file systems of two stages, as a reproducible tar."""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, cast

# Files that differ from build to build, or that only the installation of packages needs.
_EXCLUDED = re.compile(
    r"(?:tmp|run|proc|sys|dev|var/tmp|var/log|var/cache/apt|var/cache/ldconfig|var/lib/apt/lists|root/\.cache)/.+"
    # Backups of package tools.
    r"|var/cache/debconf/.+-old|var/lib/dpkg/.+-old|etc/(?:passwd|group|shadow|gshadow|subuid|subgid)-"
    # Mount points of the engine, and its link to /proc.
    r"|etc/(?:resolv\.conf|hosts|hostname|machine-id|mtab)|\.dockerenv"
)
_WHITEOUT = ".wh."
_EXTENDED_ATTRIBUTE = "SCHILY.xattr."
# tarfile joins and cuts its buffer for each piece that it reads or writes: a larger one costs more than it
# saves.
_CHUNK = 1 << 16
# Files that may be unchanged are buffered in memory up to this size, then on disk.
_BUFFER_BYTES = 1 << 26


class FileEntry(NamedTuple):
    """Metadata and checksum of one path, without its times; a hard link has the entry of its target."""

    kind: bytes
    mode: int
    owner: tuple[int, int]
    target: str
    device: tuple[int, int]
    extended_attributes: tuple[tuple[str, str], ...]
    size: int
    sha256: str


Snapshot = Mapping[str, FileEntry]
"""Root file system by path, without a leading slash."""


class Layer(NamedTuple):
    """Result of writing one layer."""

    diff_id: str
    """`sha256:` and the checksum of the tar."""
    size: int
    """Bytes of the tar."""
    missing_targets: frozenset[str]
    """Unchanged targets of new hard links; a layer without them cannot be unpacked."""


def is_excluded(path: str) -> bool:
    """Say whether a path is excluded from every layer."""
    return _EXCLUDED.fullmatch(path) is not None


def read_snapshot(layers: Iterable[Path]) -> Snapshot:
    """Return the snapshot of the root file system that layers make, the lowest first.

    Raises:
        tarfile.TarError: one is no tar.
    """
    snapshot: dict[str, FileEntry] = {}
    for layer in layers:
        with layer.open("rb") as stream:
            for name, member, content in _members(stream):
                path = PurePosixPath(name)
                if path.name.startswith(_WHITEOUT):
                    _remove(snapshot, str(path.with_name(path.name.removeprefix(_WHITEOUT))))
                else:
                    if not member.isdir() and name in snapshot and snapshot[name].kind == tarfile.DIRTYPE:
                        _remove(snapshot, name)
                    link = snapshot[_name(member.linkname)] if member.islnk() else None
                    snapshot[name] = link or _hashed_entry(member, content)
    return snapshot


def _remove(snapshot: dict[str, FileEntry], top: str) -> None:
    for name in [name for name in snapshot if name == top or name.startswith(f"{top}/")]:
        del snapshot[name]


def write_layer(
    stream: IO[bytes],
    out: IO[bytes],
    *,
    parent: Snapshot | None,
    epoch: int,
    include: frozenset[str] = frozenset(),
    on_write: Callable[[int], object] = int,
) -> Layer:
    """Write to `out` the difference between the root file system in `stream` and its parent.

    Args:
        stream: a tar with parents before their children.
        parent: None for a stage from nothing, whose layer has its files alone: empty folders are an engine's
            mount points.
        epoch: modification time of every path, in seconds since 1970.
        include: unchanged files to write all the same.
        on_write: called with the number of bytes written so far.

    Raises:
        tarfile.TarError: the stream is no tar.
    """
    hashed = _HashingFile(out, on_write)
    with tarfile.TarFile(
        fileobj=cast("IO[bytes]", hashed), mode="w", copybufsize=_CHUNK, format=tarfile.PAX_FORMAT
    ) as tar:
        writer = _LayerWriter(tar, parent=parent, epoch=epoch, include=include)
        for name, member, content in _members(stream):
            writer.add(name, member, content)
        writer.write_whiteouts()
    digest = f"sha256:{hashed.digest.hexdigest()}"
    return Layer(digest, hashed.size, frozenset(writer.missing_targets))


class _LayerWriter:
    """Writer of a layer; compares member by member, because a root file system does not fit into memory."""

    def __init__(
        self, tar: tarfile.TarFile, *, parent: Snapshot | None, epoch: int, include: frozenset[str]
    ) -> None:
        self._tar = tar
        self._parent = parent or {}
        self._from_nothing = parent is None
        self._epoch = epoch
        self._include = include
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._written: set[str] = set()
        self._snapshot: dict[str, FileEntry] = {}
        self.missing_targets: set[str] = set()

    def add(self, name: str, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """Write one member unless the parent has the same."""
        if member.islnk():
            self._link(name, member)
        elif content is None:
            entry = self._snapshot[name] = _file_entry(member)
            if member.isdir():
                self._folders[name] = member
            if entry != self._parent.get(name) and not (member.isdir() and self._from_nothing):
                self._write(name, member, None)
        else:
            self._file(name, member, content)

    def _file(self, name: str, member: tarfile.TarInfo, content: IO[bytes]) -> None:
        known = self._parent.get(name)
        if name in self._include or known is None or known.size != member.size:
            reader = _HashingFile(content)
            self._write(name, member, reader)
            self._snapshot[name] = _file_entry(member, reader.digest.hexdigest())
            return
        with tempfile.SpooledTemporaryFile(_BUFFER_BYTES) as buffer:
            reader = _HashingFile(content)
            shutil.copyfileobj(reader, buffer, _CHUNK)
            entry = self._snapshot[name] = _file_entry(member, reader.digest.hexdigest())
            if entry != known:
                buffer.seek(0)
                self._write(name, member, buffer)

    def _link(self, name: str, member: tarfile.TarInfo) -> None:
        target = _name(member.linkname)
        entry = self._snapshot[name] = self._snapshot[target]
        if entry == self._parent.get(name) and name not in self._include:
            return
        if target not in self._written:
            # A layer is unpacked by itself: its links cannot leave it.
            self.missing_targets.add(target)
        self._write(name, member, None)

    def write_whiteouts(self) -> None:
        """Write a whiteout for each path that only the parent has; of a tree, for its top alone."""
        for name in sorted(self._parent.keys() - self._snapshot.keys()):
            path = PurePosixPath(name)
            folder = "" if path.parent == PurePosixPath() else str(path.parent)
            if not folder or folder in self._folders:
                self._write(str(path.with_name(f"{_WHITEOUT}{path.name}")), tarfile.TarInfo(), None)

    def _write(self, name: str, member: tarfile.TarInfo, content: object) -> None:
        # Unpacking creates a folder that the layer lacks, with another mode.
        for folder in map(str, reversed(PurePosixPath(name).parents[:-1])):
            if folder not in self._written:
                self._put(folder, self._folders[folder], None)
        self._put(name, member, content)

    def _put(self, name: str, member: tarfile.TarInfo, content: object) -> None:
        if name not in self._written:
            self._written.add(name)
            self._tar.addfile(_normalised_header(name, member, self._epoch), content)  # type: ignore[arg-type]


class _HashingFile:
    """File that hashes what is read or written."""

    def __init__(self, file: IO[bytes], on_write: Callable[[int], object] = int) -> None:
        self._file = file
        self._on_write = on_write
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        self._on_write(self.size)
        return self._file.write(data)

    def tell(self) -> int:
        """Return where the next byte goes: tarfile buffers once more what has no places."""
        return self.size

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _members(stream: IO[bytes]) -> Iterator[tuple[str, tarfile.TarInfo, IO[bytes] | None]]:
    """Yield name, header and content of every path that is not excluded; read the stream to its end."""
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK) as tar:
        for member in tar:
            name = _name(member.name)
            if name not in ("", ".") and not is_excluded(name):
                yield name, member, tar.extractfile(member) if member.isreg() else None
            # tarfile keeps every header that it has read.
            tar.members = []  # type: ignore[attr-defined]
    while stream.read(_CHUNK):
        pass


def _name(path: str) -> str:
    return path.removeprefix("./").strip("/")


def _hashed_entry(member: tarfile.TarInfo, content: IO[bytes] | None) -> FileEntry:
    if content is None:
        return _file_entry(member)
    return _file_entry(member, hashlib.file_digest(content, "sha256").hexdigest())  # type: ignore[arg-type]


def _file_entry(member: tarfile.TarInfo, sha256: str = "") -> FileEntry:
    return FileEntry(
        kind=member.type,
        # Some engines repeat the kind of file in it.
        mode=member.mode & 0o7777,
        owner=(member.uid, member.gid),
        target=member.linkname,
        device=(member.devmajor, member.devminor),
        extended_attributes=tuple(sorted(_extended_attributes(member).items())),
        size=member.size,
        sha256=sha256,
    )


def _extended_attributes(member: tarfile.TarInfo) -> dict[str, str]:
    return {key: value for key, value in member.pax_headers.items() if key.startswith(_EXTENDED_ATTRIBUTE)}


def _normalised_header(name: str, member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """Return a header without what depends on the machine or the time of the build."""
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.size = member.type, member.mode, member.size
    header.uid, header.gid, header.mtime = member.uid, member.gid, epoch
    header.linkname = _name(member.linkname) if member.islnk() else member.linkname
    header.devmajor, header.devminor = member.devmajor, member.devminor
    header.pax_headers = _extended_attributes(member)
    return header
