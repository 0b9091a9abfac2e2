"""An environment of the cache that somebody has edited: every edit is told, wherever it is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from uv import find_uv_bin

from tests.indexes import wheel
from twinrun.execution.installed_files import changed_files, seal

PACKAGES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
MODULE = f"{PACKAGES}/alpha/__init__.py"
CHANGED, ADDED, MISSING = "not as it was installed", "added since the installation", "missing"
INTERPRETER = "interpreter of bin/python"
# Names that Python, the loader or a shell would read, and one that nobody reads.
NEW_NAMES = (
    "sitecustomize.py",
    "libcudart.so.1",
    "libalpha.so",
    "alpha.zip",
    "a.pth",
    "a.egg-link",
    "activate",
    "x",
)
NEW_PLACES = (PACKAGES, f"{PACKAGES}/alpha", "bin", "lib", ".", "share/deep")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as uv makes it, with one package."""
    folder = tmp_path_factory.mktemp("installed")
    wheel(folder / "index", "alpha", "1.0", files={"alpha/__init__.py": "A = 1\n", "alpha/data.txt": "2\n"})
    (file,) = (folder / "index").rglob("*.whl")
    environment, uv = folder / "environment", os.fspath(find_uv_bin())
    python = str(environment / "bin" / "python")
    variables = os.environ | {"UV_CACHE_DIR": str(folder / "cache")}
    for command in (
        ("venv", "--quiet", "--python", sys.executable, str(environment)),
        ("pip", "install", "--quiet", "--offline", "--python", python, str(file)),
    ):
        subprocess.run([uv, *command], check=True, env=variables, timeout=60)
    assert seal(environment) == {}
    return environment


@pytest.fixture
def environment(installed: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "environment"
    shutil.copytree(installed, copy, symlinks=True)
    assert changed_files(copy) == {}
    return copy


def rewritten(path: Path) -> None:
    """Change what a file holds but neither its size nor its times."""
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:] if content else b"x")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def linked_away(path: Path) -> None:
    """Put a link to the same content in the place of a file, which could be changed later."""
    other = path.with_name("moved-away")
    path.rename(other)
    path.symlink_to(other.name)


def pointed_elsewhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("/bin/sh")


NEW_ENTRIES: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_text("import os\n", encoding="utf-8"),
    "link to a file": lambda path: path.symlink_to("/etc/hostname"),
    "link to a folder": lambda path: path.symlink_to("/tmp"),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", NEW_ENTRIES)
def test_every_new_entry_is_named(environment: Path, kind: str) -> None:
    paths = [environment / place / name for place in NEW_PLACES for name in NEW_NAMES]
    new = {path.relative_to(environment).as_posix(): path for path in paths if not path.exists()}
    for path in new.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        NEW_ENTRIES[kind](path)
    assert changed_files(environment) == dict.fromkeys(new, ADDED)
    assert len(new) > 40
    for path in new.values():
        path.unlink()
    assert changed_files(environment) == {}


@pytest.mark.parametrize("edit", [rewritten, linked_away, pointed_elsewhere, Path.unlink])
def test_every_edit_of_an_entry_is_named(environment: Path, edit: Callable[[Path], object]) -> None:
    """Each file and link gets another content, a link in its place, another target, or is removed."""
    entries = [path for path in environment.rglob("*") if not path.is_dir() or path.is_symlink()]
    own = [
        path
        for path in entries
        if path.name not in ("sealed", "verified") and "__pycache__" not in path.parts
    ]
    links = edit in (pointed_elsewhere, Path.unlink)
    edited = [path for path in own if path.is_symlink() <= links]
    assert len(edited) > 10
    for path in edited:
        edit(path)
    said = dict.fromkeys((path.relative_to(environment).as_posix() for path in edited), CHANGED)
    if edit is Path.unlink:
        said = dict.fromkeys(said, MISSING)
    for _ in range(2):
        # Nor does it become right by being seen once.
        found = changed_files(environment)
        assert {name: one for name, one in found.items() if one != ADDED and name != INTERPRETER} == said


def test_a_package_of_no_wheel_is_named(environment: Path) -> None:
    evil = environment / PACKAGES / "evil.dist-info"
    evil.mkdir()
    (evil / "RECORD").write_text(
        "evil.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n", encoding="utf-8"
    )
    (environment / PACKAGES / "evil.py").touch()
    added = {f"{PACKAGES}/evil.dist-info/RECORD": ADDED, f"{PACKAGES}/evil.py": ADDED}
    assert changed_files(environment) == added


@pytest.mark.parametrize("program", ["#!/bin/sh\n", None])
def test_another_interpreter_is_named(environment: Path, tmp_path: Path, program: str | None) -> None:
    python, script = environment / "bin" / "python", tmp_path / "script"
    script.write_text('#!/bin/sh\nexec python3 "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    python.unlink()
    python.write_text(program, encoding="utf-8") if program else python.symlink_to(script)
    assert changed_files(environment) == {"bin/python": CHANGED, INTERPRETER: CHANGED}


def test_an_interpreter_that_was_replaced_behind_its_link_is_named(environment: Path, tmp_path: Path) -> None:
    own = tmp_path / "python"
    shutil.copy(environment / "bin" / "python", own)
    (environment / "bin" / "python").unlink()
    (environment / "bin" / "python").symlink_to(own)
    assert seal(environment) == {}
    with own.open("ab") as stream:
        stream.write(b"x")
    assert changed_files(environment) == {INTERPRETER: CHANGED}


def test_an_unchanged_environment_is_not_read_again(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinrun.execution.installed_files.sha256_of_file", lambda _path: "0" * 64)
    assert changed_files(environment) == {}
    assert MODULE in changed_files(environment, whole=True)


def test_an_installation_is_read_while_it_is_in_memory(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment / "verified").unlink()
    assert seal(environment) == {}
    monkeypatch.setattr("twinrun.execution.installed_files.sha256_of_file", lambda _path: pytest.fail("read"))
    assert changed_files(environment) == {}


def test_what_a_package_cache_had_changed_is_not_taken_for_right(environment: Path) -> None:
    """uv links files of its cache into environments, so who edits one edits both."""
    rewritten(environment / MODULE)
    assert seal(environment) == {MODULE: CHANGED}
    assert changed_files(environment) == {MODULE: CHANGED}
