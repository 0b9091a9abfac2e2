"""Packages of a distribution: resolved and fetched by an apt that has a root of its own."""

from __future__ import annotations

import contextlib
import email.utils
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from twinrun.apt import SystemPackage
from twinrun.cache import cache_root
from twinrun.errors import InputError, MachineError, closest
from twinrun.files import sha256_of_file
from twinrun.manifest import Frozen
from twinrun.process import last_lines

# What is in every image and every root file system of a distribution.
ESSENTIAL = ("?essential", "apt")
_INSTALLED = re.compile(r"^Inst (\S+) .*?\(([^ ]+) ", re.MULTILINE)
# Release files say until when they count; an older snapshot is as good, because the lock has the digests.
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


class Distribution(Frozen):
    """Where the suites of one distribution are had."""

    name: str
    suites: tuple[str, ...]
    mirror: str
    """Used unless TWINRUN_<NAME>_MIRROR names another."""
    security: str
    """Mirror and suite of the security updates."""
    components: str
    keyring: str
    """Of the keys that sign its releases."""

    def sources(self, suite: str) -> str:
        """Return apt's list of sources for `suite`, with its updates."""
        mirror = os.environ.get(f"TWINRUN_{self.name.upper()}_MIRROR", self.mirror).rstrip("/")
        places = (f"{mirror} {suite}", f"{mirror} {suite}-updates", self.security)
        return "".join(
            f"deb [signed-by={self.keyring}] {place.format(mirror=mirror, suite=suite)} {self.components}\n"
            for place in places
        )


_DISTRIBUTIONS = (
    Distribution(
        name="debian",
        suites=("bookworm", "trixie"),
        mirror="http://deb.debian.org/debian",
        security="{mirror}-security {suite}-security",
        components="main",
        keyring="/usr/share/keyrings/debian-archive-keyring.gpg",
    ),
    Distribution(
        name="ubuntu",
        suites=("jammy", "noble"),
        mirror="http://archive.ubuntu.com/ubuntu",
        security="{mirror} {suite}-security",
        components="main universe",
        keyring="/usr/share/keyrings/ubuntu-archive-keyring.gpg",
    ),
)


class Archive:
    """The packages of one suite; nothing of this machine's packages and sources is read or changed."""

    def __init__(self, root: Path) -> None:
        """Take over a folder that `open_archive` has prepared."""
        self._root = root

    def date(self) -> int:
        """Return when the newest of the release files was made, in seconds since 1970."""
        files = [*self._lists().glob("*_InRelease"), *self._lists().glob("*_Release")]
        dates = [_field(file.read_text(encoding="utf-8"), "Date") for file in files]
        return max(round(email.utils.parsedate_to_datetime(date).timestamp()) for date in dates)

    def resolve(self, names: Iterable[str]) -> tuple[SystemPackage, ...]:
        """Return what apt would add to the packages added before, and add it.

        Raises:
            InputError: no such package, or they exclude each other.
        """
        names = list(names)
        if not names:
            return ()
        done = self._apt("apt-get", "install", "--simulate", *names)
        if done.returncode:
            raise InputError("the system packages cannot be resolved", found=last_lines(done.stderr, 8))
        chosen = [f"{name}={version}" for name, version in _INSTALLED.findall(done.stdout)]
        stanzas = self._stanzas(chosen)
        with (self._root / "status").open("a", encoding="utf-8") as status:
            status.writelines(f"{stanza}\nStatus: install ok installed\n\n" for stanza in stanzas)
        return tuple(_package(stanza) for stanza in stanzas)

    def offers(self, packages: Iterable[SystemPackage]) -> tuple[SystemPackage, ...]:
        """Return those of the packages that the suite still carries with the same digest."""
        known = {_package(stanza) for stanza in self._stanzas([package.name for package in packages])}
        return tuple(package for package in packages if package in known)

    def fetch(self, packages: Iterable[SystemPackage], folder: Path) -> None:
        """Download packages to `folder` in any file name; raises MachineError."""
        done = self._apt("apt-get", "download", *map(str, packages), folder=folder)
        if done.returncode:
            raise MachineError(
                "the system packages cannot be fetched",
                place="apt-get download",
                found=last_lines(done.stderr, 6),
                hint="check the network; a mirror drops old versions, a snapshot of it keeps them:"
                " name one in TWINRUN_DEBIAN_MIRROR, or run `invoke lock`",
            )

    def _lists(self) -> Path:
        return self._root / "var" / "lib" / "apt" / "lists"

    def _stanzas(self, packages: list[str]) -> list[str]:
        if not packages:
            return []
        text = self._apt("apt-cache", "show", *packages).stdout
        # A package that is marked as installed is shown a second time.
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
        """Read the lists of packages; raises MachineError."""
        done = self._apt("apt-get", "update", "--error-on=any")
        if done.returncode:
            raise MachineError(
                "the lists of packages cannot be read",
                place=place,
                found=last_lines(done.stderr, 6),
                hint="check the network, or name a mirror in TWINRUN_DEBIAN_MIRROR or TWINRUN_UBUNTU_MIRROR",
            )


@contextlib.contextmanager
def open_archive(suite: str, architecture: str) -> Iterator[Archive]:
    """Read the lists of a suite; raises InputError for one that is unknown, MachineError out of reach."""
    distribution = _distribution(suite)
    if not Path(distribution.keyring).is_file():
        raise MachineError(
            f"the keys of {distribution.name} are missing",
            place=distribution.keyring,
            hint=f"install the package {distribution.name}-keyring or {distribution.name}-archive-keyring",
        )
    with tempfile.TemporaryDirectory(prefix="twinrun-apt-") as folder:
        root = Path(folder)
        for part in ("etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
            (root / part).mkdir(parents=True)
        (root / "status").touch()
        (root / "etc/apt/sources.list").write_text(distribution.sources(suite), encoding="utf-8")
        configuration = _CONFIGURATION.format(root=root, architecture=architecture)
        (root / "apt.conf").write_text(configuration, encoding="utf-8")
        archive = Archive(root)
        archive.update(f"{distribution.name} {suite}")
        yield archive


def fetch_packages(
    packages: Iterable[SystemPackage], *, suite: str, architecture: str
) -> dict[SystemPackage, Path]:
    """Return the file of every package, from the cache or the mirror; each is held against its digest.

    Raises:
        MachineError: the mirror has them no longer, or what it has is not what was locked.
    """
    folder = cache_root() / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    files = {package: folder / f"{package.sha256}.deb" for package in packages}
    absent = [package for package, file in files.items() if not _is_whole(file, package)]
    if absent:
        with open_archive(suite, architecture) as archive, tempfile.TemporaryDirectory(dir=folder) as fresh:
            archive.fetch(absent, Path(fresh))
            for file in Path(fresh).glob("*.deb"):
                file.rename(folder / f"{sha256_of_file(file)}.deb")
    for package, file in files.items():
        if not _is_whole(file, package):
            raise MachineError(
                "the package is not the locked one",
                place=f"apt.lock: {package}",
                allowed=package.sha256,
                hint="the mirror has another file under the same version; run `invoke lock`",
            )
    return files


def write_repository(files: Iterable[Path], folder: Path) -> None:
    """Make `folder` a package source of exactly these files: `deb [trusted=yes] file:FOLDER ./`."""
    folder.mkdir(parents=True, exist_ok=True)
    stanzas = []
    for file in sorted(files):
        copy = folder / file.name
        shutil.copyfile(file, copy)
        # apt reads it as a user of its own.
        copy.chmod(0o644)
        fields = subprocess.run(
            ["dpkg-deb", "--field", os.fspath(file)], capture_output=True, text=True, check=True
        ).stdout
        facts = f"Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {sha256_of_file(file)}\n"
        stanzas.append(f"{fields.rstrip()}\n{facts}")
    index = folder / "Packages"
    index.write_text("\n".join(stanzas), encoding="utf-8")
    index.chmod(0o644)


def _distribution(suite: str) -> Distribution:
    suites = {name: one for one in _DISTRIBUTIONS for name in one.suites}
    if suite not in suites:
        raise InputError(
            "unknown suite",
            place="stack.toml:base.suite",
            found=suite,
            allowed=sorted(suites),
            hint=closest(suite, suites),
        )
    return suites[suite]


def _is_whole(file: Path, package: SystemPackage) -> bool:
    return file.is_file() and sha256_of_file(file) == package.sha256


def _package(stanza: str) -> SystemPackage:
    return SystemPackage(
        name=_field(stanza, "Package"), version=_field(stanza, "Version"), sha256=_field(stanza, "SHA256")
    )


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", text, re.MULTILINE)
    assert found is not None, f"no field {name}"
    return found[1].strip()
