"""Against the mirror itself: apt resolves, fetches and installs what it has."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from tests.images.test_artifact_cache import at_once
from tests.indexes import Quiet
from tests.records import ROOT
from tests.registries import free_port, serve
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import sha256_of_file
from twinrun.images.apt_archive import (
    AptArchive,
    fetch_packages,
    open_archive,
    own_mirror,
    sources_list,
)
from twinrun.images.resolution import resolve_system
from twinrun.images.root_filesystem import make_root, write_repository
from twinrun.manifests.locks import AptLock, SystemPackage
from twinrun.manifests.stack import Base, Stack

SUITE: Literal["bookworm"] = "bookworm"
PROCESSOR = "amd64"
MIRROR = own_mirror()

pytestmark = pytest.mark.needs("mirror")


@pytest.fixture(scope="module")
def opened() -> Iterator[AptArchive]:
    with open_archive(SUITE, PROCESSOR) as archive:
        yield archive


@pytest.fixture
def archive(opened: AptArchive) -> AptArchive:
    """Return the archive for a system on which nothing is installed yet."""
    (opened._root / "status").write_text("", encoding="utf-8")
    return opened


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what one test has fetched for the next, and the user's cache out of it."""
    folder = tmp_path_factory.getbasetemp() / "packages"
    monkeypatch.setenv("TWINRUN_CACHE", str(folder))


def stack(**fields: object) -> Stack:
    given = {"name": "small", "vendor": "cpu", "title": "small", "python": ">=3.11", "image": "small"}
    return Stack.model_validate(given | {"base": Base(suite=SUITE)} | fields)


def names(packages: tuple[SystemPackage, ...]) -> set[str]:
    return {package.name for package in packages}


def test_each_package_is_in_the_first_stage_that_needs_it(archive: AptArchive) -> None:
    lock = resolve_system(stack(packages=("python3",), build_packages=("python3-venv",)), archive)
    assert {"libc6", "apt", "dpkg", "usr-is-merged"} <= names(lock.base)
    assert {"python3", "python3.11", "libsqlite3-0"} <= names(lock.runtime)
    assert {"python3-venv", "python3.11-venv"} <= names(lock.build)
    assert len(names(lock.all())) == len(lock.all())
    assert archive.available(lock.all()) == lock.all()
    assert archive.release_date() > 1_700_000_000


def test_a_package_that_does_not_exist_is_named(archive: AptArchive) -> None:
    with pytest.raises(InputError, match="cannot be resolved") as caught:
        archive.resolve(["no-such-package"])
    assert "no-such-package" in str(caught.value.found)


def test_a_version_that_the_mirror_has_dropped_is_not_offered(archive: AptArchive) -> None:
    (package,) = (one for one in archive.resolve(["hostname"]) if one.name == "hostname")
    older = package.model_copy(update={"version": "1.0"})
    other = package.model_copy(update={"sha256": "0" * 64})
    assert archive.available([package, older, other]) == (package,)


def test_a_mirror_out_of_reach_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINRUN_DEBIAN_MIRROR", f"http://127.0.0.1:{free_port()}/debian")
    with pytest.raises(MachineError, match="cannot be read") as caught, open_archive(SUITE, PROCESSOR):
        pass
    assert "TWINRUN_DEBIAN_MIRROR" in str(caught.value)


@pytest.mark.parametrize(
    ("mirror", "archive", "security"),
    [
        ("http://mirror.invalid/debian/", "mirror.invalid/debian", "mirror.invalid/debian-security"),
        ("http://at.invalid/{archive}/2026", "at.invalid/debian/2026", "at.invalid/debian-security/2026"),
    ],
)
def test_a_snapshot_has_its_archives_side_by_side(mirror: str, archive: str, security: str) -> None:
    places = [line.partition("http://")[2] for line in sources_list(SUITE, mirror).splitlines()]
    assert places == [
        f"{archive} bookworm main",
        f"{archive} bookworm-updates main",
        f"{security} bookworm-security main",
    ]


def _fetch(package: SystemPackage) -> None:
    (file,) = fetch_packages([package], suite=SUITE, architecture=PROCESSOR).values()
    assert sha256_of_file(file) == package.sha256


@pytest.mark.nightly
def test_ten_builds_at_once_get_the_locked_file(archive: AptArchive, tmp_path: Path) -> None:
    (package,) = (one for one in archive.resolve(["hostname"]) if one.name == "hostname")
    at_once(_fetch, package, cache=tmp_path / "cold")
    assert [file.stem for file in (tmp_path / "cold" / "packages").glob("*.deb")] == [package.sha256]


def test_what_is_fetched_is_the_locked_file(archive: AptArchive, tmp_path: Path) -> None:
    (package,) = (one for one in archive.resolve(["hostname"]) if one.name == "hostname")
    (file,) = fetch_packages([package], suite=SUITE, architecture=PROCESSOR).values()
    assert sha256_of_file(file) == package.sha256
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    (again,) = fetch_packages([package], suite=SUITE, architecture=PROCESSOR).values()
    assert sha256_of_file(again) == package.sha256
    write_repository([again], tmp_path / "repository", suite="bookworm")
    text = (tmp_path / "repository" / "Packages").read_text(encoding="utf-8")
    assert text.startswith("Package: hostname\n")
    assert f"SHA256: {package.sha256}\n" in text


def test_another_file_under_the_same_version_is_refused(archive: AptArchive) -> None:
    (package,) = (one for one in archive.resolve(["hostname"]) if one.name == "hostname")
    tampered = package.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(MachineError, match=r"apt\.lock: hostname=.*: the package is not the locked one"):
        fetch_packages([tampered], suite=SUITE, architecture=PROCESSOR)


def test_a_version_that_is_gone_is_told_with_the_way_out() -> None:
    gone = SystemPackage(name="hostname", version="1.0", sha256="0" * 64)
    with pytest.raises(MachineError, match="cannot be fetched") as caught:
        fetch_packages([gone], suite=SUITE, architecture=PROCESSOR)
    assert "snapshot" in str(caught.value)


class Proxy(Quiet):
    """Passes requests on to the mirror, but has no package of the name `hostname` beside its snapshot."""

    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:  # noqa: N802 - named so by the library
        self.seen.append(self.path)
        _, kind, archive, *path = self.path.split("/")
        gone = kind == "mirror" and "hostname_" in self.path
        address = "/".join([MIRROR.replace("{archive}", archive), *path[kind == "snapshot" :]])
        try:
            with urllib.request.urlopen(f"{address}{'.gone' * gone}") as answer:
                content, status = answer.read(), 200
        except urllib.error.HTTPError as error:
            content, status = b"", error.code
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def test_what_the_mirror_has_dropped_comes_from_its_snapshot(
    archive: AptArchive, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (package,) = (one for one in archive.resolve(["hostname"]) if one.name == "hostname")
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), Proxy)) as port:
        monkeypatch.setenv("TWINRUN_DEBIAN_MIRROR", f"http://127.0.0.1:{port}/mirror/{{archive}}")
        with pytest.raises(MachineError, match="cannot be fetched"):
            fetch_packages([package], suite=SUITE, architecture=PROCESSOR, epoch=1_700_000_000)
        address = f"http://127.0.0.1:{port}/snapshot/{{archive}}/{{time}}"
        monkeypatch.setenv("TWINRUN_DEBIAN_SNAPSHOT", address)
        found = fetch_packages([package], suite=SUITE, architecture=PROCESSOR, epoch=1_700_000_000)
    assert sha256_of_file(found[package]) == package.sha256
    # Six hours later: a snapshot is taken four times a day.
    assert any(path.startswith("/snapshot/debian/20231115T041320Z/pool/") for path in Proxy.seen)
    assert any(path.startswith("/snapshot/debian-security/20231115T041320Z/") for path in Proxy.seen)


_ELSEWHERE = """
import os, sys
from pathlib import Path
from typing import Literal
from twinrun.manifests.locks import AptLock
from twinrun.images.root_filesystem import make_root, write_repository
os.umask(0o077)
lock = AptLock.model_validate_json(sys.argv[1])
make_root(Path(sys.argv[2]), lock=lock, suite=sys.argv[3], architecture=sys.argv[4], epoch=int(sys.argv[5]))
"""


# Another host name, and Debian 13's mmdebstrap with its hooks.
_OTHERWISE = """
hostname elsewhere
mount --bind "$0/usr/share/mmdebstrap" /usr/share/mmdebstrap
PATH="$0/usr/bin:$PATH" exec "$@"
"""


@pytest.mark.image
@pytest.mark.needs("root")  # to take another host name
def test_the_root_file_system_is_the_same_wherever_it_is_made(archive: AptArchive, tmp_path: Path) -> None:
    lock = resolve_system(stack(), archive)
    here, there = tmp_path / "here.tar", tmp_path / "a folder" / "there.tar"
    there.parent.mkdir()
    make_root(here, lock=lock, suite=SUITE, architecture=PROCESSOR, epoch=1_700_000_000)
    with open_archive("trixie", PROCESSOR) as newer:
        found = {package.name: package for package in newer.resolve(["mmdebstrap"])}["mmdebstrap"]
    (file,) = fetch_packages([found], suite="trixie", architecture=PROCESSOR).values()
    other = tmp_path / "mmdebstrap"
    subprocess.run(["dpkg-deb", "--extract", str(file), str(other)], check=True)
    text = lock.model_dump_json()
    program = [sys.executable, "-c", _ELSEWHERE, text, str(there), SUITE, PROCESSOR, "1700000000"]
    variables = os.environ | {
        "PYTHONPATH": str(ROOT / "src"),
        "TMPDIR": str(there.parent),
        "TZ": "Asia/Tokyo",
    }
    wrap = ["unshare", "--uts", "--mount", "sh", "-ec", _OTHERWISE, str(other)]
    subprocess.run([*wrap, *program], env=variables, check=True, timeout=300)
    assert sha256_of_file(here) == sha256_of_file(there)


def test_a_root_file_system_needs_its_packages(tmp_path: Path) -> None:
    gone = AptLock(base=(SystemPackage(name="hostname", version="1.0", sha256="0" * 64),))
    with pytest.raises(MachineError, match="cannot be fetched"):
        make_root(tmp_path / "root.tar", lock=gone, suite=SUITE, architecture=PROCESSOR, epoch=1)
    assert not (tmp_path / "root.tar").exists()
