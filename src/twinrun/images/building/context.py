"""Build context: exactly the files that the locks name, and the source of this checkout."""

from __future__ import annotations

import os
import shlex
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_file
from twinrun.images.building.artifact_cache import fetch_debs, fetch_python_packages, matches_name
from twinrun.images.building.artifacts import Artifact
from twinrun.images.building.download import checkout
from twinrun.images.building.plan import DOCKERFILE, BuildPlan
from twinrun.images.building.source import SOURCE, source_files
from twinrun.manifests.stack import GitSource

FOLDERS = ("packages/runtime", "packages/build", "python", "tools", "sources", "settings", "source")
# A .deb file is about a quarter of what it unpacks to.
_COMPRESSION = 4


def fetch_artifacts(
    plan: BuildPlan, *, root: Path, wheelhouse: Path | None, say: Callable[[str], None]
) -> dict[str, list[Path]]:
    """Return the verified files of an image by folder of the context; checkouts are not among them.

    Raises:
        InputError: a file is missing or not the locked one.
        MachineError: a file cannot be downloaded.
    """
    loaded = plan.stack
    system = loaded.system_packages(root)
    assert system is not None
    debs = fetch_debs(system.all(), wheelhouse=wheelhouse, stack=loaded.stack, say=say)
    files: dict[str, list[Path]] = {
        "packages/base": [debs[one] for one in system.base],
        "packages/runtime": [debs[one] for one in system.runtime],
        "packages/build": [debs[one] for one in system.build],
    }
    python = [artifact for artifact in plan.artifacts if artifact.kind in ("wheel", "sdist")]
    fetched = fetch_python_packages(python, wheelhouse=wheelhouse, stack=loaded.stack, say=say)
    for artifact, paths in fetched.items():
        files.setdefault(artifact.folder, []).extend(paths)
    return files


def installed_bytes(files: dict[str, list[Path]]) -> int:
    """Return about how large the files are once they are installed."""
    paths = [path for folder, paths in files.items() if folder != "packages/base" for path in paths]
    packed = sum(path.stat().st_size for path in paths if path.suffix != ".whl")
    wheels = (zipfile.ZipFile(path) for path in paths if path.suffix == ".whl")
    return _COMPRESSION * packed + sum(info.file_size for wheel in wheels for info in wheel.infolist())


def write_context(
    plan: BuildPlan,
    folder: Path,
    *,
    root: Path,
    files: dict[str, list[Path]] | None,
    wheelhouse: Path | None = None,
) -> None:
    """Fill the build context; without `files` it holds the source stage alone."""
    shutil.copyfile(root / DOCKERFILE, folder / "Dockerfile")
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    _copy_tree(root / SOURCE, folder / "source" / "twinrun")
    if files is None:
        return
    for name, paths in files.items():
        for path in paths if name in FOLDERS else ():
            _link_or_copy(path, folder / name / path.name)
    for part in ("python", "tools"):
        artifacts = [artifact for artifact in plan.artifacts if artifact.folder == part]
        lines = "".join(f"{_with_digests(artifact, files[part]).requirement()}\n" for artifact in artifacts)
        (folder / part / "requirements.txt").write_text(lines, encoding="utf-8")
    _write_sources(plan, folder, root=root, files=files, wheelhouse=wheelhouse)


def _with_digests(artifact: Artifact, files: list[Path]) -> Artifact:
    """Return the artifact with digests: pip takes none without, so an unknown one is that of its file."""
    digests = (sha256_of_file(path) for path in files if matches_name(path, artifact))
    return artifact if artifact.digests else artifact.model_copy(update={"digests": tuple(digests)})


def _write_sources(
    plan: BuildPlan,
    folder: Path,
    *,
    root: Path,
    files: dict[str, list[Path]],
    wheelhouse: Path | None,
) -> None:
    variables = {source.name: source.variables for source in plan.stack.stack.sources}
    for source in plan.stack.stack.sources:
        artifact = next(one for one in plan.artifacts if one.folder == f"sources/{source.name}")
        if isinstance(source, GitSource):
            local = wheelhouse / "sources" / source.name if wheelhouse else None
            checkout(source, artifact, folder / artifact.folder, local=local)
        else:
            _unpack(files[artifact.folder][0], folder / artifact.folder)
    for kernels in plan.kernels:
        name = kernels.split("/")[1]
        _copy_tree(root / kernels, folder / "sources" / name)
        variables[name] = {}
    for name, settings in variables.items():
        text = "".join(f"{key}={shlex.quote(value)}\n" for key, value in sorted(settings.items()))
        (folder / "settings" / name).write_text(text, encoding="utf-8")


def _unpack(sdist: Path, folder: Path) -> None:
    """Unpack a source distribution without its top folder; raises InputError."""
    try:
        with tarfile.open(sdist) as tar, tempfile.TemporaryDirectory(dir=folder.parent) as unpacked:
            tar.extractall(unpacked, filter="data")
            (top,) = Path(unpacked).iterdir()
            top.replace(folder)
    except (tarfile.TarError, ValueError, OSError) as error:
        raise InputError(f"no source archive: {error}", place=str(sdist)) from None


def _link_or_copy(source: Path, target: Path) -> None:
    """Link a file to another path, or copy it where the file system cannot."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _copy_tree(source: Path, target: Path) -> None:
    """Copy files with the modes of a fresh checkout, whatever the umask."""
    for path in source_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    for parent in (target, *(path for path in target.rglob("*") if path.is_dir())):
        parent.chmod(0o755)
