"""The files of an image: taken from a folder or fetched into the cache, each held against its lock."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from twinrun import archive
from twinrun.apt import SystemPackage
from twinrun.building import fetch
from twinrun.building.parcels import Parcel
from twinrun.building.tags import fits
from twinrun.cache import cache_root
from twinrun.errors import InputError
from twinrun.files import sha256_of_file
from twinrun.stack import Alternative, Stack, normalise


class Shelf:
    """The files of one folder for one stack, by name and by digest; each is read once."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        self.folder = folder
        self._stack = stack
        self._digests: dict[Path, str] = {}
        self._files: list[Path] = []
        self.look()

    def look(self) -> None:
        """List the folder again."""
        self._files = sorted(path for path in self.folder.rglob("*") if path.is_file())

    def named(self, parcel: Parcel) -> list[Path]:
        """Return the files that call themselves what the parcel is, and would run in the image."""
        named = [path for path in self._files if calls_itself(path, parcel)]
        return [path for path in named if path.suffix != ".whl" or fits(path.name, self._stack)]

    def packages(self) -> dict[str, Path]:
        """Return the packages of the distribution by their digest."""
        return {self.digest(path): path for path in self._files if path.suffix == ".deb"}

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a file of the shelf."""
        if path not in self._digests:
            self._digests[path] = sha256_of_file(path)
        return self._digests[path]

    def right(self, parcel: Parcel) -> list[Path]:
        """Return the wheels or archives that the lock names.

        Raises:
            InputError: there are files of that name and none of them is locked.
        """
        files = self.named(parcel)
        right = [path for path in files if not parcel.digests or self.digest(path) in parcel.digests]
        if files and not right:
            raise not_locked(parcel, files[0], self.digest(files[0]))
        return right


def not_locked(parcel: Parcel, path: Path, digest: str) -> InputError:
    """Return the error of a file that is not what its lock says."""
    return InputError(
        f"{parcel.entry} is not the locked file",
        place=str(path),
        found=f"sha256 {digest}",
        allowed=list(parcel.digests[:3]),
        hint=f"{parcel.lock} names it; carry the file in again, or run `invoke lock`",
    )


def chosen_alternatives(stack: Stack, wheelhouse: Path | None) -> tuple[Alternative, ...]:
    """Return the second-hand wheels that were carried in; a file of that name alone is not enough.

    Raises:
        InputError: a wheel calls itself one of them and is not.
    """
    if wheelhouse is None:
        return ()
    shelf = Shelf(wheelhouse, stack)
    return tuple(pin for pin in stack.alternative if shelf.right(_alternative_parcel(stack, pin)))


def _alternative_parcel(stack: Stack, pin: Alternative) -> Parcel:
    lock = f"images/stacks/{stack.name}/stack.toml"
    return Parcel(lock=lock, entry=pin.requirement, kind="wheel", folder="python", digests=(pin.sha256,))


def gather_wheels(
    parcels: Iterable[Parcel], *, wheelhouse: Path | None, stack: Stack, say: Callable[[str], None]
) -> dict[Parcel, list[Path]]:
    """Return the verified files of Python packages, one or more for each.

    Raises:
        InputError: the wheelhouse lacks one, or has another file under its name.
        MachineError: one cannot be fetched.
    """
    parcels = list(parcels)
    if wheelhouse is not None:
        shelf = Shelf(wheelhouse, stack)
        return {parcel: shelf.right(parcel) or _absent(parcel, wheelhouse) for parcel in parcels}
    folder = cache_root() / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    shelf = Shelf(folder, stack)
    missing = [parcel for parcel in parcels if not _cached(shelf, parcel)]
    if missing:
        say(f"fetching {len(missing)} Python package(s): {', '.join(one.entry for one in missing[:6])}"[:160])
        fetch.fetch_wheels([one for one in missing if one.kind == "wheel"], folder, stack=stack)
        fetch.fetch_archives([one for one in missing if one.kind == "archive"], folder)
        shelf.look()
    return {parcel: shelf.right(parcel) or _absent(parcel, folder) for parcel in parcels}


def _cached(shelf: Shelf, parcel: Parcel) -> bool:
    """Say whether the cache has the parcel; a file that has changed there is removed and fetched again."""
    files = shelf.named(parcel)
    right = [path for path in files if not parcel.digests or shelf.digest(path) in parcel.digests]
    for path in files if parcel.digests and not right else ():
        path.unlink()
    return bool(right)


def gather_packages(
    packages: tuple[SystemPackage, ...], *, wheelhouse: Path | None, stack: Stack, say: Callable[[str], None]
) -> dict[SystemPackage, Path]:
    """Return the verified files of packages of the distribution; raises as `gather_wheels`."""
    folder = cache_root() / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    if wheelhouse is not None:
        _carry_in(packages, wheelhouse, folder, stack)
    assert stack.base is not None
    absent = [one for one in packages if not (folder / f"{one.sha256}.deb").is_file()]
    if absent:
        say(f"fetching {len(absent)} system package(s): {', '.join(map(str, absent[:6]))}"[:160])
    return archive.fetch_packages(packages, suite=stack.base.suite, architecture=stack.architecture())


def _carry_in(packages: Iterable[SystemPackage], wheelhouse: Path, folder: Path, stack: Stack) -> None:
    """Copy the packages into the cache, from where they are taken without a mirror; raises InputError."""
    known = Shelf(wheelhouse, stack).packages()
    for package in packages:
        kept = folder / f"{package.sha256}.deb"
        if package.sha256 in known:
            if not kept.is_file() or sha256_of_file(kept) != package.sha256:
                shutil.copyfile(known[package.sha256], kept)
            continue
        parcel = Parcel(
            lock=f"images/stacks/{stack.name}/apt.lock",
            entry=str(package),
            kind="package",
            folder="packages",
            digests=(package.sha256,),
        )
        near = sorted(
            {*wheelhouse.rglob(f"{package.name}_*.deb"), *wheelhouse.rglob(f"{package.sha256}.deb")}
        )
        if near:
            raise not_locked(parcel, near[0], sha256_of_file(near[0]))
        _absent(parcel, wheelhouse)


def place(source: Path, target: Path) -> None:
    """Put a file at another path, without a copy where the file system allows."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def calls_itself(path: Path, parcel: Parcel) -> bool:
    """Say whether a file has the name and the version of a parcel; a local label is not asked for."""
    if parcel.kind == "archive":
        name, _, version = path.name.removesuffix(".tar.gz").rpartition("-")
    else:
        name, version = [*path.name.split("-", 2), ""][:2] if path.suffix == ".whl" else ("", "")
    wanted = parcel.version()
    return normalise(name) == parcel.name() and wanted in (version, version.partition("+")[0])


def _absent(parcel: Parcel, folder: Path) -> list[Path]:
    raise InputError(
        f"{parcel.entry} is missing",
        place=str(folder),
        allowed=list(parcel.digests[:3]) or None,
        hint=f"{parcel.lock} names it; a machine that has built it keeps it in its cache",
    )
