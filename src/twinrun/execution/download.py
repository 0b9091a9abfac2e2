"""Files of a public repository on this disk: resumed where a connection broke, checked by digest."""

from __future__ import annotations

import contextlib
import fnmatch
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of requests, httpx or httpx2
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there
from huggingface_hub.utils.sha import git_hash

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import cannot_write, sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, load_json

LISTING = "files.json"
# A broken connection is taken up again until it broke this often in a row without a chunk more.
ATTEMPTS = 3
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OF_CONNECTION = (ConnectionError, TimeoutError)
_KEPT = "what has come is kept: the same command goes on from there"


@dataclass(frozen=True)
class Repository:
    """One commit of a repository; a branch would bring other bytes tomorrow."""

    name: str
    revision: str
    kind: str = "dataset"
    endpoint: str | None = None
    """Server; HF_ENDPOINT or the public one when None."""


class RemoteFile(Frozen):
    """One file as the repository lists it."""

    path: str
    size: int
    digest: str
    """SHA-256 of a file in large-file storage, else its git blob's SHA-1."""


class Listing(Frozen):
    """Files of one commit that match a pattern; kept beside them, so that they can be checked offline."""

    pattern: str
    files: tuple[RemoteFile, ...]


def fetch(
    source: Repository, pattern: str, *, folder: Path, say: Callable[[str], None], limit: int | None = None
) -> list[Path]:
    """Bring the files of `source` that match `pattern` to `folder` and return their paths, sorted.

    What is there and intact is kept; with everything there, the network is not used.

    Args:
        pattern: shell pattern of paths inside the repository; its folder part has no wildcard.
        limit: take only this many files, the first by name.

    Raises:
        InputError: the endpoint is no address, the revision no commit, or nothing matches.
        MachineError: the server or the disk failed, or a file is not the published one.
    """
    wanted = _listing(source, pattern, folder / LISTING).files[:limit]
    for number, file in enumerate(wanted, start=1):
        target = folder / file.path
        if not target.resolve().is_relative_to(folder.resolve()):
            raise MachineError("the server lists a file outside its repository", place=file.path)
        if not is_intact(target, file):
            _fetch_file(source, file, target)
        say(f"{number}/{len(wanted)} {file.path}: {file.size} bytes, intact")
    return [folder / file.path for file in wanted]


def is_intact(path: Path, file: RemoteFile) -> bool:
    """Tell whether the file at `path` is the published one; it is read whole."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    sha1 = _COMMIT.fullmatch(file.digest)
    return file.digest == (git_hash(path.read_bytes()) if sha1 else sha256_of_file(path))


def _listing(source: Repository, pattern: str, kept: Path) -> Listing:
    """Return the listing kept on this disk, or ask the server for it."""
    if kept.is_file() and (listing := load_json(kept, Listing)).pattern == pattern:
        return listing
    place = f"{source.name}@{source.revision}"
    if not _COMMIT.fullmatch(source.revision):
        raise InputError("not a commit", place=place, allowed="40 hexadecimal digits")
    if source.endpoint and not source.endpoint.startswith(("http://", "https://")):
        raise InputError("not an address of the web", place=source.endpoint, allowed="http:// or https://")
    api, parent = HfApi(endpoint=source.endpoint), str(PurePosixPath(pattern).parent).removeprefix(".")
    with _transfer(f"{api.endpoint}/{source.name}"):
        files = [
            RemoteFile(path=file.path, size=file.size, digest=file.lfs.sha256 if file.lfs else file.blob_id)
            for file in api.list_repo_tree(
                source.name, parent or None, revision=source.revision, repo_type=source.kind
            )
            if isinstance(file, RepoFile) and fnmatch.fnmatchcase(file.path, pattern)
        ]
    if not files:
        raise InputError("no file matches", place=place, found=pattern)
    listing = Listing(pattern=pattern, files=tuple(sorted(files, key=lambda file: file.path)))
    write_atomically(kept, listing.model_dump_json(indent=1) + "\n")
    return listing


def _fetch_file(source: Repository, file: RemoteFile, target: Path) -> None:
    """Bring one file to `target`, in a part that later runs append to.

    `hf_hub_download` removes what a broken connection left, in newer versions.
    """
    commit = {"repo_type": source.kind, "revision": source.revision}
    address = hf_hub_url(source.name, file.path, endpoint=source.endpoint, **commit)
    part = target.with_name(f"{target.name}.part")
    with _transfer(address, part):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        failures = 0
        while (before := part.stat().st_size) < file.size:
            with part.open("ab") as stream:
                try:
                    http_get(
                        address,
                        stream,
                        resume_size=before,
                        headers=build_hf_headers(),
                        expected_size=file.size,
                    )
                except (OSError, HTTPError):
                    failures = 0 if stream.tell() > before else failures + 1
                    if failures == ATTEMPTS:
                        raise
        if is_intact(part, file):
            part.replace(target)
            return
        part.unlink()
    raise MachineError(
        "what came is not the published file, and was removed",
        place=address,
        allowed=f"digest {file.digest}",
        hint="a proxy or mirror may have changed it: try again, or name another endpoint",
    )


@contextlib.contextmanager
def _transfer(address: str, part: Path | None = None) -> Iterator[None]:
    """Turn what the server, the connection or the disk refuses into a MachineError."""
    try:
        yield
    except (OSError, HTTPError) as error:
        # Errors of the system have a number; those of the HTTP libraries have none.
        if part and isinstance(error, OSError) and error.errno and not isinstance(error, _OF_CONNECTION):
            raise cannot_write(error, part, kept=_KEPT) from None
        answer = getattr(error, "response", None)
        raise MachineError(
            "the download failed",
            place=address,
            found=str(error) if answer is None else f"status {answer.status_code}",
            hint=f"{_KEPT}; docs/guides/offline.md tells of proxies and of machines without a network",
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = "the server's answer is not a list of files"
        raise MachineError(message, place=address, found=repr(error)) from None
