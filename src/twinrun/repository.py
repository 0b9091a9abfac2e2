"""What a public data or model repository holds at one commit, with the digest of every file.

The layout of addresses is that of the Hugging Face Hub; another server may offer the same.
"""

from __future__ import annotations

import fnmatch
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from twinrun.errors import InputError, MachineError
from twinrun.manifest import Frozen

TIMEOUT_SECONDS = 60
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NEXT_PAGE = re.compile(r'<([^>]+)>;\s*rel="next"')


class Repository(Frozen):
    """One commit of a repository."""

    name: str
    """Owner and name, for example `allenai/c4`."""
    revision: str
    """Commit, 40 hexadecimal digits: a branch would bring other bytes tomorrow."""
    kind: Literal["datasets", "models"] = "datasets"

    def listing_address(self, endpoint: str, folder: str) -> str:
        """Return where the server lists the files of `folder`."""
        path = urllib.parse.quote(f"{self.name}/tree/{self.revision}/{folder}".rstrip("/"))
        return f"{endpoint.rstrip('/')}/api/{self.kind}/{path}"

    def file_address(self, endpoint: str, path: str) -> str:
        """Return where the server keeps the file `path`."""
        prefix = "datasets/" if self.kind == "datasets" else ""
        file = urllib.parse.quote(f"{self.name}/resolve/{self.revision}/{path}")
        return f"{endpoint.rstrip('/')}/{prefix}{file}"


class RemoteFile(Frozen):
    """One file as the repository lists it."""

    path: str
    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    digest: str
    """SHA-256 of a file in large-file storage, else its git blob's SHA-1; hexadecimal."""


class Listing(Frozen):
    """Files of one commit that match a pattern; kept beside them, so that they can be checked offline."""

    repository: Repository
    pattern: str
    files: tuple[RemoteFile, ...]


def list_files(repository: Repository, pattern: str, *, endpoint: str) -> Listing:
    """Ask the server for the files that match `pattern`, sorted by path.

    Args:
        pattern: shell pattern of paths inside the repository; its folder part has no wildcard.

    Raises:
        InputError: the revision is not a commit, or nothing matches.
        MachineError: the server cannot be reached or answers something else.
    """
    if not _COMMIT.fullmatch(repository.revision):
        raise InputError(
            "not a commit",
            place=f"{repository.name}:revision",
            found=repository.revision,
            allowed="40 hexadecimal digits",
        )
    files = sorted(_matching(repository, pattern, endpoint), key=lambda file: file.path)
    if not files:
        raise InputError("no file matches", place=f"{repository.name}@{repository.revision}", found=pattern)
    return Listing(repository=repository, pattern=pattern, files=tuple(files))


def open_address(address: str, *, start: int = 0) -> Any:
    """Return the open answer of `address`, from byte `start` on if the server knows ranges.

    Raises:
        MachineError: the address is not one of the web, or the server refused.
        OSError, http.client.HTTPException: the connection could not be made.
    """
    if not address.startswith(("http://", "https://")):
        raise MachineError("not an address of the web", place=address, allowed="http:// or https://")
    request = urllib.request.Request(address, headers={"Range": f"bytes={start}-"} if start else {})  # noqa: S310 checked above
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)  # noqa: S310 checked above
    except urllib.error.HTTPError as error:
        raise unreachable(address, f"status {error.code}") from None


def unreachable(address: str, reason: str) -> MachineError:
    """Return the error of a transfer that failed for `reason`."""
    return MachineError(
        "the download failed",
        place=address,
        found=reason,
        hint="what has come is kept: the same command goes on from there; behind a proxy set HTTPS_PROXY",
    )


def _matching(repository: Repository, pattern: str, endpoint: str) -> Iterator[RemoteFile]:
    parent = PurePosixPath(pattern).parent.as_posix()
    address: str | None = repository.listing_address(endpoint, "" if parent == "." else parent)
    while address:
        entries, link = _page(address)
        for entry in entries:
            if entry["type"] == "file" and fnmatch.fnmatchcase(entry["path"], pattern):
                yield _remote_file(entry, address)
        following = _NEXT_PAGE.search(link)
        address = urllib.parse.urljoin(address, following[1]) if following else None


def _page(address: str) -> tuple[list[dict[str, Any]], str]:
    """Return one page of a listing and the header that names the next."""
    try:
        with open_address(address) as response:
            content, link = response.read(), response.headers.get("Link", "")
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(address, str(error)) from None
    try:
        entries = json.loads(content)
    except ValueError:
        entries = None
    if not isinstance(entries, list) or not all(_is_entry(entry) for entry in entries):
        raise MachineError("the server's answer is not a list of files", place=address)
    return entries, link


def _is_entry(entry: object) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("path"), str) and "type" in entry


def _remote_file(entry: dict[str, Any], address: str) -> RemoteFile:
    path = PurePosixPath(entry["path"])
    # The path becomes one on this disk: it must stay below the folder.
    if path.is_absolute() or ".." in path.parts:
        raise MachineError("the server lists a file outside its repository", place=address, found=str(path))
    try:
        large = entry.get("lfs")
        digest = large["oid"] if large else entry["oid"]
        return RemoteFile(path=entry["path"], size=entry["size"], digest=digest)
    except (KeyError, TypeError, ValidationError):
        raise MachineError("the server lists a file without size or digest", place=address) from None
