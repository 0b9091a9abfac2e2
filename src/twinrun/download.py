"""Files of a repository brought to this disk: resumed where a connection broke, checked by digest."""

from __future__ import annotations

import hashlib
import http.client
import os
from pathlib import Path
from typing import Any
from urllib.error import URLError

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from twinrun.errors import MachineError
from twinrun.files import write_atomically
from twinrun.manifest import load_json
from twinrun.repository import Listing, RemoteFile, Repository, list_files, open_address, unreachable

ENDPOINT = "https://huggingface.co"
LISTING = "listing.json"
# A broken connection is taken up again until it broke this often in a row without a byte more.
ATTEMPTS = 5
CHUNK_BYTES = 1 << 20
PARTIAL_CONTENT = 206


def fetch(
    repository: Repository,
    pattern: str,
    *,
    folder: Path,
    limit: int | None = None,
    endpoint: str | None = None,
) -> list[Path]:
    """Bring the files that match `pattern` into `folder` and return their paths, sorted.

    What is there and intact is kept; with everything there, the network is not used.

    Args:
        pattern: shell pattern of paths inside the repository; its folder part has no wildcard.
        limit: take only this many files, the first by name.
        endpoint: server; HF_ENDPOINT or the public one when left out.

    Raises:
        InputError: the revision is not a commit, or nothing matches.
        MachineError: the server or the disk failed, or a file is not the published one.
    """
    server = endpoint or os.environ.get("HF_ENDPOINT") or ENDPOINT
    wanted = _listing(repository, pattern, folder=folder, server=server).files[:limit]
    with Transfer(sum(file.size for file in wanted)) as transfer:
        for number, file in enumerate(wanted, start=1):
            target = folder / file.path
            if not is_intact(target, file):
                _fetch_file(repository.file_address(server, file.path), file, target, transfer)
            transfer.end_file(file, number=number, files=len(wanted))
    return [folder / file.path for file in wanted]


def is_intact(path: Path, file: RemoteFile) -> bool:
    """Tell whether the file at `path` is the published one; it is read whole."""
    return path.is_file() and path.stat().st_size == file.size and _digest(path, file) == file.digest


class Transfer:
    """Progress on stderr: a bar on a terminal, a line a file elsewhere."""

    def __init__(self, size: int) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("downloading", total=size)
        self._ended = 0

    def __enter__(self) -> Transfer:
        # Older versions of rich print an empty line when a disabled bar stops.
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def at(self, size: int) -> None:
        """Show that `size` bytes of the present file are here."""
        self._progress.update(self._task, completed=self._ended + size)

    def end_file(self, file: RemoteFile, *, number: int, files: int) -> None:
        """Show that `file` is here and intact."""
        self._ended += file.size
        self._progress.update(self._task, completed=self._ended, description=f"{number}/{files}")
        if not self._console.is_terminal:
            self._console.print(f"{number}/{files} {file.path}: {file.size} bytes, intact", markup=False)


def _listing(repository: Repository, pattern: str, *, folder: Path, server: str) -> Listing:
    """Return the listing kept in `folder`, or ask the server for it."""
    kept = folder / LISTING
    if kept.is_file():
        listing = load_json(kept, Listing)
        if (listing.repository, listing.pattern) == (repository, pattern):
            return listing
    listing = list_files(repository, pattern, endpoint=server)
    write_atomically(kept, listing.model_dump_json(indent=1) + "\n")
    return listing


def _fetch_file(address: str, file: RemoteFile, target: Path, transfer: Transfer) -> None:
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if _size(part) > file.size:
            part.unlink()
        _fill(part, address, file, transfer)
        if not is_intact(part, file):
            part.unlink()
            raise MachineError(
                "what came is not the published file, and was removed",
                place=address,
                allowed=f"digest {file.digest}",
                hint="a proxy or mirror may have changed it: try again, or name another endpoint",
            )
        part.replace(target)
    except OSError as error:
        raise MachineError(f"cannot write: {error.strerror}", place=str(part)) from None


def _fill(part: Path, address: str, file: RemoteFile, transfer: Transfer) -> None:
    """Append to `part` until it has all bytes of `file`; when the server gives up, `part` stays.

    Raises:
        MachineError: the connection broke too often.
    """
    failures, reason = 0, ""
    while (size := _size(part)) < file.size or not part.exists():
        try:
            _append(part, address, start=size, transfer=transfer)
        except (ConnectionError, TimeoutError, http.client.HTTPException, URLError) as error:
            reason = str(error)
        failures = 0 if _size(part) > size else failures + 1
        if failures == ATTEMPTS:
            raise unreachable(address, reason or "the connection ended early")


def _append(part: Path, address: str, *, start: int, transfer: Transfer) -> None:
    with open_address(address, start=start) as response:
        # A server that knows no ranges sends everything: begin anew.
        goes_on = response.status == PARTIAL_CONTENT
        with part.open("ab" if goes_on else "wb") as stream:
            while chunk := response.read(CHUNK_BYTES):
                stream.write(chunk)
                transfer.at(stream.tell())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path, file: RemoteFile) -> str:
    """Hash as the listing does: SHA-256 for files in large-file storage, else git's blob SHA-1."""
    if len(file.digest) == hashlib.sha256().digest_size * 2:
        digest: Any = hashlib.sha256()
    else:
        # Not for security: it is the name git itself gives to the file.
        digest = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return str(digest.hexdigest())
