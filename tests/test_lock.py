from __future__ import annotations

import base64
import functools
import hashlib
import os
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from twinrun.errors import InputError, MachineError
from twinrun.lock import lock_names, refresh
from twinrun.stack import load_stack, pins, stamp

MANIFEST = (
    'name = "small"\nvendor = "cpu"\ntitle = "A stack"\npython = ">=3.11,<3.13"\nimage = "twinrun/small"\n'
)
REPLACES = """
replaces = ["alpha", "nvidia-*"]
[[unverified]]
requirement = "alpha==1.0+rocm6.3"
source = "its release"
"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and keeps no log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named so by the library
        """Say nothing."""


def wheel(index: Path, name: str, version: str, *requires: str) -> None:
    """Write a wheel by hand and list it on its page of the index."""
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    information = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {it}" for it in requires),
    ]
    content = {
        f"{name.replace('-', '_')}.py": "",
        f"{information}/METADATA": "\n".join([*metadata, ""]),
        f"{information}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    with zipfile.ZipFile(folder / file, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(text)}")
        archive.writestr(f"{information}/RECORD", "\n".join([*rows, f"{information}/RECORD,,", ""]))
    links = [
        f'<a href="{path.name}#sha256={digest_of(path)}">{path.name}</a>' for path in folder.glob("*.whl")
    ]
    (folder / "index.html").write_text(
        f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>", encoding="utf-8"
    )


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a general index and the framework's own, with no other index in reach."""
    general, own = tmp_path / "served" / "general", tmp_path / "served" / "own"
    wheel(general, "alpha", "1.0", "beta>=2", "nvidia-gamma==1.0")
    wheel(general, "beta", "2.0")
    wheel(general, "nvidia-gamma", "1.0")
    wheel(own, "alpha", "1.0+rocm6.3", "beta>=2")
    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    _only_here(monkeypatch, tmp_path)
    found = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"{found}/general")
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def _only_here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep uv from the user's own indexes, proxies, files and cache."""
    for name in [
        key for key in os.environ if key.startswith(("UV_", "PIP_")) or key.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)
    for name, value in (
        ("UV_NO_CONFIG", "1"),
        ("UV_CACHE_DIR", str(folder / "cache")),
        ("UV_HTTP_RETRIES", "0"),
    ):
        monkeypatch.setenv(name, value)


@pytest.fixture
def folder(tmp_path: Path, address: str) -> Path:
    """Return the folder of a stack that has no lock yet."""
    folder = tmp_path / "images" / "stacks" / "small"
    folder.mkdir(parents=True)
    (folder / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    (folder / "requirements.in").write_text("# the framework\nalpha==1.0\n", encoding="utf-8")
    return folder


def text_of(folder: Path) -> str:
    return (folder / "requirements.lock").read_text(encoding="utf-8")


def test_a_lock_has_stamp_and_hashes_and_names_no_index(folder: Path, tmp_path: Path) -> None:
    change = refresh(tmp_path, "small")
    text = text_of(folder)
    assert text.splitlines()[0] == stamp(folder / "requirements.in")
    assert pins(text) == {"alpha": ("1.0",), "beta": ("2.0",), "nvidia-gamma": ("1.0",)}
    wheels = (tmp_path / "served" / "general").glob("*/*.whl")
    assert sorted(line.split(":")[1] for line in text.splitlines() if "--hash=sha256" in line) == sorted(
        map(digest_of, wheels)
    )
    assert "127.0.0.1" not in text
    assert "http" not in text
    assert change.stale
    assert change.changes["beta"] == "absent -> 2.0"
    assert load_stack(tmp_path, "small").stack.name == "small"


def test_resolving_again_changes_nothing(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    change = refresh(tmp_path, "small")
    assert (change.changes, change.stale, text_of(folder)) == ({}, False, text)


def test_a_newer_release_comes_only_with_an_upgrade(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    wheel(tmp_path / "served" / "general", "beta", "3.0")
    (tmp_path / "cache").rename(tmp_path / "old-cache")
    assert refresh(tmp_path, "small").changes == {}
    assert refresh(tmp_path, "small", upgrade=True).changes == {"beta": "2.0 -> 3.0"}


def test_a_check_tells_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    (folder / "requirements.in").write_text("beta==2.0\n", encoding="utf-8")
    change = refresh(tmp_path, "small", check=True)
    assert change.stale
    assert change.changes == {"alpha": "1.0 -> absent", "nvidia-gamma": "1.0 -> absent"}
    assert text_of(folder) == text


def test_without_the_frameworks_index_replaced_packages_stay_out(folder: Path, tmp_path: Path) -> None:
    (folder / "stack.toml").write_text(MANIFEST + REPLACES, encoding="utf-8")
    refresh(tmp_path, "small")
    assert pins(text_of(folder)) == {"beta": ("2.0",)}
    assert text_of(folder).count("--hash") == 1
    assert load_stack(tmp_path, "small").unhashed(tmp_path) == ("alpha==1.0+rocm6.3",)


def test_the_frameworks_index_gives_the_local_version(folder: Path, tmp_path: Path, address: str) -> None:
    (folder / "stack.toml").write_text(MANIFEST + REPLACES, encoding="utf-8")
    refresh(tmp_path, "small", index=f"{address}/own")
    assert pins(text_of(folder)) == {"alpha": ("1.0+rocm6.3",), "beta": ("2.0",)}
    assert digest_of(next((tmp_path / "served" / "own" / "alpha").glob("*.whl"))) in text_of(folder)
    assert "127.0.0.1" not in text_of(folder)
    assert load_stack(tmp_path, "small").unhashed(tmp_path) == ()


@pytest.mark.parametrize("requirement", ["alpha==9.0", "delta==1.0", "not a requirement"])
def test_what_cannot_be_resolved_leaves_the_old_lock(folder: Path, tmp_path: Path, requirement: str) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    (folder / "requirements.in").write_text(f"{requirement}\n", encoding="utf-8")
    with pytest.raises(MachineError, match="could not be resolved"):
        refresh(tmp_path, "small")
    assert text_of(folder) == text


def test_an_index_out_of_reach_leaves_the_old_lock(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    with socket.socket() as closed:
        # Bound but not listening: every connection is refused, and nobody else takes the port.
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{closed.getsockname()[1]}/general")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
        with pytest.raises(MachineError, match="the old lock stays"):
            refresh(tmp_path, "small", upgrade=True)
    assert text_of(folder) == text
    assert sorted(path.name for path in folder.iterdir()) == [
        "requirements.in",
        "requirements.lock",
        "stack.toml",
    ]


def test_one_stack_or_all_are_named(folder: Path, tmp_path: Path) -> None:
    assert lock_names(tmp_path, None) == lock_names(tmp_path, "small") == ["small"]
    with pytest.raises(InputError, match="did you mean `small`"):
        lock_names(tmp_path, "smal")
