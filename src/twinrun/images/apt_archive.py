"""Debian archives: packages resolved by apt with a root of its own, and fetched by address and digest."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import hashlib
import os
import re
import string
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

from twinrun.foundation.cache import locked_folder
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.processes import tool_output
from twinrun.foundation.redaction import redacted
from twinrun.manifests.locks import SystemPackage

# Folder of the cache that has every package that was fetched, by checksum.
PACKAGES = "packages"
# In every image and every root file system of a distribution.
ESSENTIAL = ("?essential", "apt")
_INSTALLED = re.compile(r"^Inst (\S+) .*?\(([^ ]+) ", re.MULTILINE)
_MIRROR = "http://deb.debian.org/{archive}"
# It keeps every version that there was, and four times a day takes what was published.
_SNAPSHOT = "http://snapshot.debian.org/archive/{archive}/{time}"
_SNAPSHOT_HOURS = 6
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_SECONDS, _AT_ONCE, _CHUNK = 30, 8, 1 << 20


def own_mirror() -> str:
    """Return the address that packages come from, with `{archive}` where the name of the archive stands."""
    return os.environ.get("TWINRUN_DEBIAN_MIRROR", _MIRROR)


def mirrors(epoch: int) -> list[str]:
    """Return the addresses to try for a file published by `epoch`: the mirror, then its snapshot."""
    named = os.environ.get("TWINRUN_DEBIAN_SNAPSHOT")
    time = datetime.datetime.fromtimestamp(epoch, datetime.UTC) + datetime.timedelta(hours=_SNAPSHOT_HOURS)
    older = (named or _SNAPSHOT).replace("{time}", time.strftime("%Y%m%dT%H%M%SZ"))
    # Who names a mirror alone wants no other server asked.
    alone = not named and "TWINRUN_DEBIAN_MIRROR" in os.environ
    return [own_mirror()] if alone else [own_mirror(), older]


def address(mirror: str, path: str) -> str:
    """Return the address of a file at a mirror, which may have all archives side by side or only Debian's."""
    archive, _, place = path.partition("/")
    mirror = mirror.rstrip("/")
    if "{archive}" in mirror:
        return f"{mirror.replace('{archive}', archive)}/{place}"
    return f"{mirror}{archive.removeprefix('debian')}/{place}"


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
        printed = self.apt(
            *("apt-get", "install", "--simulate", "--", *names),
            failure="the system packages cannot be resolved",
            error=InputError,
        )
        chosen = [f"{name}={version}" for name, version in _INSTALLED.findall(printed)]
        stanzas = self._stanzas(chosen)
        with (self._root / "status").open("a", encoding="utf-8") as status:
            status.writelines(f"{stanza}\nStatus: install ok installed\n\n" for stanza in stanzas)
        return tuple(self._package(stanza) for stanza in stanzas)

    def available(self, packages: Iterable[SystemPackage]) -> frozenset[SystemPackage]:
        """Return those of the packages that the suite's index still has."""
        stanzas = self._stanzas([package.name for package in packages])
        return frozenset(self._package(stanza) for stanza in stanzas) & frozenset(packages)

    def _package(self, stanza: str) -> SystemPackage:
        path = _field(stanza, "Filename")
        archive = "debian-security" if path.startswith("pool/updates/") else "debian"
        return SystemPackage(
            name=_field(stanza, "Package"),
            version=_field(stanza, "Version"),
            sha256=_field(stanza, "SHA256"),
            size=int(_field(stanza, "Size")),
            path=f"{archive}/{path}",
        )

    def _stanzas(self, packages: list[str]) -> list[str]:
        if not packages:
            return []
        text = self.apt("apt-cache", "show", "--", *packages, failure=None)
        # apt-cache shows an installed package twice.
        return [stanza for stanza in text.strip().split("\n\n") if "\nStatus: " not in stanza]

    def apt(self, program: str, *arguments: str, **told: Any) -> str:
        """Return what a program of apt prints of this archive; `told` is as `tool_output` takes it."""
        variables = {"APT_CONFIG": str(self._root / "apt.conf"), "LC_ALL": "C"}
        command, absent = (program, "--quiet=2", *arguments), "it comes with Debian and Ubuntu"
        return tool_output(command, variables=variables, absent=absent, **told)


@contextlib.contextmanager
def open_archive(suite: str, architecture: str) -> Iterator[AptArchive]:
    """Open the index of a suite at the mirror; raises MachineError when it is out of reach."""
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
        parts = (("debian", suite), ("debian", f"{suite}-updates"), ("debian-security", f"{suite}-security"))
        places = (f"{address(own_mirror(), f'{archive}/')} {name}" for archive, name in parts)
        sources = "".join(f"deb [signed-by={KEYRING}] {place} main\n" for place in places)
        (root / "etc/apt/sources.list").write_text(sources, encoding="utf-8")
        template = string.Template(Path(__file__).with_name("apt.conf.in").read_text(encoding="utf-8"))
        configuration = template.substitute(root=root, architecture=architecture)
        (root / "apt.conf").write_text(configuration, encoding="utf-8")
        archive = AptArchive(root)
        archive.apt(
            *("apt-get", "update", "--error-on=any"),
            failure="the lists of packages cannot be read",
            place=f"debian {suite}",
            hint="check the network, or name a mirror in TWINRUN_DEBIAN_MIRROR",
        )
        yield archive


def fetch_packages(
    packages: Iterable[SystemPackage], *, epoch: int, folder: Path | None = None
) -> dict[SystemPackage, Path]:
    """Return the file of every package, from the cache or by its address from a mirror; no index is asked.

    Args:
        epoch: when the packages were published, in seconds since 1970, for what the mirror has dropped.
        folder: mirror on this machine, which is then asked alone.

    Raises:
        MachineError: a file that nobody has, or that nobody has with its size and digest; says who was asked.
    """
    places = [f"{folder.absolute().as_uri()}/{{archive}}"] if folder else mirrors(epoch)
    with locked_folder(PACKAGES) as cache:
        files = {package: cache / f"{package.sha256}.deb" for package in packages}
        absent = [
            one for one, file in files.items() if not file.is_file() or sha256_of_file(file) != one.sha256
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            refused = list(pool.map(lambda one: _download(one, files[one], places), absent))
    missing = [(package, said) for package, said in zip(absent, refused, strict=True) if said]
    if missing:
        lines = [f"\n    {package}: {'; '.join(said)}" for package, said in missing]
        raise MachineError(
            f"{len(missing)} of {len(files)} locked system packages cannot be had",
            place=f"apt.lock: {missing[0][0]}",
            found="".join(lines[:5]),
            hint="check the network, name another mirror in TWINRUN_DEBIAN_MIRROR or a snapshot in"
            " TWINRUN_DEBIAN_SNAPSHOT, or move the lock with `invoke lock --only system --upgrade`",
        )
    return files


def _download(package: SystemPackage, file: Path, places: list[str]) -> list[str]:
    """Write a package to `file`, whole or not at all; return what each place answered if none had it."""
    said = []
    for place in places:
        url = address(place, package.path)
        partial = file.with_suffix(".part")
        try:
            with urllib.request.urlopen(url, timeout=_SECONDS) as answer, partial.open("wb") as out:  # noqa: S310
                digest, size = hashlib.sha256(), 0
                while size <= package.size and (chunk := answer.read(_CHUNK)):
                    digest.update(chunk)
                    size += out.write(chunk)
            if (size, digest.hexdigest()) == (package.size, package.sha256):
                partial.replace(file)
                return []
            wrong = f"{size} bytes, not {package.size}" if size != package.size else "another sha256"
            said.append(f"{redacted(url)}: {wrong}")
        except urllib.error.HTTPError as error:
            said.append(f"{redacted(url)}: {error.code} {error.reason}")
        except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
            said.append(f"{redacted(url)}: {getattr(error, 'reason', error)}")
        finally:
            partial.unlink(missing_ok=True)
    return said


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}: (.*)$", text, re.MULTILINE)
    assert found is not None, f"no field {name}"
    return found[1].strip()
