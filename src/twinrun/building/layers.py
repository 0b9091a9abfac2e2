"""A layer is what one stage of a build has and the stage before it has not, without traces of its making."""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import IO, NamedTuple, cast

# What differs from build to build, and what is needed only while packages are installed.
_VOLATILE = re.compile(
    r"(?:tmp|run|proc|sys|dev|var/tmp|var/log|var/cache/apt|var/cache/ldconfig|var/lib/apt/lists|root/\.cache)/.+"
    # What package tools keep of the state before.
    r"|var/cache/debconf/.+-old|var/lib/dpkg/.+-old|etc/(?:passwd|group|shadow|gshadow|subuid|subgid)-"
    # Where the engine mounts its own files.
    r"|etc/(?:resolv\.conf|hosts|hostname|machine-id)|\.dockerenv"
)
_ATTRIBUTE = "SCHILY.xattr."
# tarfile joins and cuts its buffer for each piece that it reads or writes: a larger one costs more than it
# saves.
_CHUNK = 1 << 16
# Files that may be unchanged wait in memory up to this size, then on disk.
_WAITING_BYTES = 1 << 26


class Entry(NamedTuple):
    """All of one path but its times. A hard link has the entry of what it leads to."""

    kind: bytes
    mode: int
    owner: tuple[int, int]
    target: str
    device: tuple[int, int]
    attributes: tuple[tuple[str, str], ...]
    size: int
    sha256: str


Listing = Mapping[str, Entry]
"""Every path of a root file system, without a leading slash."""


class Layer(NamedTuple):
    """One layer as it was written."""

    diff_id: str
    """`sha256:` and the digest of the tar."""
    size: int
    """Bytes of the tar."""
    listing: Listing
    """Of the whole root file system, this layer on top."""
    unlinked: frozenset[str]
    """Unchanged files that a new hard link leads to: without them the layer is void."""


def is_volatile(path: str) -> bool:
    """Say whether a path is left out of every layer."""
    return _VOLATILE.fullmatch(path) is not None


def read_listing(stream: IO[bytes]) -> Listing:
    """Return what the tar `stream` of a root file system holds; raises tarfile.TarError."""
    listing: dict[str, Entry] = {}
    for name, member, content in _members(stream):
        listing[name] = listing[_name(member.linkname)] if member.islnk() else _entry(member, content)
    return listing


def write_layer(
    stream: IO[bytes],
    out: IO[bytes],
    *,
    below: Listing,
    epoch: int,
    also: frozenset[str] = frozenset(),
    told: Callable[[int], object] = int,
) -> Layer:
    """Write to `out` what the root file system in `stream` has beyond `below`.

    Args:
        stream: a tar with parents before their children.
        epoch: time of every path, in seconds since 1970.
        also: unchanged files to write all the same.
        told: called with the size of the layer as it grows, in bytes.

    Raises:
        tarfile.TarError: the stream is no tar.
    """
    hashed = _Hashed(out, told)
    with tarfile.open(
        fileobj=cast("IO[bytes]", hashed), mode="w|", bufsize=_CHUNK, format=tarfile.PAX_FORMAT
    ) as tar:
        writer = _Writer(tar, below=below, epoch=epoch, also=also)
        for name, member, content in _members(stream):
            writer.add(name, member, content)
        writer.whiteouts()
    digest = f"sha256:{hashed.digest.hexdigest()}"
    return Layer(digest, hashed.size, writer.listing, frozenset(writer.unlinked))


class _Writer:
    """Compares member by member, because a root file system does not fit into memory."""

    def __init__(self, tar: tarfile.TarFile, *, below: Listing, epoch: int, also: frozenset[str]) -> None:
        self._tar = tar
        self._below = below
        self._epoch = epoch
        self._also = also
        self._folders: dict[str, tarfile.TarInfo] = {}
        self._written: set[str] = set()
        self.listing: dict[str, Entry] = {}
        self.unlinked: set[str] = set()

    def add(self, name: str, member: tarfile.TarInfo, content: IO[bytes] | None) -> None:
        """Write one member, unless it is as below."""
        if member.islnk():
            self._link(name, member)
        elif content is None:
            entry = self.listing[name] = _entry(member, None)
            if member.isdir():
                self._folders[name] = member
            if entry != self._below.get(name):
                self._write(name, member, None)
        else:
            self._file(name, member, content)

    def _file(self, name: str, member: tarfile.TarInfo, content: IO[bytes]) -> None:
        known = self._below.get(name)
        if name in self._also or known is None or known.size != member.size:
            digesting = _Digesting(content)
            self._write(name, member, digesting)
            self.listing[name] = _described(member, digesting.digest.hexdigest())
            return
        with tempfile.SpooledTemporaryFile(_WAITING_BYTES) as waiting:
            digesting = _Digesting(content)
            shutil.copyfileobj(digesting, waiting, _CHUNK)
            entry = self.listing[name] = _described(member, digesting.digest.hexdigest())
            if entry != known:
                waiting.seek(0)
                self._write(name, member, waiting)

    def _link(self, name: str, member: tarfile.TarInfo) -> None:
        target = _name(member.linkname)
        entry = self.listing[name] = self.listing[target]
        if entry == self._below.get(name) and name not in self._also:
            return
        if target not in self._written:
            # A layer is unpacked by itself: a link cannot leave it.
            self.unlinked.add(target)
        self._write(name, member, None)

    def whiteouts(self) -> None:
        """Hide what is below and no longer there; the top of a tree is enough."""
        for name in sorted(self._below.keys() - self.listing.keys()):
            path = PurePosixPath(name)
            parent = "" if path.parent == PurePosixPath() else str(path.parent)
            if not parent or parent in self._folders:
                self._write(str(path.with_name(f".wh.{path.name}")), tarfile.TarInfo(), None)

    def _write(self, name: str, member: tarfile.TarInfo, content: object) -> None:
        # A folder that is not in the layer would be made anew when it is unpacked, with another mode.
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            if str(parent) not in self._written:
                self._put(str(parent), self._folders[str(parent)], None)
        self._put(name, member, content)

    def _put(self, name: str, member: tarfile.TarInfo, content: object) -> None:
        if name not in self._written:
            self._written.add(name)
            self._tar.addfile(_timeless(name, member, self._epoch), content)  # type: ignore[arg-type]


class _Hashed:
    """A file that is only written to, with the digest of what was."""

    def __init__(self, file: IO[bytes], told: Callable[[int], object]) -> None:
        self._file = file
        self._told = told
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.size += len(data)
        self._told(self.size)
        return self._file.write(data)


class _Digesting:
    """A file that is only read from, with the digest of what was."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _members(stream: IO[bytes]) -> Iterator[tuple[str, tarfile.TarInfo, IO[bytes] | None]]:
    """Yield name, header and content of everything that is not volatile; read the stream to its end."""
    with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK) as tar:
        for member in tar:
            name = _name(member.name)
            if name not in ("", ".") and not is_volatile(name):
                yield name, member, tar.extractfile(member) if member.isreg() else None
            # Every header that was read would be kept else.
            tar.members = []  # type: ignore[attr-defined]
    while stream.read(_CHUNK):
        pass


def _name(path: str) -> str:
    return path.removeprefix("./").strip("/")


def _entry(member: tarfile.TarInfo, content: IO[bytes] | None) -> Entry:
    if content is None:
        return _described(member, "")
    return _described(member, hashlib.file_digest(content, "sha256").hexdigest())  # type: ignore[arg-type]


def _described(member: tarfile.TarInfo, sha256: str) -> Entry:
    return Entry(
        kind=member.type,
        mode=member.mode,
        owner=(member.uid, member.gid),
        target=member.linkname,
        device=(member.devmajor, member.devminor),
        attributes=tuple(sorted(_attributes(member).items())),
        size=member.size,
        sha256=sha256,
    )


def _attributes(member: tarfile.TarInfo) -> dict[str, str]:
    return {key: value for key, value in member.pax_headers.items() if key.startswith(_ATTRIBUTE)}


def _timeless(name: str, member: tarfile.TarInfo, epoch: int) -> tarfile.TarInfo:
    """Return a header with nothing in it that depends on the machine or the hour."""
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.size = member.type, member.mode, member.size
    header.uid, header.gid, header.mtime = member.uid, member.gid, epoch
    header.linkname = _name(member.linkname) if member.islnk() else member.linkname
    header.devmajor, header.devminor = member.devmajor, member.devminor
    header.pax_headers = _attributes(member)
    return header
