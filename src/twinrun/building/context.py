"""The folder that the engine builds from: nothing but what the locks name and what this checkout adds."""

from __future__ import annotations

import shlex
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from twinrun.building.fetch import checkout
from twinrun.building.gather import calls_itself, gather_packages, gather_wheels, place
from twinrun.building.parcels import Parcel
from twinrun.building.plan import DOCKERFILE, BuildPlan, source_files
from twinrun.errors import InputError
from twinrun.files import sha256_of_file
from twinrun.stack import GitSource

FOLDERS = ("packages/runtime", "packages/build", "python", "tools", "sources", "settings", "source")
# A package of the distribution is about a quarter of what it unpacks to.
_PACKED = 4


def gather(
    plan: BuildPlan, *, root: Path, wheelhouse: Path | None, say: Callable[[str], None]
) -> dict[str, list[Path]]:
    """Return the verified files of an image by the folder of the context they go to.

    Raises:
        InputError: a file is missing or not the locked one.
        MachineError: a file cannot be fetched.
    """
    loaded = plan.stack
    system = loaded.system_packages(root)
    assert system is not None
    packages = gather_packages(system.all(), wheelhouse=wheelhouse, stack=loaded.stack, say=say)
    files: dict[str, list[Path]] = {
        "packages/base": [packages[one] for one in system.base],
        "packages/runtime": [packages[one] for one in system.runtime],
        "packages/build": [packages[one] for one in system.build],
    }
    wanted = [parcel for parcel in plan.parcels if parcel.kind in ("wheel", "archive")]
    for parcel, found in gather_wheels(wanted, wheelhouse=wheelhouse, stack=loaded.stack, say=say).items():
        files.setdefault(parcel.folder, []).extend(found)
    return files


def unpacked_bytes(files: dict[str, list[Path]]) -> int:
    """Return about how large the files are once they are installed."""
    every = [path for folder, paths in files.items() if folder != "packages/base" for path in paths]
    packed = sum(path.stat().st_size for path in every if path.suffix != ".whl")
    wheels = (zipfile.ZipFile(path) for path in every if path.suffix == ".whl")
    return _PACKED * packed + sum(info.file_size for wheel in wheels for info in wheel.infolist())


def lay_out(
    plan: BuildPlan,
    folder: Path,
    *,
    root: Path,
    files: dict[str, list[Path]] | None,
    wheelhouse: Path | None = None,
) -> None:
    """Fill the context; without `files` it serves for the stage of the source alone."""
    shutil.copyfile(root / DOCKERFILE, folder / "Dockerfile")
    for name in FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    copy_tree(root / "src" / "twinrun", folder / "source" / "twinrun")
    if files is None:
        return
    for name, paths in files.items():
        for path in paths if name in FOLDERS else ():
            place(path, folder / name / path.name)
    for part in ("python", "tools"):
        wanted = [parcel for parcel in plan.parcels if parcel.folder == part]
        text = "".join(f"{_requirement(parcel, files[part])}\n" for parcel in wanted)
        (folder / part / "requirements.txt").write_text(text, encoding="utf-8")
    _lay_out_sources(plan, folder, root=root, files=files, wheelhouse=wheelhouse)


def _requirement(parcel: Parcel, files: list[Path]) -> str:
    """Return the line that pip holds the parcel against; one without a digest gets that of its file."""
    digests = parcel.digests or tuple(sha256_of_file(path) for path in files if calls_itself(path, parcel))
    return " ".join([parcel.entry, *(f"--hash=sha256:{digest}" for digest in digests)])


def _lay_out_sources(
    plan: BuildPlan,
    folder: Path,
    *,
    root: Path,
    files: dict[str, list[Path]],
    wheelhouse: Path | None,
) -> None:
    variables = {source.name: source.variables for source in plan.stack.stack.sources}
    for source in plan.stack.stack.sources:
        parcel = next(one for one in plan.parcels if one.folder == f"sources/{source.name}")
        if isinstance(source, GitSource):
            carried = wheelhouse / "sources" / source.name if wheelhouse else None
            checkout(source, parcel, folder / parcel.folder, carried=carried)
        else:
            _unpack(files[parcel.folder][0], folder / parcel.folder)
    for kernels in plan.kernels:
        name = kernels.split("/")[1]
        copy_tree(root / kernels, folder / "sources" / name)
        variables[name] = {}
    for name, settings in variables.items():
        text = "".join(f"{key}={shlex.quote(value)}\n" for key, value in sorted(settings.items()))
        (folder / "settings" / name).write_text(text, encoding="utf-8")


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack a source archive without the folder that all its files are in; raises InputError."""
    try:
        with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            tar.extractall(fresh, filter="data")
            (top,) = Path(fresh).iterdir()
            top.replace(folder)
    except (tarfile.TarError, ValueError, OSError) as error:
        raise InputError(f"no source archive: {error}", place=str(archive)) from None


def copy_tree(source: Path, target: Path) -> None:
    """Copy files with the modes that a fresh checkout has, whatever the mask of this user."""
    for path in source_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    for parent in (target, *(path for path in target.rglob("*") if path.is_dir())):
        parent.chmod(0o755)
