"""A checkout with one small stack, whose packages are made here: all of the build but the size."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from twinrun.images.wheels import fetch_wheels, requirements
from twinrun.manifests.locks import (
    AptLock,
    ImageLock,
    SystemPackage,
    apt_lock_text,
    image_lock_text,
    load_apt_lock,
)
from twinrun.manifests.stack import load_manifest, stamp

ROOT = Path(__file__).resolve().parents[1]
STACK = "tiny"
_STACK = """\
name = "tiny"
vendor = "cpu"
title = "A small stack"
python = ">=3.11,<3.13"
image = "twinrun-test/tiny"
packages = ["ca-certificates", "python3"]

[base]
suite = "bookworm"
"""


class Checkout(NamedTuple):
    """A project with the stack `tiny`, and a folder with all that it needs."""

    root: Path
    wheelhouse: Path
    base: Path
    """A root file system with the locked digest; of made-up packages it is an empty one."""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def wheel(
    name: str,
    version: str,
    *requires: str,
    tag: str = "py3-none-any",
    files: Mapping[str, str] | None = None,
) -> bytes:
    """Return a wheel; the same arguments give the same bytes."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    needed = "".join(f"Requires-Dist: {one}\n" for one in requires)
    content = {
        **(files or {f"{module}.py": f"VERSION = {version!r}\n"}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    content[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*content, f"{info}/RECORD"))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for path, text in content.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return stream.getvalue()


def write_root(tar: Path) -> str:
    """Write a tar that looks like a root file system and return its digest."""
    with tarfile.open(tar, "w") as stream:
        for name in ("bin", "etc", "usr"):
            folder = tarfile.TarInfo(f"./{name}")
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            stream.addfile(folder)
    return digest(tar.read_bytes())


def make_checkout(folder: Path, *, extra: str = "", name: str = "checkout") -> Checkout:
    """Return a checkout on made-up packages of a distribution: enough for all before the engine."""
    root, wheelhouse = _copied(folder / name, extra), folder / f"{name}-wheelhouse"
    wheelhouse.mkdir()
    packages = []
    for package in ("base-files", "libc6", "python3", "compiler"):
        content = f"the package {package}\n".encode()
        path = f"debian/pool/main/{package[0]}/{package}/{package}_1.0_amd64.deb"
        (wheelhouse / path).parent.mkdir(parents=True)
        (wheelhouse / path).write_bytes(content)
        packages.append(
            SystemPackage(name=package, version="1.0", sha256=digest(content), size=len(content), path=path)
        )
    base = folder / f"{name}-base.tar"
    lock = AptLock(root=tuple(packages[:3]), build=(packages[3],))
    _write_locks(root, lock, base_sha256=write_root(base), epoch=1_700_000_000)
    _write_wheels(root, wheelhouse)
    return Checkout(root, wheelhouse, base)


def make_real_checkout(folder: Path, *, extra: str = "", name: str = "checkout") -> Checkout:
    """Return a checkout on the packages that the stack `cpu` has locked: everything but torch."""
    root, wheelhouse = _copied(folder / name, extra), folder / f"{name}-wheelhouse"
    wheelhouse.mkdir()
    folder_of_cpu, stack = ROOT / "images/stacks/cpu", root / "images/stacks" / STACK
    shutil.copyfile(folder_of_cpu / "image.lock", stack / "image.lock")
    lock = load_apt_lock(folder_of_cpu)
    stamp_of_tiny = load_manifest(root, STACK).system_stamp()
    # A compiler takes longer to install than all the rest to build.
    small = apt_lock_text(stamp_of_tiny, lock.model_copy(update={"build": ()}))
    (stack / "apt.lock").write_text(small, encoding="utf-8")
    cpu = load_manifest(ROOT, "cpu")
    entries = requirements(folder_of_cpu / "requirements.lock", cpu)
    pip = {pin: hashes for pin, hashes in entries.items() if pin.startswith("pip==")}
    (file,) = fetch_wheels(pip, lock="requirements.lock", wheelhouse=None, stack=cpu, index=None, say=print)
    _write_wheels(root, wheelhouse, pip=file)
    return Checkout(root, wheelhouse, folder / "none")


def _copied(root: Path, extra: str) -> Path:
    """Copy what a build reads of this project, with git's history of it begun anew."""
    left_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "images", root / "images", ignore=left_out)
    shutil.copytree(ROOT / "src", root / "src", ignore=left_out)
    shutil.copyfile(ROOT / "tasks.py", root / "tasks.py")
    (root / "recipes").mkdir()
    stack = root / "images/stacks" / STACK
    stack.mkdir()
    (stack / "stack.toml").write_text(_STACK + extra, encoding="utf-8")
    (stack / "requirements.in").write_text("small==1.0\npip==25.3\n", encoding="utf-8")
    return root


def _write_locks(root: Path, lock: AptLock, *, base_sha256: str, epoch: int) -> None:
    folder, stack = root / "images/stacks" / STACK, load_manifest(root, STACK)
    text = image_lock_text(stack.image_stamp(), ImageLock(epoch=epoch, root=base_sha256))
    (folder / "image.lock").write_text(text, encoding="utf-8")
    (folder / "apt.lock").write_text(apt_lock_text(stack.system_stamp(), lock), encoding="utf-8")


def _write_wheels(root: Path, wheelhouse: Path, *, pip: Path | None = None) -> None:
    """Write wheels for the requirements, and their lock; of pip a made-up one unless its file is given."""
    folder = root / "images/stacks" / STACK
    lines = [stamp(folder / "requirements.in")]
    for name, version in (("big", "2.0"), ("large", "3.1"), ("pip", "25.3"), ("small", "1.0")):
        content = pip.read_bytes() if pip and name == "pip" else wheel(name, version)
        (wheelhouse / f"{name}-{version}-py3-none-any.whl").write_bytes(content)
        # As real locks have it: also the digest of a file for another platform.
        hashes = sorted({digest(content), digest(content + b" for another platform")})
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{one}" for one in hashes)]))
    (folder / "requirements.lock").write_text("\n".join([*lines, ""]), encoding="utf-8")


def commit(root: Path) -> None:
    """Make the checkout a repository of one commit, the same in every folder."""
    identity = ("-c", "user.name=test", "-c", "user.email=test", "-c", "commit.gpgsign=false")
    date = {"GIT_AUTHOR_DATE": "2025-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2025-01-01T00:00:00Z"}
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(root), **date}
    for arguments in (("init", "--quiet"), ("add", "-A"), (*identity, "commit", "--quiet", "-m", "all")):
        subprocess.run(["git", *arguments], cwd=root, env=environment, check=True)
