"""Build context: the files that the locks name, the kernels that git tracks, and the space for them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from twinrun.foundation.cache import tracked_files
from twinrun.foundation.errors import MachineError
from twinrun.foundation.text import size
from twinrun.images.apt_archive import fetch_packages
from twinrun.images.plan import BuildPlan, BuildRequest
from twinrun.images.root_filesystem import ARCHIVE, root_file_system
from twinrun.images.wheels import fetch_wheels, requirements_text
from twinrun.manifests.stack import DOCKERFILE, framework_index

# The environment, the archive in the engine, the same as a file, what the engine reads in, and the image.
_COPIES = 5


class Context(NamedTuple):
    """What one build is made of."""

    plan: BuildPlan
    files: dict[str, Path]
    """Verified files, by their place in the context."""
    wheels: tuple[str, ...]
    """SHA-256 of each wheel that the image has."""

    def bytes_needed(self) -> int:
        """Return about how much space a build of them needs beside them."""
        packed = sum(path.stat().st_size for path in self.files.values())
        wheels = (zipfile.ZipFile(path) for path in self.files.values() if path.suffix == ".whl")
        unpacked = sum(info.file_size for one in wheels for info in one.infolist())
        return packed + _COPIES * (unpacked + self.files["root.tar"].stat().st_size)

    def write(self, folder: Path, root: Path) -> None:
        """Fill a folder that `docker build` takes; nothing else reaches a step of the Dockerfile."""
        plan = self.plan
        for name in ("packages", "python", "tools", "kernels"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for place, path in self.files.items():
            link_or_copy(path, folder / place)
        for kernels in plan.kernels:
            _copy_tracked(root, kernels, folder / "kernels" / Path(kernels).parent.name)
        texts = {name: json.dumps(value).replace("$", "\\$") for name, value in plan.labels.items()}
        labels = "".join(f"LABEL {name}={text}\n" for name, text in texts.items())
        told = {"name": plan.image, "platform": plan.stack.stack.platform, "epoch": plan.epoch}
        variables = (f"{name}={shlex.quote(value)}\n" for name, value in plan.variables().items())
        texts = {
            "Dockerfile": (root / DOCKERFILE).read_text(encoding="utf-8") + labels,
            "archive.py": (root / ARCHIVE).read_text(encoding="utf-8"),
            "build.env": "".join(variables),
            "image.json": json.dumps(told),
            "python/requirements.txt": requirements_text(plan.python),
            "tools/requirements.txt": requirements_text(plan.tools),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
            (folder / name).chmod(0o644)


def collect(plan: BuildPlan, root: Path, request: BuildRequest, *, say: Callable[[str], None]) -> Context:
    """Fetch and verify every file of an image, from where `request` says.

    Raises:
        InputError: a file is missing or not the locked one.
        MachineError: a file cannot be downloaded.
    """
    stack, wheelhouse, base = plan.stack, request.wheelhouse, request.base
    say(f"{len(plan.system.all())} system packages, {len(plan.python) + len(plan.tools)} Python packages")
    build = plan.system.build if plan.kernels else ()
    # A root file system that is given needs none of its packages.
    wanted = plan.system.all() if wheelhouse and not base else build
    debs = fetch_packages(wanted, epoch=plan.epoch, folder=wheelhouse)
    files = {f"packages/{one.name}_{one.sha256[:12]}.deb": debs[one] for one in build}
    address = framework_index(stack.stack, asked=request.index)
    python, tools = (
        fetch_wheels(entries, lock=lock, wheelhouse=wheelhouse, stack=stack.stack, index=address, say=say)
        for entries, lock in ((plan.python, "requirements.lock"), (plan.tools, "build.lock"))
    )
    files |= {f"python/{path.name}": path for path in python}
    files |= {f"tools/{path.name}": path for path in tools}
    files["root.tar"] = base or root_file_system(stack, root=root, say=say)
    return Context(plan, files, tuple(python.values()))


def write_wheelhouse(context: Context, plan: BuildPlan, folder: Path) -> None:
    """Write all that a build of the image needs to a folder that `--wheelhouse` takes, with the root."""
    for package, path in fetch_packages(plan.system.all(), epoch=plan.epoch).items():
        link_or_copy(path, folder / package.path)
    for path in context.files.values():
        if path.suffix in (".whl", ".tar"):
            link_or_copy(path, folder / ("root.tar" if path.suffix == ".tar" else path.name))


def link_or_copy(source: Path, target: Path) -> None:
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


def exhausted(folders: list[Path], needed: int) -> MachineError:
    """Return the error that says how much is free and how much is needed."""
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    return MachineError(
        "not enough space on the disk",
        place=str(min(free, key=lambda folder: free[folder])),
        found=", ".join(f"{size(bytes_)} free in {folder}" for folder, bytes_ in free.items()),
        allowed=f"about {size(needed)} needed",
        hint="nothing was tagged; `docker builder prune` and `docker image prune` free space",
    )
