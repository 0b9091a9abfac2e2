"""Virtual environments in the cache, whole and damaged."""

from __future__ import annotations

import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.machine.test_doctor import named
from twinrun.foundation.cache import COMPLETE, environment_folder
from twinrun.machine.doctor import diagnose
from twinrun.manifests.stack import load_stack, stamp


@pytest.fixture
def environment(root: Path) -> Path:
    """A whole environment of the stack, with one package as it is locked."""
    stack = root / "images" / "stacks" / "plain"
    lock = f"{stamp(stack / 'requirements.in')}\nwhole-package==1.2\nother==1 ; python_version < '3'\n"
    (stack / "requirements.lock").write_text(lock, encoding="utf-8")
    folder = environment_folder("plain", load_stack(root, "plain").requirements_sha256(root))
    venv.create(folder, symlinks=True)
    (folder / COMPLETE).touch()
    (site,) = folder.glob("lib/python*/site-packages")
    files = {
        "whole_package/__init__.py": "",
        "whole_package-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: Whole_Package\nVersion: 1.2\n",
        "whole_package-1.2.dist-info/RECORD": "whole_package/__init__.py,,\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    return folder


def remove_interpreter(folder: Path) -> None:
    for path in (folder / "bin").glob("python*"):
        path.unlink()
        path.symlink_to("no-such-python")


def break_interpreter(folder: Path) -> None:
    python = folder / "bin" / "python"
    python.unlink()
    python.write_text("#!/bin/sh\necho 'libpython3.11.so: cannot open' >&2; exit 127\n", encoding="utf-8")
    python.chmod(0o755)


def change_version(folder: Path) -> None:
    (metadata,) = folder.glob("lib/python*/site-packages/*/METADATA")
    metadata.write_text("Name: whole-package\nVersion: 1.3\n", encoding="utf-8")


def remove_marker(folder: Path) -> None:
    (folder / COMPLETE).unlink()


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (remove_interpreter, "its interpreter fails: cannot start: No such file or directory"),
        (break_interpreter, "its interpreter fails: libpython3.11.so: cannot open"),
        (change_version, "not as locked: whole-package"),
        (remove_marker, "not installed to the end, or by an older twinrun"),
    ],
)
def test_broken_environment_is_named(
    root: Path, environment: Path, damage: Callable[[Path], None], found: str
) -> None:
    damage(environment)
    diagnosis = diagnose(root)
    check = named(diagnosis, "environment (plain)")
    assert check.found == found
    assert named(diagnosis, "environments").found == "0 of 1 made"
    # An engine makes an unfinished environment again by itself; it trusts one that is marked as complete.
    expected = ("warn", 0) if damage is remove_marker else ("fail", 3)
    assert (check.status, diagnosis.exit_code) == expected
    assert damage is remove_marker or f"`rm -r {environment}`" in str(check.hint)
