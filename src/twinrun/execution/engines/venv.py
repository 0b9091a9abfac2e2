"""The stack's lock in a virtual environment, made once for each lock and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

from twinrun.execution.engine import Engine, Workspace
from twinrun.execution.installed_files import changed_files, seal
from twinrun.execution.local_engines import Interpreter
from twinrun.execution.uv import run_uv, uv_cache
from twinrun.foundation.cache import COMPLETE, cache_root, environment_folder
from twinrun.foundation.errors import MachineError
from twinrun.foundation.locks import locked
from twinrun.foundation.text import plural, size
from twinrun.manifests.stack import LoadedStack, framework_index, normalise, pins
from twinrun.manifests.vendor import Vendor

RUNS_IMAGES = False
ADDS_GROUPS = False


class LockedEnvironment(Interpreter):
    """An interpreter whose packages are those of a lock, file by file."""

    def __init__(self, *, folder: Path, workspace: Workspace) -> None:
        super().__init__(python=str(folder / "bin" / "python"), workspace=workspace)
        self._folder = folder

    def changed_files(self, *, whole: bool = False) -> dict[str, str]:
        """Hold the files against the RECORD of each wheel."""
        return changed_files(self._folder, whole=whole)


def unusable(*, stack: LoadedStack, vendor: Vendor) -> str | None:
    """Return that no environment of the stack was made and none has room.

    What stands against a lock is known only when it is read, see `open_engine`.
    """
    folder = cache_root() / "environments"
    made = any(folder.glob(f"{stack.stack.name}-*/{COMPLETE}"))
    return None if made or _crowded(stack, folder) is None else "the disk has no room for the environment"


def _crowded(stack: LoadedStack, folder: Path) -> Path | None:
    """Return the folder whose disk does not take the environment: the cache's, or that of uv's own cache.

    On one disk they share every file.
    """
    sizes = stack.stack.environment
    for place in (folder, uv_cache()) if sizes else ():
        if sizes and shutil.disk_usage(_existing(place)).free < sizes.disk:
            return place
    return None


def _demand_room(stack: LoadedStack, folder: Path) -> None:
    """Raise MachineError where a disk does not take the environment."""
    sizes, crowded = stack.stack.environment, _crowded(stack, folder)
    if sizes and crowded:
        variable = "TWINRUN_CACHE" if crowded == folder else "UV_CACHE_DIR"
        raise MachineError(
            "the disk has no room for the environment",
            place=str(crowded),
            found=f"{size(shutil.disk_usage(_existing(crowded)).free)} free",
            allowed=f"{size(sizes.disk)} or more: {sizes.source}",
            hint=f"free some space, or set {variable} to a folder on another disk",
        )


def _existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.parents) if one.exists())


def renderer(*, stack: LoadedStack, vendor: Vendor, workspace: Workspace) -> LockedEnvironment:
    """Return the interpreter of the environment, which may not be installed yet."""
    return LockedEnvironment(folder=_folder(stack, workspace.root), workspace=workspace)


def open_engine(
    *, stack: LoadedStack, vendor: Vendor, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Return the environment of the stack's lock, installing it if this machine has not yet.

    Raises:
        MachineError: a pin has no hash, or the packages cannot be had.
    """
    unhashed = stack.unhashed(workspace.root)
    if unhashed:
        raise MachineError(
            "the lock has no hash for some pins",
            place=f"{stack.folder}/requirements.lock",
            found=unhashed,
            hint=f"run `invoke lock --stack {stack.stack.name} --index URL` with an index that carries them,"
            " or use --engine host where they are installed",
        )
    folder = _folder(stack, workspace.root)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{folder}.lock")):
        if not (folder / COMPLETE).is_file():
            _demand_room(stack, folder.parent)
            _install(stack, folder, workspace.root, say)
    return renderer(stack=stack, vendor=vendor, workspace=workspace)


def _folder(stack: LoadedStack, root: Path) -> Path:
    return environment_folder(stack.stack.name, stack.requirements_sha256(root))


def _install(stack: LoadedStack, folder: Path, root: Path, say: Callable[[str], None]) -> None:
    """Make the environment; the marker is written last, so a half-made one is made again."""
    sizes = stack.stack.environment
    count = plural(len(stack.locked(root)), "package")
    download = f", {size(sizes.download)} to download" if sizes and sizes.download else ""
    amount = f"{download}, about {size(sizes.disk)} on the disk" if sizes else ""
    say(f"installing {stack.stack.name} from its lock, once: {count}{amount}: {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    lock = str(stack.lock(root))
    try:
        run_uv("venv", "--quiet", "--python", stack.stack.python, str(folder), say=say)
        python = str(folder / "bin" / "python")
        options = (*_index_options(stack), "--python", python, lock)
        total = sizes.download if sizes else None
        # Links of the file system's own kind: who follows a symbolic one sees no change of what it leads to.
        run_uv(
            *("pip", "sync", "--require-hashes", "--link-mode", "hardlink"),
            *options,
            say=say,
            total_bytes=total,
        )
        _demand_installed(stack, folder, root)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    say("holding the installed files against the hashes of their wheels, once")
    seal(folder)


def _demand_installed(stack: LoadedStack, folder: Path, root: Path) -> None:
    """Raise MachineError where settings of uv have sent the packages somewhere else."""
    wanted = pins((root / stack.folder / "requirements.in").read_text(encoding="utf-8"))
    places = [str(place) for place in folder.glob("lib/python*/site-packages")]
    found = {normalise(one.metadata["Name"]) for one in distributions(path=places)}
    if absent := sorted(wanted.keys() - found):
        raise MachineError(
            "uv has put the packages somewhere else",
            place=str(folder),
            found=f"no {', '.join(absent)}",
            hint="take `target`, `prefix` or `no-install` out of uv's settings: UV_CONFIG_FILE, uv.toml",
        )


def _index_options(stack: LoadedStack) -> tuple[str, ...]:
    """Return the options by which uv finds the framework's own wheels; hashes decide what is installed."""
    index = framework_index(stack.stack)
    # That index has old releases of other packages too, which must not hide those of the general one.
    return ("--index", index, "--index-strategy", "unsafe-best-match") if index else ()
