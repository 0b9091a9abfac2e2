"""Files of a public repository on this disk, each held against its digest."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of requests, httpx or httpx2
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import cannot_write, sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.processes import tool_output
from twinrun.foundation.redaction import redacted
from twinrun.protocol.evaluation import PackageSource

LISTING = "files.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OF_CONNECTION = (ConnectionError, TimeoutError)
_KEPT = "whole files that have come are kept: the same command goes on from there"


@dataclass(frozen=True)
class RepositoryCommit:
    """One commit of a repository; a branch would bring other bytes tomorrow."""

    name: str
    revision: str
    kind: str = "dataset"
    endpoint: str | None = None
    """Server; HF_ENDPOINT or the public one when None."""

    @property
    def server(self) -> str:
        """Address of the server, without a password."""
        return redacted(HfApi(endpoint=self.endpoint).endpoint)

    @property
    def token(self) -> Literal[False] | None:
        """None, with which the library takes the user's own, for the configured hub over HTTPS; else none."""
        configured = self.endpoint is None or self.endpoint.rstrip("/") == HfApi().endpoint.rstrip("/")
        return None if configured and HfApi().endpoint.startswith("https://") else False


class RemoteFile(Frozen):
    """One file as the repository lists it."""

    path: str
    size: int
    digest: str
    """SHA-256 of a file in large-file storage, else its git blob's SHA-1."""


class Listing(Frozen):
    """Files of one commit that match a pattern; kept beside them, so that they can be checked offline."""

    pattern: str
    """One or more, each a line."""
    endpoint: str | None = None
    """Server that gave the list, and so the digests; null in lists from before it was kept."""
    files: tuple[RemoteFile, ...]


def fetch(
    source: RepositoryCommit,
    patterns: Sequence[str],
    *,
    folder: Path,
    say: Callable[[str], None],
    limit: int | None = None,
) -> list[Path]:
    """Bring the files of `source` that match a pattern to `folder` and return their paths, sorted.

    What is there and intact is kept; with everything there, the network is not used.

    Args:
        patterns: shell patterns of paths inside the repository, all of one folder, which has no wildcard.
        limit: take only this many files, the first by name.

    Raises:
        InputError: the endpoint is no address, the revision no commit, or nothing matches.
        MachineError: the server or the disk failed, or a file is not the published one.
    """
    wanted = listed(source, patterns, folder=folder)[:limit]
    for number, file in enumerate(wanted, start=1):
        target = folder / file.path
        if not target.resolve().is_relative_to(folder.resolve()):
            raise MachineError("the server lists a file outside its repository", place=file.path)
        if not is_intact(target, file):
            _fetch_file(source, file, folder)
        say(f"{number}/{len(wanted)} {file.path}: {file.size} bytes, intact")
    return [folder / file.path for file in wanted]


def is_intact(path: Path, file: RemoteFile) -> bool:
    """Tell whether the file at `path` is the published one; it is read whole."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    sha1 = _COMMIT.fullmatch(file.digest)
    return file.digest == (git_hash(path.read_bytes()) if sha1 else sha256_of_file(path))


def listed(source: RepositoryCommit, patterns: Sequence[str], *, folder: Path) -> tuple[RemoteFile, ...]:
    """Return the files of `source` that match a pattern, as `folder` keeps them or the server says.

    Raises:
        InputError: the endpoint is no address, the revision no commit, or nothing matches.
        MachineError: the server failed.
    """
    kept, pattern = folder / LISTING, "\n".join(patterns)
    if kept.is_file() and (listing := load_json(kept, Listing)).pattern == pattern:
        if listing.endpoint in (None, source.server):
            return listing.files
        raise InputError(
            "the list of these files is another server's, and digests hold files against it alone",
            place=str(kept),
            found=listing.endpoint,
            allowed=source.server,
            hint=f"name that server with --endpoint, or remove {folder} to fetch all of it again",
        )
    place = f"{source.name}@{source.revision}"
    if not _COMMIT.fullmatch(source.revision):
        raise InputError("not a commit", place=place, allowed="40 hexadecimal digits")
    if source.endpoint and not source.endpoint.startswith(("http://", "https://")):
        found = redacted(source.endpoint)
        raise InputError("not an address of the web", place=found, allowed="http:// or https://")
    api = HfApi(endpoint=source.endpoint, token=source.token)
    parent = str(PurePosixPath(patterns[0]).parent).removeprefix(".")
    with _transfer(f"{source.server}/{source.name}"):
        files = [
            RemoteFile(path=file.path, size=file.size, digest=file.lfs.sha256 if file.lfs else file.blob_id)
            for file in api.list_repo_tree(
                source.name, parent or None, revision=source.revision, repo_type=source.kind
            )
            if isinstance(file, RepoFile) and any(fnmatch.fnmatchcase(file.path, one) for one in patterns)
        ]
    if not files:
        raise InputError("no file matches", place=place, found=pattern)
    listing = Listing(
        pattern=pattern, endpoint=source.server, files=tuple(sorted(files, key=lambda file: file.path))
    )
    write_atomically(kept, listing.model_dump_json(indent=1) + "\n")
    return listing.files


def _fetch_file(source: RepositoryCommit, file: RemoteFile, folder: Path) -> None:
    """Bring one file to `folder`, and remove what is not the published one."""
    target = folder / file.path
    address = hf_hub_url(
        source.name,
        file.path,
        repo_type=source.kind,
        revision=source.revision,
        endpoint=source.endpoint,
    )
    with _transfer(address, target):
        target.unlink(missing_ok=True)
        # `snapshot_download` lists the repository again, reports no single file and checks sizes alone.
        hf_hub_download(
            source.name,
            file.path,
            repo_type=source.kind,
            revision=source.revision,
            endpoint=source.endpoint,
            token=source.token,
            local_dir=folder,
        )
    if not is_intact(target, file):
        target.unlink()
        raise MachineError(
            "what came is not the published file, and was removed",
            place=redacted(address),
            allowed=f"digest {file.digest}",
            hint="a proxy or mirror may have changed it: try again, or name another endpoint",
        )


@contextlib.contextmanager
def _transfer(address: str, target: Path | None = None) -> Iterator[None]:
    """Turn what the server, the connection or the disk refuses into a MachineError."""
    address = redacted(address)
    try:
        yield
    except (OSError, HTTPError) as error:
        # Errors of the system have a number; those of the HTTP libraries have none.
        if target and isinstance(error, OSError) and error.errno and not isinstance(error, _OF_CONNECTION):
            raise cannot_write(error, target, kept=_KEPT) from None
        answers = (getattr(one, "response", None) for one in (error, error.__cause__))
        answer = next((one for one in answers if one is not None), None)
        raise MachineError(
            "the download failed",
            place=address,
            found=redacted(str(error)) if answer is None else f"status {answer.status_code}",
            hint=f"{_KEPT}; docs/guides/offline.md tells of proxies and of machines without a network",
        ) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = "the server's answer is not a list of files"
        raise MachineError(message, place=address, found=repr(error)) from None


def fetch_wheel(source: PackageSource, folder: Path, *, say: Callable[[str], None]) -> Path:
    """Return the wheel in `folder`, downloading it where it is not there; it has the digest of `source`.

    pip reads its own configuration of indexes, proxies and certificates.

    Raises:
        MachineError: pip failed, or the index has another wheel; nothing was left behind.
    """
    for found in sorted(folder.glob("*.whl")):
        if sha256_of_file(found) == source.sha256:
            return found
    folder.mkdir(parents=True, exist_ok=True)
    say(f"fetching {source.package} {source.version}: {folder}")
    with tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as name:
        partial = Path(name)
        requirement = partial / "requirements.txt"
        requirement.write_text(
            f"{source.package}=={source.version} --hash=sha256:{source.sha256}\n", encoding="utf-8"
        )
        arguments = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"),
            *("--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off"),
            *("--dest", str(partial), "--requirement", str(requirement)),
        ]
        tool_output(
            arguments,
            failure="the package cannot be had",
            place=f"{source.package}=={source.version}",
            allowed=f"its wheel with sha256 {source.sha256}",
            hint="check the network and the index that pip is configured for",
        )
        (wheel,) = partial.glob("*.whl")
        return wheel.replace(folder / wheel.name)
