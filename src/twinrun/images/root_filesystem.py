"""Base of an image: the root file system of locked packages, the same bytes whenever it is made."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path

from twinrun.foundation.errors import InputError, MachineError, require_equal
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.locks import locked_folder
from twinrun.foundation.processes import tool_output
from twinrun.images.apt_archive import fetch_packages
from twinrun.images.layers import write_layer
from twinrun.images.plan import BuildPlan
from twinrun.manifests.locks import AptLock
from twinrun.manifests.stack import Stack

# Folder of the cache; a second build waits there for the base that the first makes.
_BASES = "bases"
# Files that some releases of mmdebstrap add of their own.
_ADDED = (
    *("etc/apt/sources.list", "etc/apt/apt.conf.d/99mmdebstrap", "var/lib/apt/extended_states"),
    *("lib32", "libx32", "usr/lib32", "usr/libx32"),
)


def make_root(out: Path, *, lock: AptLock, suite: str, architecture: str, epoch: int) -> None:
    """Write the root file system of exactly the base packages of apt.lock to the tar `out`.

    It is written as a layer is, so that releases of mmdebstrap give the same bytes: they leave other times on
    folders, and other things of the machine and of package tools.

    Args:
        epoch: modification time of every file, in seconds since 1970.

    Raises:
        MachineError: the packages cannot be downloaded, or mmdebstrap is missing or failed.
    """
    files = fetch_packages(lock.base, suite=suite, architecture=architecture, epoch=epoch)
    with tempfile.TemporaryDirectory(prefix="twinrun-root-") as folder:
        repository, made = Path(folder) / "packages", Path(folder) / "root.tar"
        write_repository(files.values(), repository, suite=suite)
        mmdebstrap(
            *(f"--architectures={architecture}", "--variant=apt", "--format=tar"),
            # apt's own user may have no access to the folder of the packages.
            '--aptopt=APT::Sandbox::User "root"',
            *("--include", ",".join(package.name for package in lock.base)),
            # Releases whose base-files does not bring the links from /bin to /usr/bin need them made first.
            "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr",
            # mmdebstrap's cleanup runs apt once more, which leaves files of its own.
            "--skip=cleanup/apt",
            *(f'--customize-hook=rm -rf "$1"/{name}' for name in _ADDED),
            *(suite, str(made), f"deb [trusted=yes] copy:{urllib.parse.quote(str(repository))} ./"),
            epoch=epoch,
        )
        with made.open("rb") as stream, out.open("wb") as tar:
            write_layer(stream, tar, parent={}, epoch=epoch)


def write_repository(files: Iterable[Path], folder: Path, *, suite: str) -> None:
    """Make `folder` an apt repository of exactly these files: `deb [trusted=yes] file:FOLDER ./`."""
    folder.mkdir(parents=True, exist_ok=True)
    stanzas = []
    for file in sorted(files):
        copy = folder / file.name
        shutil.copyfile(file, copy)
        # apt reads it as its own user.
        copy.chmod(0o644)
        fields = subprocess.run(
            ["dpkg-deb", "--field", os.fspath(file)], capture_output=True, text=True, check=True
        ).stdout
        location = f"Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {sha256_of_file(file)}\n"
        stanzas.append(f"{fields.rstrip()}\n{location}")
    index = folder / "Packages"
    index.write_text("\n".join(stanzas), encoding="utf-8")
    # mmdebstrap 1.5 takes essential packages from the suite that it was told alone.
    release = folder / "Release"
    checksum = f" {sha256_of_file(index)} {index.stat().st_size} Packages"
    release.write_text(f"Suite: {suite}\nCodename: {suite}\nSHA256:\n{checksum}\n", encoding="utf-8")
    for file in (index, release):
        file.chmod(0o644)


def mmdebstrap(*arguments: str, epoch: int, hint: str | None = None) -> None:
    """Run mmdebstrap, no file newer than `epoch`; raises MachineError when it is missing or has failed."""
    tool_output(
        ["mmdebstrap", "--quiet", *arguments],
        variables={"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C", "TZ": "UTC"},
        umask=0o022,
        failure="the root file system cannot be made",
        place="mmdebstrap",
        hint=hint,
        absent="install mmdebstrap, or carry the base in as a tar",
    )


def check_base_file(file: Path, plan: BuildPlan) -> None:
    """Compare the base given as a file with the lock; raises InputError."""
    try:
        found = sha256_of_file(file)
    except OSError as error:
        raise InputError("no tar", place=str(file), found=error.strerror, allowed="a file") from None
    if found != plan.base:
        raise InputError(
            "not the locked base",
            place=str(file),
            found=f"sha256 {found}",
            allowed=plan.base,
            hint=f"{plan.stack.folder}/image.lock names it; a machine that has built it has it in its cache",
        )


def make_base(stack: Stack, system: AptLock, *, epoch: int) -> str:
    """Make the root file system of the base packages, keep it in the cache and return its digest."""
    with locked_folder(_BASES) as folder:
        return _make_base(stack, system, folder, epoch=epoch)


def _make_base(stack: Stack, system: AptLock, folder: Path, *, epoch: int) -> str:
    assert stack.base is not None
    fresh = folder / f"{stack.name}.new"
    make_root(fresh, lock=system, suite=stack.base.suite, architecture=stack.architecture(), epoch=epoch)
    digest = sha256_of_file(fresh)
    fresh.replace(folder / f"{digest}.tar")
    return digest


def root_file_system(plan: BuildPlan, *, root: Path, say: Callable[[str], None]) -> Path:
    """Return the tar of the locked base packages, made here or cached.

    Raises:
        MachineError: the base cannot be made, or is not the locked one.
    """
    system = plan.stack.system_packages(root)
    assert system is not None
    with locked_folder(_BASES) as folder:
        tar = folder / f"{plan.base}.tar"
        if not tar.is_file() or sha256_of_file(tar) != plan.base:
            say(f"making the base of {len(system.base)} packages")
            found = _make_base(plan.stack.stack, system, folder, epoch=plan.epoch)
            require_equal(
                found,
                plan.base,
                "the base made here is not the locked one",
                place=f"{plan.stack.folder}/image.lock: base",
                hint="another mmdebstrap makes other bytes; carry the base in with --base",
                error=MachineError,
            )
    return tar
