"""Downloads of wheels, source distributions and checkouts; the caller verifies wheels and sdists."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Iterable
from http.client import HTTPException
from pathlib import Path

from uv import find_uv_bin

from twinrun.foundation.errors import MachineError, RunError
from twinrun.foundation.processes import last_lines
from twinrun.foundation.redaction import redacted
from twinrun.images.building.artifacts import Artifact
from twinrun.images.building.wheel_tags import platforms
from twinrun.images.git import git
from twinrun.manifests.stack import GitSource, Stack

# Mode of a submodule in a git tree.
_SUBMODULE = "160000"
_GIT_SECONDS = 1800


def download_wheels(artifacts: Iterable[Artifact], folder: Path, *, stack: Stack) -> None:
    """Download wheels for the stack's platform to `folder` with pip; no code of theirs is run.

    pip reads its own configuration of indexes, proxies and certificates.

    Raises:
        MachineError: pip failed; the message holds its last lines.
    """
    for requirements in _pip_calls(artifacts):
        _pip_download(requirements, folder, options=_platform_options(stack))


def _pip_calls(artifacts: Iterable[Artifact]) -> list[list[str]]:
    """Return requirements by call: pip refuses two versions of a package, or hashes for some only, in one."""
    calls: dict[tuple[bool, int], list[str]] = {}
    versions: Counter[str] = Counter()
    for requirement, artifact in {artifact.requirement(): artifact for artifact in artifacts}.items():
        calls.setdefault((bool(artifact.digests), versions[artifact.name()]), []).append(requirement)
        versions[artifact.name()] += 1
    return list(calls.values())


def _platform_options(stack: Stack) -> list[str]:
    options = [part for platform in platforms(stack) for part in ("--platform", platform)]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={stack.interpreter()}", *options]


def _pip_download(requirements: list[str], folder: Path, *, options: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as partial:
        file = Path(partial) / "requirements.txt"
        file.write_text("\n".join(requirements), encoding="utf-8")
        arguments = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps", "--no-input"),
            *("--disable-pip-version-check", "--no-cache-dir", "--progress-bar=off", "--dest", partial),
            *(*options, "--requirement", str(file)),
        ]
        # A user who requires hashes of every package has none for an unverified pin.
        variables = os.environ | {"PIP_REQUIRE_HASHES": "0"}
        done = subprocess.run(arguments, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MachineError(
                "the Python packages cannot be fetched",
                place="pip download",
                found=redacted(last_lines(done.stderr or done.stdout, 6)),
                hint="check the network and pip's configuration, or carry them in with --wheelhouse",
            )
        for path in Path(partial).iterdir():
            if path != file:
                path.replace(folder / path.name)


def download_sdists(artifacts: Iterable[Artifact], folder: Path) -> None:
    """Download source distributions to `folder`, from where uv finds them: pip would run code of theirs.

    uv reads its own configuration of indexes.

    Raises:
        MachineError: one cannot be found or downloaded.
    """
    for artifact in artifacts:
        address = _sdist_address(artifact.entry)
        target = folder / address.rpartition("/")[2]
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".downloading-", delete=False) as partial:
            try:
                with urllib.request.urlopen(address, timeout=60) as stream:  # noqa: S310 uv's index
                    shutil.copyfileobj(stream, partial)
            except (OSError, HTTPException) as error:
                Path(partial.name).unlink()
                raise MachineError(
                    f"{artifact.entry} cannot be fetched", place=redacted(address), found=redacted(str(error))
                ) from None
        Path(partial.name).replace(target)


def _sdist_address(requirement: str) -> str:
    """Return the URL that the index has for the source distribution of one version."""
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


def checkout(source: GitSource, artifact: Artifact, folder: Path, *, local: Path | None) -> None:
    """Check out the locked commit with its submodules into `folder`; git verifies what it receives.

    Args:
        local: a clone to fetch from instead of the repository, without a network.

    Raises:
        MachineError: no commit is locked, or the repository does not have it.
    """
    if not artifact.digests:
        raise MachineError(
            f"no commit of {source.name} is known", place=artifact.lock, hint="run `invoke lock`"
        )
    try:
        _fetch_commit(str(local or source.repository), artifact.digests[0], folder)
        if local is None:
            _git(folder, "submodule", "update", "--quiet", "--init", "--recursive", "--depth=1")
        else:
            _fetch_submodules(local, folder)
    except RunError as error:
        raise MachineError(
            f"{source.name} is not to be had at its locked commit",
            place=redacted(str(local or source.repository)),
            found=redacted(str(error.found)),
            allowed=artifact.digests[0],
            hint="check the network, or carry a checkout in as sources/NAME of the wheelhouse",
        ) from None
    for path in list(folder.rglob(".git")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _fetch_commit(origin: str, commit: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _git(folder, "init", "--quiet")
    _git(folder, "fetch", "--quiet", "--depth=1", "--", origin, commit)
    _git(folder, "checkout", "--quiet", "--detach", commit)


def _fetch_submodules(local: Path, folder: Path) -> None:
    """Fetch every submodule, recursively, from the clone that lies in the local one."""
    for line in _git(folder, "ls-tree", "-r", "--full-tree", "HEAD").splitlines():
        entry, _, path = line.partition("\t")
        mode, _, commit = entry.split()
        if mode == _SUBMODULE:
            _fetch_commit(str(local / path), commit, folder / path)
            _fetch_submodules(local / path, folder / path)


def _git(folder: Path, *arguments: str) -> str:
    return git(folder, *arguments, seconds=_GIT_SECONDS)
