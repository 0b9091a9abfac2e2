"""Python packages and checkouts brought to this machine; what comes is verified by who asks for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path

from uv import find_uv_bin

from twinrun.building.parcels import Parcel
from twinrun.building.secrets import redacted
from twinrun.building.tags import platforms
from twinrun.errors import MachineError, RunError
from twinrun.process import last_lines, read_output
from twinrun.repository import open_address
from twinrun.stack import GitSource, Stack

# Of a tree's entry that is a commit of another repository.
_SUBMODULE = "160000"


def fetch_wheels(parcels: Iterable[Parcel], folder: Path, *, stack: Stack) -> None:
    """Download built packages for the stack's platform to `folder`; nothing of them is run.

    pip reads its own configuration: indexes, proxies, certificates.

    Raises:
        MachineError: pip could not get them; the message holds its last lines.
    """
    for requirements in _rounds(parcels):
        _download(requirements, folder, options=_platform(stack))


def _rounds(parcels: Iterable[Parcel]) -> list[list[str]]:
    """Return lists of requirements that pip takes: each version of a package, and what has no hash, apart."""
    rounds: dict[tuple[bool, int], list[str]] = {}
    met: Counter[str] = Counter()
    for requirement, parcel in {_requirement(parcel): parcel for parcel in parcels}.items():
        rounds.setdefault((bool(parcel.digests), met[parcel.name()]), []).append(requirement)
        met[parcel.name()] += 1
    return list(rounds.values())


def _requirement(parcel: Parcel) -> str:
    return " ".join([parcel.entry, *(f"--hash=sha256:{digest}" for digest in parcel.digests)])


def _platform(stack: Stack) -> list[str]:
    options = [part for platform in platforms(stack) for part in ("--platform", platform)]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={stack.interpreter()}", *options]


def _download(requirements: list[str], folder: Path, *, options: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as fresh:
        wanted = Path(fresh) / "requirements.txt"
        wanted.write_text("\n".join(requirements), encoding="utf-8")
        arguments = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps", "--no-input"),
            *("--disable-pip-version-check", "--no-cache-dir", "--progress-bar=off", "--dest", fresh),
            *(*options, "--requirement", str(wanted)),
        ]
        # The lock decides what comes, not what this machine's user wants found elsewhere.
        variables = os.environ | {"PIP_REQUIRE_HASHES": "0"}
        done = subprocess.run(arguments, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(
                "the Python packages cannot be fetched",
                place="pip download",
                found=redacted(last_lines(done.stderr or done.stdout, 6)),
                hint="check the network and pip's configuration, or carry them in with --wheelhouse",
            )
        for file in Path(fresh).iterdir():
            if file != wanted:
                file.replace(folder / file.name)


def fetch_archives(parcels: Iterable[Parcel], folder: Path) -> None:
    """Download source archives to `folder`; pip would run what is in them.

    uv reads its own configuration of indexes to find where they are.

    Raises:
        MachineError: an archive cannot be found or fetched.
    """
    for parcel in parcels:
        address = _address(parcel.entry)
        target = folder / address.rpartition("/")[2]
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".fetching-", delete=False) as fresh:
            try:
                with open_address(address) as stream:
                    shutil.copyfileobj(stream, fresh)
            except (OSError, HTTPException) as error:
                Path(fresh.name).unlink()
                raise MachineError(
                    f"{parcel.entry} cannot be fetched", place=redacted(address), found=redacted(str(error))
                ) from None
        Path(fresh.name).replace(target)


def _address(requirement: str) -> str:
    """Return where the index keeps the source archive of one version."""
    with tempfile.TemporaryDirectory() as name:
        lock = Path(name) / "pylock.toml"
        options = ("--quiet", "--no-deps", "--no-binary", ":all:", "--format", "pylock.toml")
        done = subprocess.run(
            [os.fspath(find_uv_bin()), "pip", "compile", "-", *options, "--output-file", str(lock)],
            input=requirement,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MachineError(
                f"{requirement} cannot be found",
                place="uv pip compile",
                found=redacted(last_lines(done.stderr, 6)),
                hint="check the network and uv's configuration, or carry it in with --wheelhouse",
            )
        (package,) = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
        return str(package["sdist"]["url"])


def checkout(source: GitSource, parcel: Parcel, folder: Path, *, carried: Path | None) -> None:
    """Put the files of the locked commit, with those of its submodules, into `folder`.

    git names commits and files by their content and checks what it receives.

    Args:
        carried: a checkout with its history, from which it is taken without a network.

    Raises:
        MachineError: no commit is locked, or the repository does not have it.
    """
    if not parcel.digests:
        raise MachineError(
            f"no commit of {source.name} is known", place=parcel.lock, hint="run `invoke lock`"
        )
    try:
        _take(str(carried or source.repository), parcel.digests[0], folder)
        if carried is None:
            _git(folder, "submodule", "update", "--quiet", "--init", "--recursive", "--depth=1")
        else:
            _take_submodules(carried, folder)
    except RunError as error:
        raise MachineError(
            f"{source.name} is not to be had at its locked commit",
            place=redacted(str(carried or source.repository)),
            found=redacted(str(error.found)),
            allowed=parcel.digests[0],
            hint="check the network, or carry a checkout in as sources/NAME of the wheelhouse",
        ) from None
    for marker in list(folder.rglob(".git")):
        shutil.rmtree(marker) if marker.is_dir() else marker.unlink()


def _take(origin: str, commit: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _git(folder, "init", "--quiet")
    _git(folder, "fetch", "--quiet", "--depth=1", "--", origin, commit)
    _git(folder, "checkout", "--quiet", "--detach", commit)


def _take_submodules(carried: Path, folder: Path) -> None:
    """Take every submodule from where the carried checkout has it, and theirs."""
    for line in _git(folder, "ls-tree", "-r", "--full-tree", "HEAD").splitlines():
        facts, _, path = line.partition("\t")
        mode, _, commit = facts.split()
        if mode == _SUBMODULE:
            _take(str(carried / path), commit, folder / path)
            _take_submodules(carried / path, folder / path)


def _git(folder: Path, *arguments: str) -> str:
    # No question may wait for an answer that nobody gives.
    variables = {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return read_output(["git", *arguments], variables=variables, folder=folder, seconds=1800)
