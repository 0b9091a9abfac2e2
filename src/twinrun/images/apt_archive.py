"""Debian archives: packages resolved and downloaded by apt with a root of its own."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import os
import re
import string
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.locks import locked_folder
from twinrun.foundation.processes import tool_output
from twinrun.manifests.locks import SystemPackage

# Folder of the cache that has every package that was fetched, by checksum.
PACKAGES = "packages"
# In every image and every root file system of a distribution.
ESSENTIAL = ("?essential", "apt")
_INSTALLED = re.compile(r"^Inst (\S+) .*?\(([^ ]+) ", re.MULTILINE)
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
        lists = self._root / "var" / "lib" / "apt" / "lists"
        files = [*lists.glob("*_InRelease"), *lists.glob("*_Release")]
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
        printed = self._apt(
            *("apt-get", "install", "--simulate", "--", *names),
            failure="the system packages cannot be resolved",
            error=InputError,
        )
        chosen = [f"{name}={version}" for name, version in _INSTALLED.findall(printed)]
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
        self._apt(
            *("apt-get", "download", "--", *map(str, packages)),
            folder=folder,
            failure="the system packages cannot be fetched",
            place="apt-get download",
            hint="check the network; a mirror drops old versions, a snapshot of it keeps them:"
            " name one in TWINRUN_DEBIAN_SNAPSHOT, or run `invoke lock`",
        )

    def _stanzas(self, packages: list[str]) -> list[str]:
        if not packages:
            return []
        text = self._apt("apt-cache", "show", "--", *packages, failure=None)
        # apt-cache shows an installed package twice.
        return [stanza for stanza in text.strip().split("\n\n") if "\nStatus: " not in stanza]

    def _apt(self, program: str, *arguments: str, **told: Any) -> str:
        variables = {"APT_CONFIG": str(self._root / "apt.conf"), "LC_ALL": "C"}
        command, absent = (program, "--quiet=2", *arguments), "it comes with Debian and Ubuntu"
        return tool_output(command, variables=variables, absent=absent, **told)

    def update(self, place: str) -> None:
        """Run `apt-get update`; raises MachineError."""
        self._apt(
            *("apt-get", "update", "--error-on=any"),
            failure="the lists of packages cannot be read",
            place=place,
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
        template = string.Template(Path(__file__).with_name("apt.conf.in").read_text(encoding="utf-8"))
        configuration = template.substitute(root=root, architecture=architecture)
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
    with locked_folder(PACKAGES) as folder:
        files = {package: folder / f"{package.sha256}.deb" for package in packages}
        absent = [package for package, file in files.items() if not _has_checksum(file, package)]
        if absent:
            _download(absent, folder, suite=suite, architecture=architecture, epoch=epoch)
    for package, file in files.items():
        if not _has_checksum(file, package):
            raise MachineError(
                "the package is not the locked one",
                place=f"apt.lock: {package}",
                allowed=package.sha256,
                hint="the mirror has another file under the same version; run `invoke lock`",
            )
    return files


def _download(
    packages: list[SystemPackage], folder: Path, *, suite: str, architecture: str, epoch: int | None
) -> None:
    """Download packages to `folder`, each under its checksum, from the mirror, else from its snapshot.

    Raises:
        MachineError: neither has them; it is the mirror's.
    """
    older = snapshot(epoch) if epoch else None
    refused: MachineError | None = None
    for mirror in (own_mirror(), *([older] if older else [])):
        try:
            with (
                open_archive(suite, architecture, mirror=mirror) as archive,
                tempfile.TemporaryDirectory(dir=folder, prefix=".downloading-") as partial,
            ):
                archive.download(packages, Path(partial))
                for file in Path(partial).glob("*.deb"):
                    file.rename(folder / f"{sha256_of_file(file)}.deb")
                return
        except MachineError as error:
            refused = refused or error
    assert refused is not None, "there is a mirror"
    raise refused


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
