"""An environment of the cache whose files somebody has changed: told, and in the record."""

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
        subprocess.run([uv, *command], check=True, env=variables)
    seal(environment)
    return environment


@pytest.fixture
def environment(installed: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "environment"
    shutil.copytree(installed, copy, symlinks=True)
    assert changed_files(copy) == {}
    return copy


def edited(folder: Path) -> None:
    """Change a byte, and set the time back."""
    file, before = folder / MODULE, (folder / MODULE).stat()
    file.write_text("A = 2\n", encoding="utf-8")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(folder: Path) -> None:
    other = folder / "other"
    other.write_text("A = 3\n", encoding="utf-8")
    other.replace(folder / MODULE)


def recorded(folder: Path) -> None:
    """Change a file, and what RECORD says of it."""
    (record,) = folder.glob(f"{PACKAGES}/*.dist-info/RECORD")
    lines = record.read_text(encoding="utf-8").splitlines()
    record.write_text("\n".join(line for line in lines if "__init__" not in line), encoding="utf-8")


@pytest.mark.parametrize(
    ("attack", "name", "said"),
    [
        (edited, MODULE, "not as it was installed"),
        (replaced, MODULE, "not as it was installed"),
        (lambda folder: (folder / MODULE).unlink(), MODULE, "missing"),
        (recorded, f"{PACKAGES}/alpha-1.0.dist-info/RECORD", "not as it was installed"),
        (
            lambda folder: (folder / PACKAGES / "alpha" / "data.txt").write_text("3\n"),
            f"{PACKAGES}/alpha/data.txt",
            "not as it was installed",
        ),
        (
            lambda folder: (folder / PACKAGES / "sitecustomize.py").touch(),
            f"{PACKAGES}/sitecustomize.py",
            "of no wheel",
        ),
        (lambda folder: (folder / PACKAGES / "a.pth").touch(), f"{PACKAGES}/a.pth", "of no wheel"),
        (
            lambda folder: (folder / "bin" / "activate_this.py").write_text("import os\n"),
            "bin/activate_this.py",
            "not as it was installed",
        ),
    ],
)
def test_a_changed_environment_is_named(
    environment: Path, attack: Callable[[Path], object], name: str, said: str
) -> None:
    attack(environment)
    assert changed_files(environment)[name] == said
    # Nor does it become right by being seen once.
    assert changed_files(environment)[name] == said


def test_another_interpreter_is_named(environment: Path) -> None:
    (environment / "bin" / "python").unlink()
    (environment / "bin" / "python").write_text("#!/bin/sh\n", encoding="utf-8")
    assert changed_files(environment) == {"bin/python": "no link to an interpreter"}


def test_an_unchanged_environment_is_not_read_again(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twinrun.execution.installed_files.sha256_of_file", lambda _path: "0" * 64)
    assert changed_files(environment) == {}
    assert MODULE in changed_files(environment, whole=True)


def test_an_installation_is_hashed_while_it_is_in_memory(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment / "verified").unlink()
    assert seal(environment) == {}
    monkeypatch.setattr("twinrun.execution.installed_files.sha256_of_file", lambda _path: pytest.fail("read"))
    assert changed_files(environment) == {}


def test_what_a_package_cache_had_changed_is_not_taken_for_right(environment: Path) -> None:
    """uv links files of its cache into environments, so who edits one edits both."""
    edited(environment)
    assert seal(environment) == {MODULE: "not as it was installed"}
    assert changed_files(environment) == {MODULE: "not as it was installed"}


def test_an_environment_from_before_seals_is_held_against_its_records(environment: Path) -> None:
    (environment / "complete").write_text("", encoding="utf-8")
    (environment / "verified").unlink()
    assert changed_files(environment) == {}
    edited(environment)
    assert list(changed_files(environment)) == [MODULE]
