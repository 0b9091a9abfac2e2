"""Files of a public repository on this disk, each held against its digest."""

from __future__ import annotations

import contextlib
import fnmatch
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of requests, httpx or httpx2
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import git_hash

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_bytes, sha256_of_file, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.processes import tool_output
from twinrun.foundation.redaction import redacted
from twinrun.protocol.evaluation import PackageSource

_COMMIT = r"[0-9a-f]{40}"


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

    @property
    def where(self) -> dict[str, Any]:
        """What the library is told beside its name."""
        own = {"repo_type": self.kind, "revision": self.revision}
        return own | {"endpoint": self.endpoint, "token": self.token}


class RemoteFile(Frozen):
    """One file as the repository lists it."""

    path: str
    size: int
    digest: str
    """SHA-256 of a file in large-file storage, else its git blob's SHA-1."""

    def is_at(self, place: Path) -> bool:
        """Tell whether the file at `place` is this one; it is read whole."""
        if not place.is_file() or place.stat().st_size != self.size:
            return False
        blob = re.fullmatch(_COMMIT, self.digest)
        return self.digest == (git_hash(place.read_bytes()) if blob else sha256_of_file(place))


class Listing(Frozen):
    """Files of one commit that match a pattern, with their digests, as a server has given them."""

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
        MachineError: the server failed, or a file is not the published one.
    """
    say(f"fetching {source.name} at {source.revision[:12]}: {folder}")
    wanted = listed(source, patterns, folder=folder)[:limit]
    for number, file in enumerate(wanted, start=1):
        target, place = folder / file.path, f"{source.server}/{source.name}/{file.path}"
        if not target.resolve().is_relative_to(folder.resolve()):
            raise MachineError("the server lists a file outside its repository", place=file.path)
        if not file.is_at(target):
            target.unlink(missing_ok=True)
            # `snapshot_download` lists the repository again, reports no single file and checks sizes alone.
            with _transfer(place):
                hf_hub_download(source.name, file.path, **source.where, local_dir=folder)
            if not file.is_at(target):
                target.unlink()
                message, allowed = "what came is not the published file, and was removed", file.digest
                hint = "a proxy or mirror may have changed it: try again, or name another endpoint"
                raise MachineError(message, place=place, allowed=f"digest {allowed}", hint=hint)
        say(f"{number}/{len(wanted)} {file.path}: {file.size} bytes, intact")
    return [folder / file.path for file in wanted]


def listed(source: RepositoryCommit, patterns: Sequence[str], *, folder: Path) -> tuple[RemoteFile, ...]:
    """Return the files of `source` that match a pattern, as `folder` keeps them or its server says.

    Raises:
        InputError: the endpoint is no address, the revision no commit, or nothing matches.
        MachineError: the server failed.
    """
    pattern = "\n".join(patterns)
    # Kept beside the files, which are checked offline; another server's list holds nothing of this one.
    kept = folder / f"files-{sha256_of_bytes(f'{source.server} {pattern}'.encode())[:12]}.json"
    if kept.is_file():
        return load_json(kept, Listing).files
    place = f"{source.name}@{source.revision}"
    if not re.fullmatch(_COMMIT, source.revision):
        raise InputError("not a commit", place=place, allowed="40 hexadecimal digits")
    if source.endpoint and not source.endpoint.startswith(("http://", "https://")):
        found = redacted(source.endpoint)
        raise InputError("not an address of the web", place=found, allowed="http:// or https://")
    api = HfApi(endpoint=source.endpoint, token=source.token)
    parent = str(PurePosixPath(patterns[0]).parent).removeprefix(".")
    with _transfer(f"{source.server}/{source.name}"):
        tree = api.list_repo_tree(
            source.name, parent or None, revision=source.revision, repo_type=source.kind
        )
        files = [
            RemoteFile(path=file.path, size=file.size, digest=file.lfs.sha256 if file.lfs else file.blob_id)
            for file in tree
            if isinstance(file, RepoFile) and any(fnmatch.fnmatchcase(file.path, one) for one in patterns)
        ]
    if not files:
        raise InputError("no file matches", place=place, found=pattern)
    in_order = tuple(sorted(files, key=lambda file: file.path))
    write_atomically(kept, Listing(files=in_order).model_dump_json(indent=1) + "\n")
    return in_order


@contextlib.contextmanager
def _transfer(place: str) -> Iterator[None]:
    """Turn what the server or the connection refuses into a MachineError; a full disk is told as any is."""
    try:
        yield
    except (OSError, HTTPError, AttributeError, KeyError, TypeError, ValueError) as error:
        # Errors of the system have a number; those of the HTTP libraries have none.
        of_system = isinstance(error, OSError) and error.errno
        if of_system and not isinstance(error, (ConnectionError, TimeoutError)):
            raise
        answers = (getattr(one, "response", None) for one in (error, error.__cause__))
        answer = next((one for one in answers if one is not None), None)
        found = redacted(str(error)) if answer is None else f"status {answer.status_code}"
        hint = "whole files that have come are kept: the same command goes on from there;"
        hint += " docs/guides/offline.md tells of proxies and of machines without a network"
        raise MachineError("the download failed", place=place, found=found, hint=hint) from None


def fetch_wheel(source: PackageSource, downloads: Path, *, say: Callable[[str], None]) -> Path:
    """Return the wheel with the digest of `source`, in a folder of its own.

    pip reads its own configuration of indexes, proxies and certificates, and takes no other digest.

    Raises:
        MachineError: pip failed, or the index has another wheel.
    """
    pinned, folder = f"{source.package}=={source.version}", downloads / source.package / source.sha256
    if not (there := [*folder.glob("*.whl")]) or sha256_of_file(there[0]) != source.sha256:
        say(f"fetching {pinned}: {folder}")
        requirement = folder / "requirements.txt"
        write_atomically(requirement, f"{pinned} --hash=sha256:{source.sha256}\n")
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"),
            *("--require-hashes", "--only-binary=:all:", "--disable-pip-version-check"),
            *("--progress-bar=off", "--dest", str(folder), "--requirement", str(requirement)),
        ]
        failure, allowed = "the package cannot be had", f"its wheel with sha256 {source.sha256}"
        hint = "check the network and the index that pip is configured for"
        tool_output(command, failure=failure, place=pinned, allowed=allowed, hint=hint)
    return next(folder.glob("*.whl"))
