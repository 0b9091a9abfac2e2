"""Files of system packages by their address, size and digest, from a mirror and a snapshot played here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.indexes import serving_folder
from twinrun.foundation.errors import InputError, MachineError
from twinrun.images.apt_archive import fetch_packages, open_archive
from twinrun.manifests.locks import AptLock, SystemPackage, apt_lock_text, parse_apt_lock

EPOCH = 1_700_000_000
PATH = "debian/pool/main/a/alpha/alpha_1.0_amd64.deb"
CONTENT = b"the package alpha\n" * 99
ALPHA = SystemPackage(
    name="alpha", version="1.0", sha256=hashlib.sha256(CONTENT).hexdigest(), size=len(CONTENT), path=PATH
)


def put(folder: Path, content: bytes = CONTENT) -> None:
    file = folder / PATH
    file.parent.mkdir(parents=True)
    file.write_bytes(content)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a mirror; the folder `snapshot` beside it is served as the archive of that time."""
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    # There is no index of any suite.
    with serving_folder(tmp_path / "mirror") as here, serving_folder(tmp_path / "snapshot") as there:
        monkeypatch.setenv("TWINRUN_DEBIAN_MIRROR", f"{here}/{{archive}}")
        monkeypatch.setenv("TWINRUN_DEBIAN_SNAPSHOT", f"{there}/{{archive}}")
        yield tmp_path / "mirror"


def test_the_pool_has_what_no_index_names(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(mirror)
    (file,) = fetch_packages([ALPHA], epoch=EPOCH).values()
    assert file.read_bytes() == CONTENT
    # The cache needs nobody, unless its file has changed.
    monkeypatch.setenv("TWINRUN_DEBIAN_MIRROR", "http://127.0.0.1:1/{archive}")
    assert fetch_packages([ALPHA], epoch=EPOCH) == {ALPHA: file}
    file.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(MachineError, match="cannot be had"):
        fetch_packages([ALPHA], epoch=EPOCH)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "404 File not found"),
        (CONTENT[:-1], f"{len(CONTENT) - 1} bytes, not {len(CONTENT)}"),
        (CONTENT + b"more" * (1 << 20), f"bytes, not {len(CONTENT)}"),
        (CONTENT[:-1] + b"!", "another sha256"),
        (b"down", "Connection refused"),
    ],
    ids=["gone", "short", "long", "changed", "down"],
)
def test_what_the_mirror_lacks_comes_from_the_snapshot_or_is_named(
    mirror: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, said: str
) -> None:
    if content == b"down":
        monkeypatch.setenv("TWINRUN_DEBIAN_MIRROR", "http://127.0.0.1:1/{archive}")
    elif content is not None:
        put(mirror, content)
    with pytest.raises(MachineError) as refused:
        fetch_packages([ALPHA], epoch=EPOCH)
    assert refused.value.place == "apt.lock: alpha=1.0"
    found = str(refused.value.found)
    assert said in found
    # Both were asked, and both are named.
    assert found.count(f"/{PATH}: ") == 2
    assert not list((mirror.parent / "cache/packages").glob("*.[dp]*"))
    put(mirror.parent / "snapshot")
    (file,) = fetch_packages([ALPHA], epoch=EPOCH).values()
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "line",
    [
        "alpha=1.0",
        f"alpha=1.0  {'a' * 64}",
        f"alpha=1.0  {'a' * 63}  5  {PATH}",
        f"alpha=1.0  {'a' * 64}  -5  {PATH}",
        f"alpha=1.0  {'a' * 64}  5  /etc/passwd.deb",
        f"alpha=1.0  {'a' * 64}  5  debian/../../alpha.deb",
        f"alpha=1.0  {'a' * 64}  5  http://host/alpha.deb",
        f"$(id)=1.0  {'a' * 64}  5  {PATH}",
    ],
)
def test_a_line_that_is_no_package_is_refused_by_its_number(line: str) -> None:
    text = apt_lock_text("# stamp", AptLock(root=(ALPHA,)))
    assert parse_apt_lock(text, place="apt.lock").root == (ALPHA,)
    with pytest.raises(InputError, match="not a locked package") as refused:
        parse_apt_lock(f"{text}{line}\n", place="apt.lock")
    assert refused.value.place == "apt.lock:5"


@pytest.mark.needs("mirror")
def test_the_index_gives_address_size_and_digest() -> None:
    with open_archive("bookworm", "amd64") as archive:
        assert archive.release_date() > EPOCH
        packages = archive.resolve(["hostname"])
        with pytest.raises(InputError, match="cannot be resolved"):
            archive.resolve(["no-such-package"])
        hostname = next(one for one in packages if one.name == "hostname")
        other = hostname.model_copy(update={"version": "0.1"})
        assert archive.available([hostname, other]) == {hostname}
    (file,) = fetch_packages([hostname], epoch=EPOCH).values()
    assert file.stat().st_size == hostname.size
