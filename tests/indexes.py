"""Package indexes on this machine, with wheels and source archives written by hand."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests import tiny_stack
from tests.registries import serve

MANIFEST = (
    'name = "small"\nvendor = "cpu"\ntitle = "A stack"\npython = ">=3.11,<3.13"\nimage = "twinrun/small"\n'
)


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and keeps no log."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - named so by the library
        """Say nothing."""


def wheel(index: Path, name: str, version: str, *requires: str, **options: Any) -> None:
    """Write a wheel by hand and list it on its page of the index."""
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    file = f"{name.replace('-', '_')}-{version}-{options.get('tag', 'py3-none-any')}.whl"
    (folder / file).write_bytes(tiny_stack.wheel(name, version, *requires, **options))
    links = "".join(
        f'<a href="{quote(path.name)}#sha256={digest_of(path)}">{path.name}</a>'
        for path in folder.glob("*.whl")
    )
    page = f"<!DOCTYPE html><html><body>{links}</body></html>"
    (folder / "index.html").write_text(page, encoding="utf-8")


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a general index and the framework's own, with no other index in reach."""
    general, own = tmp_path / "served" / "general", tmp_path / "served" / "own"
    wheel(general, "alpha", "1.0", "beta>=2", "nvidia-gamma==1.0")
    wheel(general, "beta", "2.0")
    wheel(general, "nvidia-gamma", "1.0")
    wheel(own, "alpha", "1.0+rocm6.3", "beta>=2")
    with serving_folder(tmp_path / "served") as found:
        _only_here(monkeypatch, tmp_path)
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{found}/general")
        yield found


@contextlib.contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """Serve the files of a folder and yield the address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with serve(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        yield f"http://127.0.0.1:{port}"


def _only_here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Keep uv from the user's own indexes, proxies, files and cache."""
    for name in list(os.environ):
        if name.startswith(("UV_", "PIP_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in (("NO_CONFIG", "1"), ("CACHE_DIR", str(folder / "cache")), ("HTTP_RETRIES", "0")):
        monkeypatch.setenv(f"UV_{name}", value)


def small_stack(root: Path) -> Path:
    """Write a stack that has no lock yet and return its folder."""
    folder = root / "images" / "stacks" / "small"
    folder.mkdir(parents=True)
    (folder / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    (folder / "requirements.in").write_text("# the framework\nalpha==1.0\n", encoding="utf-8")
    return folder


def source_archive(index: Path, name: str, version: str, files: Mapping[str, str] | None = None) -> str:
    """Write a source archive by hand, list it on its page and return its digest."""
    path = index / name / f"{name}-{version}.tar.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.2\nName: {name}\nVersion: {version}\n"
    with tarfile.open(path, "w:gz") as archive:
        for member, text in {"PKG-INFO": metadata, **(files or {})}.items():
            entry = tarfile.TarInfo(f"{name}-{version}/{member}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    page = path.parent / "index.html"
    links = (
        page.read_text(encoding="utf-8") if page.is_file() else "<!DOCTYPE html><html><body></body></html>"
    )
    link = f'<a href="{path.name}#sha256={digest_of(path)}">{path.name}</a></body>'
    page.write_text(links.replace("</body>", link), encoding="utf-8")
    return digest_of(path)


def forget(folder: Path) -> None:
    """Take away what uv remembers of the index."""
    for number in range(9):
        if not (folder / f"cache-{number}").exists():
            (folder / "cache").rename(folder / f"cache-{number}")
            return
