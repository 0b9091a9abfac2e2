"""Build context: the files that the locks name, the kernels that git tracks, and the space for them."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.tracked import tracked_files
from twinrun.images.artifact_cache import fetch_debs, fetch_wheels, matches_name
from twinrun.images.artifacts import Artifact
from twinrun.images.buildkit import megabytes
from twinrun.images.plan import BuildPlan
from twinrun.manifests.stack import DOCKERFILE

if TYPE_CHECKING:
    from docker import DockerClient

FOLDERS = ("packages/runtime", "packages/build", "python", "tools", "kernels")
# A .deb file is about a quarter of what it unpacks to.
_COMPRESSION = 4
# Unpacked by a stage, read in as finished layers, and those unpacked.
_COPIES_IN_ENGINE = 3


def fetch_artifacts(
    plan: BuildPlan,
    *,
    root: Path,
    wheelhouse: Path | None,
    say: Callable[[str], None],
    index: str | None = None,
) -> dict[str, list[Path]]:
    """Return the verified files of an image by folder of the context.

    Args:
        index: a further package index, as `download_wheels` takes it.

    Raises:
        InputError: a file is missing or not the locked one.
        MachineError: a file cannot be downloaded.
    """
    loaded = plan.stack
    system = loaded.system_packages(root)
    assert system is not None
    debs = fetch_debs(system.all(), wheelhouse=wheelhouse, stack=loaded.stack, epoch=plan.epoch, say=say)
    files = {f"packages/{stage}": [debs[package] for package in packages] for stage, packages in system}
    wheels = [artifact for artifact in plan.artifacts if artifact.kind == "wheel"]
    fetched = fetch_wheels(wheels, wheelhouse=wheelhouse, stack=loaded.stack, index_url=index, say=say)
    for artifact, paths in fetched.items():
        files.setdefault(artifact.folder, []).extend(paths)
    return files


def installed_bytes(files: dict[str, list[Path]]) -> int:
    """Return about how large the files are once they are installed."""
    paths = [path for folder, paths in files.items() if folder != "packages/base" for path in paths]
    packed = sum(path.stat().st_size for path in paths if path.suffix != ".whl")
    wheels = (zipfile.ZipFile(path) for path in paths if path.suffix == ".whl")
    return _COMPRESSION * packed + sum(info.file_size for wheel in wheels for info in wheel.infolist())


def write_context(plan: BuildPlan, folder: Path, *, root: Path, files: dict[str, list[Path]]) -> None:
    """Fill the build context: nothing else reaches a step of the Dockerfile."""
    shutil.copyfile(root / DOCKERFILE, folder / "Dockerfile")
    _link_or_copy(files["base"][0], folder / "base.tar")
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, paths in files.items():
        for path in paths if name in FOLDERS else ():
            _link_or_copy(path, folder / name / path.name)
    for part in ("python", "tools"):
        artifacts = [artifact for artifact in plan.artifacts if artifact.folder == part]
        lines = "".join(f"{_with_digests(artifact, files[part]).requirement()}\n" for artifact in artifacts)
        (folder / part / "requirements.txt").write_text(lines, encoding="utf-8")
    for kernels in plan.kernels:
        _copy_tracked(root, kernels, folder / "kernels" / Path(kernels).parent.name)


def write_wheelhouse(files: dict[str, list[Path]], folder: Path) -> None:
    """Write all that a build of the image needs to a folder that `--wheelhouse` takes, with the base."""
    (base,) = files["base"]
    for path in {path for name, paths in files.items() if name != "base" for path in paths}:
        _link_or_copy(path, folder / "packages" / path.name)
    _link_or_copy(base, folder / "base.tar")


def _with_digests(artifact: Artifact, files: list[Path]) -> Artifact:
    """Return the artifact with digests: pip takes none without, so an unknown one is that of its file."""
    digests = (sha256_of_file(path) for path in files if matches_name(path, artifact))
    return artifact if artifact.digests else artifact.model_copy(update={"digests": tuple(digests)})


def _link_or_copy(source: Path, target: Path) -> None:
    """Link a file to another path, or copy it where the file system cannot."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _copy_tracked(root: Path, folder: str, target: Path) -> None:
    """Copy the files that git tracks with the modes of a fresh checkout, whatever the umask."""
    for path in tracked_files(root, folder):
        copy = target / path.relative_to(root / folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy, follow_symlinks=False)
        copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    for parent in (target, *(path for path in target.rglob("*") if path.is_dir())):
        parent.chmod(0o755)


class Space:
    """Space that is there, and about how much one build needs."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client
        self._needed_bytes = 0

    def require(self, files: dict[str, list[Path]]) -> None:
        """Refuse to begin what cannot end; raises MachineError."""
        packed = sum(path.stat().st_size for paths in files.values() for path in paths)
        self._needed_bytes = packed + (_COPIES_IN_ENGINE + 1) * installed_bytes(files)
        if min(self._free_bytes().values()) < self._needed_bytes:
            raise self.exhausted()

    def exhausted(self) -> MachineError:
        """Return the error that says how much is free and how much is needed."""
        free = self._free_bytes()
        return MachineError(
            "not enough space on the disk",
            place=str(min(free, key=lambda folder: free[folder])),
            found=", ".join(f"{megabytes(size)} free in {folder}" for folder, size in free.items()),
            allowed=f"about {megabytes(self._needed_bytes)} needed",
            hint="nothing was tagged; `docker builder prune` and `docker image prune` free space",
        )

    def _free_bytes(self) -> dict[Path, int]:
        """Return the free space at the engine's folder, where this machine can see it, and at the cache."""
        engine = Path(self._client.info()["DockerRootDir"])
        folders = [*([engine] if engine.is_dir() else []), cache_root()]
        return {folder: shutil.disk_usage(folder).free for folder in folders}
