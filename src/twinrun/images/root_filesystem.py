"""The image's root file system: the locked packages, made by mmdebstrap, the same bytes everywhere."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path

from twinrun.foundation.cache import locked_folder
from twinrun.foundation.errors import MachineError, require_equal
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.processes import tool_output
from twinrun.images.apt_archive import fetch_packages
from twinrun.manifests.locks import AptLock
from twinrun.manifests.stack import LoadedStack, Stack

# Writes tars of which nothing depends on the machine; relative to the checkout.
ARCHIVE = "images/archive.py"
# Folder of the cache; a second build waits there for the root that the first makes.
_ROOTS = "roots"
# Files that some releases of mmdebstrap add of their own.
_ADDED = (
    *("etc/apt/sources.list", "etc/apt/apt.conf.d/99mmdebstrap", "var/lib/apt/extended_states"),
    *("lib32", "libx32", "usr/lib32", "usr/libx32"),
)
# Compiled files carry no times: an environment's own interpreter would write some with times when it starts.
# Some bases have a user of the same number.
_FINISH = """
set -eu
set -- /usr/lib/python[3] /usr/lib/python{python}
[ -e "$1" ] || shift
PYTHONHASHSEED=0 python{python} -m compileall -q -f --invalidation-mode unchecked-hash "$@"
sed -i '/^[^:]*:[^:]*:1000:/d' /etc/passwd /etc/group
echo 'twinrun:x:1000:' >>/etc/group
echo 'twinrun:x:1000:1000::/twinrun/home:/bin/sh' >>/etc/passwd
mkdir -p /twinrun/project /twinrun/run /twinrun/data /twinrun/home
chown 1000:1000 /twinrun/run /twinrun/data /twinrun/home
"""


def make_root(root: Path, stack: Stack, system: AptLock, *, epoch: int) -> str:
    """Make the root file system of the locked packages, keep it in the cache and return its digest.

    It is written as a layer is, so that releases of mmdebstrap give the same bytes: they leave other times on
    folders, and other things of the machine and of package tools.

    Args:
        epoch: modification time of every file, in seconds since 1970.

    Raises:
        MachineError: the packages cannot be downloaded, or mmdebstrap is missing or failed.
    """
    with locked_folder(_ROOTS) as folder:
        return _make_root(root, stack, system, folder, epoch=epoch)


def root_file_system(stack: LoadedStack, *, root: Path, say: Callable[[str], None]) -> Path:
    """Return the tar of the locked root file system, made here or cached.

    Raises:
        MachineError: it cannot be made, or is not the locked one.
    """
    system, lock = stack.system_packages(root), stack.image_lock(root)
    assert system is not None
    assert lock is not None
    with locked_folder(_ROOTS) as folder:
        tar = folder / f"{lock.root}.tar"
        if not tar.is_file() or sha256_of_file(tar) != lock.root:
            say(f"making the root file system of {len(system.root)} packages")
            require_equal(
                _make_root(root, stack.stack, system, folder, epoch=lock.epoch),
                lock.root,
                "the root file system made here is not the locked one",
                place=f"{stack.folder}/image.lock: root",
                hint="another mmdebstrap makes other bytes; carry the file in with --base",
                error=MachineError,
            )
    return tar


def _make_root(root: Path, stack: Stack, system: AptLock, folder: Path, *, epoch: int) -> str:
    assert stack.base is not None
    finish = _FINISH.format(python=stack.interpreter())
    suite, files = stack.base.suite, fetch_packages(system.root, epoch=epoch)
    with tempfile.TemporaryDirectory(prefix="making-", dir=folder) as name:
        work = Path(name)
        repository, made, fresh = work / "packages", work / "made.tar", work / "root.tar"
        _write_repository(files.values(), repository, suite=suite)
        mmdebstrap(
            *(f"--architectures={stack.architecture()}", "--variant=apt", "--format=tar"),
            # apt's own user may have no access to the folder of the packages.
            '--aptopt=APT::Sandbox::User "root"',
            *("--include", ",".join(package.name for package in system.root)),
            # Releases whose base-files does not bring the links from /bin to /usr/bin need them made first.
            "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr",
            # mmdebstrap's cleanup runs apt once more, which leaves files of its own.
            "--skip=cleanup/apt",
            f'--customize-hook=chroot "$1" sh -c {shlex.quote(finish)}',
            *(f'--customize-hook=rm -rf "$1"/{name}' for name in _ADDED),
            *(suite, str(made), f"deb [trusted=yes] copy:{urllib.parse.quote(str(repository))} ./"),
            epoch=epoch,
        )
        digest = tool_output(
            [sys.executable, str(root / ARCHIVE), "root", str(made), str(fresh), str(epoch)],
            failure="the root file system cannot be written",
            place=str(fresh),
        ).strip()
        fresh.replace(folder / f"{digest}.tar")
    return digest


def _write_repository(files: Iterable[Path], folder: Path, *, suite: str) -> None:
    """Make `folder` an apt repository of exactly these files: `deb [trusted=yes] file:FOLDER ./`."""
    folder.mkdir(parents=True)
    stanzas = []
    for file in sorted(files):
        copy = folder / file.name
        shutil.copyfile(file, copy)
        # apt reads it as its own user.
        copy.chmod(0o644)
        command = ["dpkg-deb", "--field", os.fspath(file)]
        fields = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        location = f"Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {sha256_of_file(file)}\n"
        stanzas.append(f"{fields.rstrip()}\n{location}")
    index = folder / "Packages"
    index.write_text("\n".join(stanzas), encoding="utf-8")
    # mmdebstrap 1.5 takes essential packages from the suite that it was told alone.
    release = folder / "Release"
    checksum = f" {sha256_of_file(index)} {index.stat().st_size} Packages"
    release.write_text(f"Suite: {suite}\nCodename: {suite}\nSHA256:\n{checksum}\n", encoding="utf-8")
    for path in (folder, folder.parent, index, release):
        path.chmod(0o755 if path.is_dir() else 0o644)


def mmdebstrap(*arguments: str, epoch: int, hint: str | None = None) -> None:
    """Run mmdebstrap, no file newer than `epoch`; raises MachineError when it is missing or has failed."""
    tool_output(
        ["mmdebstrap", "--quiet", *arguments],
        variables={"SOURCE_DATE_EPOCH": str(epoch), "LC_ALL": "C", "TZ": "UTC"},
        umask=0o022,
        failure="the root file system cannot be made",
        place="mmdebstrap",
        hint=hint,
        absent="install mmdebstrap, or carry the root file system in as a tar",
    )
