"""Local files of artifacts: from a wheelhouse or the cache, downloaded when absent, verified by checksum."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.locks import locked_folder
from twinrun.foundation.processes import tool_output
from twinrun.images import apt_archive
from twinrun.images.artifacts import Artifact, deb_artifact, is_compatible, platforms
from twinrun.images.framework_index import demand_answer
from twinrun.manifests.locks import SystemPackage
from twinrun.manifests.packages import AlternativePin, SourcePackage
from twinrun.manifests.stack import Stack, normalise

TARGETS = {"download": "--dest", "wheel": "--wheel-dir"}
# No source is compiled for a device here, and a wheel has no time or order of its own.
SAME_BYTES = {"DS_BUILD_OPS": "0", "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": "1577836800"}


class FileIndex:
    """Files below one folder by name and checksum; each checksum is computed once."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self.folder = folder
        self._stack = stack
        self._digests: dict[Path, str] = {}
        self._files: list[Path] = []
        self.scan()

    def scan(self) -> None:
        """List the folder again, but for hidden folders, in which downloads are not whole yet."""
        self._files = sorted(
            path
            for path in self.folder.rglob("*")
            if path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(self.folder).parts)
        )

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a file of the folder."""
        if path not in self._digests:
            self._digests[path] = sha256_of_file(path)
        return self._digests[path]

    def debs(self) -> dict[str, Path]:
        """Return the .deb files by their checksum."""
        return {self.digest(path): path for path in self._files if path.suffix == ".deb"}

    def candidates(self, artifact: Artifact) -> list[Path]:
        """Return the files named as the artifact is, of wheels those that the image can install."""
        named = [path for path in self._files if matches_name(path, artifact)]
        return [path for path in named if path.suffix != ".whl" or is_compatible(path.name, self._stack)]

    def accepted(self, artifact: Artifact) -> list[Path]:
        """Return the candidates with a locked checksum."""
        return [path for path in self.candidates(artifact) if artifact.accepts(self.digest(path))]

    def verified(self, artifact: Artifact) -> list[Path]:
        """Return the candidates with a locked checksum; raises InputError when there are only others."""
        candidates, accepted = self.candidates(artifact), self.accepted(artifact)
        if candidates and not accepted:
            raise InputError(
                f"{artifact.entry} is not the locked file",
                place=str(candidates[0]),
                found=f"sha256 {self.digest(candidates[0])}",
                allowed=list(artifact.digests[:3]),
                hint=f"{artifact.lock} names it; carry the file in again, or run `invoke lock`",
            )
        return accepted

    def require(self, artifact: Artifact) -> list[Path]:
        """Return the verified files of an artifact, at least one; raises InputError."""
        if found := self.verified(artifact):
            return found
        raise InputError(
            f"{artifact.entry} is missing",
            place=str(self.folder),
            allowed=list(artifact.digests[:3]) or None,
            hint=f"{artifact.lock} names it; a machine that has built it keeps it in its cache",
        )


def find_alternatives(stack: Stack, wheelhouse: Path | None) -> tuple[AlternativePin, ...]:
    """Return the alternative wheels of stack.toml that the wheelhouse has.

    Raises:
        InputError: a file has the name of one and another checksum.
    """
    if wheelhouse is None:
        return ()
    index = FileIndex(wheelhouse, stack)
    return tuple(pin for pin in stack.alternative if index.verified(_alternative_artifact(stack, pin)))


def _alternative_artifact(stack: Stack, pin: AlternativePin) -> Artifact:
    lock = f"images/stacks/{stack.name}/stack.toml"
    return Artifact(lock=lock, entry=pin.requirement, kind="wheel", folder="python", digests=(pin.sha256,))


def fetch_wheels(
    artifacts: Iterable[Artifact],
    *,
    wheelhouse: Path | None,
    stack: Stack,
    index_url: str | None,
    say: Callable[[str], None],
) -> dict[Artifact, list[Path]]:
    """Return the verified wheels, one or more for each artifact.

    Raises:
        InputError: the wheelhouse lacks one, or has another file under its name.
        MachineError: one cannot be downloaded.
    """
    artifacts = list(artifacts)
    # One at a time: a second would take away what the first has half written, as a changed file.
    with contextlib.nullcontext(wheelhouse) if wheelhouse else locked_folder("wheels") as folder:
        index = FileIndex(folder, stack)
        absent = [one for one in artifacts if not _is_cached(index, one)] if wheelhouse is None else []
        if absent:
            said = ", ".join(one.entry for one in absent[:6])
            say(f"fetching {len(absent)} Python package(s): {said}"[:160])
            if index_url:
                demand_answer(index_url)
            download_wheels(absent, folder, stack=stack, index=index_url)
            index.scan()
        return {artifact: index.require(artifact) for artifact in artifacts}


def _is_cached(index: FileIndex, artifact: Artifact) -> bool:
    """Say whether the cache has an artifact; files that have changed there are removed."""
    accepted = index.accepted(artifact)
    for path in index.candidates(artifact) if not accepted else ():
        path.unlink()
    return bool(accepted)


def fetch_debs(
    packages: tuple[SystemPackage, ...],
    *,
    wheelhouse: Path | None,
    stack: Stack,
    epoch: int,
    say: Callable[[str], None],
) -> dict[SystemPackage, Path]:
    """Return the verified .deb file of each package; raises as `fetch_wheels`.

    Args:
        epoch: when they were published, as `apt_archive.fetch_packages` takes it.
    """
    with locked_folder(apt_archive.PACKAGES) as folder:
        if wheelhouse is not None:
            _copy_to_cache(packages, wheelhouse, folder, stack)
        absent = [one for one in packages if not (folder / f"{one.sha256}.deb").is_file()]
    assert stack.base is not None
    if absent:
        say(f"fetching {len(absent)} system package(s): {', '.join(map(str, absent[:6]))}"[:160])
    return apt_archive.fetch_packages(
        packages, suite=stack.base.suite, architecture=stack.architecture(), epoch=epoch
    )


def _copy_to_cache(packages: Iterable[SystemPackage], wheelhouse: Path, folder: Path, stack: Stack) -> None:
    """Copy .deb files into the cache, so that no mirror is asked for them; raises InputError."""
    index = FileIndex(wheelhouse, stack)
    found = index.debs()
    for package in packages:
        source, cached = found.get(package.sha256), folder / f"{package.sha256}.deb"
        if source is None:
            (source,) = index.require(deb_artifact(stack.name, package, "packages"))
        if not cached.is_file() or sha256_of_file(cached) != package.sha256:
            # A process that reads the old file goes on reading it.
            shutil.copyfile(source, folder / ".copied")
            (folder / ".copied").replace(cached)


def matches_name(path: Path, artifact: Artifact) -> bool:
    """Say whether a file has the name of an artifact, a wheel with any local version label."""
    if artifact.kind == "deb":
        return path.name.startswith(f"{artifact.entry.partition('=')[0]}_") or path.stem in artifact.digests
    name, version = [*path.name.split("-", 2), ""][:2] if path.suffix == ".whl" else ("", "")
    return normalise(name) == artifact.name() and artifact.version() in (version, version.partition("+")[0])


def download_wheels(
    artifacts: Iterable[Artifact], folder: Path, *, stack: Stack, index: str | None = None
) -> None:
    """Download wheels for the stack's platform to `folder` with pip; no code of theirs is run.

    A package that the index has as source alone is built, with the backend that stack.toml pins.

    pip reads its own configuration of indexes, proxies and certificates.

    Args:
        index: a further package index, for wheels that only the framework's own has.

    Raises:
        MachineError: pip failed; the message holds its last lines.
    """
    wanted = list(artifacts)
    sources = {normalise(one.package()): one for one in stack.source}
    for artifact in [one for one in wanted if one.name() in sources]:
        _pip_wheel(artifact, folder, sources[artifact.name()])
    for requirements in _pip_calls(one for one in wanted if one.name() not in sources):
        further = [f"--extra-index-url={index}"] if index else []
        # A user who requires hashes of every package has none for an unverified pin.
        variables = {"PIP_REQUIRE_HASHES": "0"}
        _pip("download", requirements, folder, [*further, *_platform_options(stack)], variables)


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


def _pip_wheel(artifact: Artifact, folder: Path, source: SourcePackage) -> None:
    """Build the wheel of a source, both by the hashes of the lock: nothing in it depends on the machine."""
    with tempfile.TemporaryDirectory() as settings:
        backend = Path(settings) / "backend.txt"
        backend.write_text("\n".join(source.backend), encoding="utf-8")
        # pip reads the first since 25.3, and the second before.
        pinned = {"PIP_BUILD_CONSTRAINT": str(backend), "PIP_CONSTRAINT": str(backend)}
        _pip("wheel", [artifact.requirement()], folder, ["--no-binary=:all:"], pinned | SAME_BYTES)


def _pip(
    command: str, requirements: list[str], folder: Path, options: list[str], variables: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as partial:
        file = Path(partial) / "requirements.txt"
        file.write_text("\n".join(requirements), encoding="utf-8")
        arguments = [
            *(sys.executable, "-m", "pip", command, "--quiet", "--quiet", "--no-deps", "--no-input"),
            *(
                "--disable-pip-version-check",
                "--no-cache-dir",
                "--progress-bar=off",
                TARGETS[command],
                partial,
            ),
            *(*options, "--requirement", str(file)),
        ]
        tool_output(
            arguments,
            variables=variables,
            failure="the Python packages cannot be fetched",
            place=f"pip {command}",
            hint="check the network and pip's configuration, or carry them in with --wheelhouse",
        )
        for path in Path(partial).iterdir():
            if path != file:
                path.replace(folder / path.name)
