"""Debian archives: packages resolved and downloaded by apt with a root of its own."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import functools
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.locks import locked
from twinrun.foundation.processes import last_lines
from twinrun.foundation.text import redacted
from twinrun.manifests.locks import SystemPackage

# In every image and every root file system of a distribution.
ESSENTIAL = ("?essential", "apt")
_INSTALLED = re.compile(r"^Inst (\S+) .*?\(([^ ]+) ", re.MULTILINE)
# An expired Release file, as snapshots have it, is as good: the lock has the checksums.
_CONFIGURATION = """\
Dir "{root}/";
Dir::State::status "{root}/status";
Dir::Etc::sourceparts "/dev/null";
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
Acquire::Retries "3";
"""


_MIRROR = "http://deb.debian.org/{archive}"
# It keeps every version that there was.
_SNAPSHOT = "http://snapshot.debian.org/archive/{archive}/{time}"
# Four times a day it takes what was published.
_SNAPSHOT_HOURS = 6
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def own_mirror() -> str:
    """Return the address that all packages come from, with `{archive}` where a path follows the archive."""
    return os.environ.get("TWINRUN_DEBIAN_MIRROR", _MIRROR)


def snapshot(epoch: int) -> str | None:
    """Return the address of the archives as they were at a time; None where a mirror is named alone."""
    named = os.environ.get("TWINRUN_DEBIAN_SNAPSHOT")
    if not named and "TWINRUN_DEBIAN_MIRROR" in os.environ:
        return None
    time = datetime.datetime.fromtimestamp(epoch, datetime.UTC) + datetime.timedelta(hours=_SNAPSHOT_HOURS)
    return (named or _SNAPSHOT).replace("{time}", time.strftime("%Y%m%dT%H%M%SZ"))


def sources_list(suite: str, mirror: str) -> str:
    """Return sources.list for `suite` with its updates."""
    mirror = mirror.rstrip("/")
    archive = mirror.replace("{archive}", "debian")
    # A snapshot has the archives side by side, each with its times below it.
    security = mirror.replace("{archive}", "debian-security") if archive != mirror else f"{mirror}-security"
    places = (f"{archive} {suite}", f"{archive} {suite}-updates", f"{security} {suite}-security")
    return "".join(f"deb [signed-by={KEYRING}] {place} main\n" for place in places)


class AptArchive:
    """Packages of one suite; this machine's packages and sources are neither read nor changed."""

    def __init__(self, root: Path) -> None:
        """Use the folder that `open_archive` has prepared."""
        self._root = root

    def release_date(self) -> int:
        """Return the date of the newest Release file, in seconds since 1970."""
        files = [*self._lists().glob("*_InRelease"), *self._lists().glob("*_Release")]
        dates = [_field(file.read_text(encoding="utf-8"), "Date") for file in files]
        return max(round(email.utils.parsedate_to_datetime(date).timestamp()) for date in dates)

    def resolve(self, names: Iterable[str]) -> tuple[SystemPackage, ...]:
        """Return the packages that apt would install beside those resolved before, and mark them installed.

        Raises:
            InputError: no such package, or they exclude each other.
        """
        names = list(names)
        if not names:
            return ()
        done = self._apt("apt-get", "install", "--simulate", "--", *names)
        if done.returncode:
            raise InputError(
                "the system packages cannot be resolved", found=redacted(last_lines(done.stderr, 8))
            )
        chosen = [f"{name}={version}" for name, version in _INSTALLED.findall(done.stdout)]
        stanzas = self._stanzas(chosen)
        with (self._root / "status").open("a", encoding="utf-8") as status:
            status.writelines(f"{stanza}\nStatus: install ok installed\n\n" for stanza in stanzas)
        return tuple(_package(stanza) for stanza in stanzas)

    def available(self, packages: Iterable[SystemPackage]) -> tuple[SystemPackage, ...]:
        """Return those of the packages that the suite still has with the same checksum."""
        offered = {_package(stanza) for stanza in self._stanzas([package.name for package in packages])}
        return tuple(package for package in packages if package in offered)

    def download(self, packages: Iterable[SystemPackage], folder: Path) -> None:
        """Download packages to `folder`, under file names of apt's choice; raises MachineError."""
        done = self._apt("apt-get", "download", "--", *map(str, packages), folder=folder)
        if done.returncode:
            raise MachineError(
                "the system packages cannot be fetched",
                place="apt-get download",
                found=redacted(last_lines(done.stderr, 6)),
                hint="check the network; a mirror drops old versions, a snapshot of it keeps them:"
                " name one in TWINRUN_DEBIAN_SNAPSHOT, or run `invoke lock`",
            )

    def _lists(self) -> Path:
        return self._root / "var" / "lib" / "apt" / "lists"

    def _stanzas(self, packages: list[str]) -> list[str]:
        if not packages:
            return []
        text = self._apt("apt-cache", "show", "--", *packages).stdout
        # apt-cache shows an installed package twice.
        return [stanza for stanza in text.strip().split("\n\n") if "\nStatus: " not in stanza]

    def _apt(self, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        variables = os.environ | {"APT_CONFIG": str(self._root / "apt.conf"), "LC_ALL": "C"}
        command = (arguments[0], "--quiet=2", *arguments[1:])
        try:
            return subprocess.run(
                command, env=variables, cwd=folder, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise MachineError(
                f"cannot start: {error.strerror}", place=arguments[0], hint="it comes with Debian and Ubuntu"
            ) from None

    def update(self, place: str) -> None:
        """Run `apt-get update`; raises MachineError."""
        done = self._apt("apt-get", "update", "--error-on=any")
        if done.returncode:
            raise MachineError(
                "the lists of packages cannot be read",
                place=place,
                found=redacted(last_lines(done.stderr, 6)),
                hint="check the network, or name a mirror in TWINRUN_DEBIAN_MIRROR",
            )


@contextlib.contextmanager
def open_archive(suite: str, architecture: str, *, mirror: str | None = None) -> Iterator[AptArchive]:
    """Open the archive of a suite; raises MachineError when it is out of reach.

    Args:
        mirror: address as `own_mirror` has it, which is the default.
    """
    if not Path(KEYRING).is_file():
        raise MachineError(
            "the keys of Debian are missing",
            place=KEYRING,
            hint="install the package debian-archive-keyring",
        )
    with tempfile.TemporaryDirectory(prefix="twinrun-apt-") as folder:
        root = Path(folder)
        for part in ("etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
            (root / part).mkdir(parents=True)
        (root / "status").touch()
        (root / "etc/apt/sources.list").write_text(
            sources_list(suite, mirror or own_mirror()), encoding="utf-8"
        )
        configuration = _CONFIGURATION.format(root=root, architecture=architecture)
        (root / "apt.conf").write_text(configuration, encoding="utf-8")
        archive = AptArchive(root)
        archive.update(f"debian {suite}")
        yield archive


def fetch_packages(
    packages: Iterable[SystemPackage], *, suite: str, architecture: str, epoch: int | None = None
) -> dict[SystemPackage, Path]:
    """Return the file of every package from the cache, the mirror or its snapshot, verified by checksum.

    Args:
        epoch: when the packages were published, in seconds since 1970, for what the mirror has dropped.

    Raises:
        MachineError: nobody has one any more, or all have another file under its version.
    """
    with locked_packages() as folder:
        files = {package: folder / f"{package.sha256}.deb" for package in packages}
        absent = [package for package, file in files.items() if not _has_checksum(file, package)]
        if absent:
            _download_from_any(absent, folder, functools.partial(open_archive, suite, architecture), epoch)
    for package, file in files.items():
        if not _has_checksum(file, package):
            raise MachineError(
                "the package is not the locked one",
                place=f"apt.lock: {package}",
                allowed=package.sha256,
                hint="the mirror has another file under the same version; run `invoke lock`",
            )
    return files


@contextlib.contextmanager
def locked_packages() -> Iterator[Path]:
    """Hold the cache's folder of packages, made where it is missing: one process at a time fills it."""
    folder = cache_root() / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock"):
        yield folder


def _download_from_any(
    packages: list[SystemPackage],
    folder: Path,
    open_suite: Callable[..., contextlib.AbstractContextManager[AptArchive]],
    epoch: int | None,
) -> None:
    """Download packages from the mirror, else from its snapshot; raises the mirror's MachineError."""
    try:
        _download(packages, folder, open_suite())
    except MachineError as error:
        older = snapshot(epoch) if epoch else None
        if older is None:
            raise
        try:
            _download(packages, folder, open_suite(mirror=older))
        except MachineError:
            raise error from None


def _download(
    packages: list[SystemPackage], folder: Path, opened: contextlib.AbstractContextManager[AptArchive]
) -> None:
    """Download packages to `folder`, each under its checksum; raises MachineError."""
    with opened as archive, tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as partial:
        archive.download(packages, Path(partial))
        for file in Path(partial).glob("*.deb"):
            file.rename(folder / f"{sha256_of_file(file)}.deb")


def _has_checksum(file: Path, package: SystemPackage) -> bool:
    return file.is_file() and sha256_of_file(file) == package.sha256


def _package(stanza: str) -> SystemPackage:
    return SystemPackage(
        name=_field(stanza, "Package"), version=_field(stanza, "Version"), sha256=_field(stanza, "SHA256")
    )


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", text, re.MULTILINE)
    assert found is not None, f"no field {name}"
    return found[1].strip()
