from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.records import ROOT
from twinrun.errors import InputError
from twinrun.stack import find_stacks, load_stack, normalise, pins, stamp

MANIFEST = """
name = "{name}"
vendor = "cpu"
title = "A stack"
python = ">=3.11,<3.13"
image = "twinrun/small"
"""
LOCK = """\
alpha==1.0 \\
    --hash=sha256:{a}
Beta_Two==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:{a}
beta-two==3.0 ; python_full_version >= '3.12' \\
    --hash=sha256:{a}
""".format(a="a" * 64)
UNVERIFIED = '[[unverified]]\nrequirement = "{}"\nsource = "its release"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a stack called `small`."""
    folder = tmp_path / "images" / "stacks" / "small"
    folder.mkdir(parents=True)
    (folder / "stack.toml").write_text(MANIFEST.format(name="small"), encoding="utf-8")
    (folder / "requirements.in").write_text("alpha==1.0\nbeta-two\n", encoding="utf-8")
    lock(folder)
    return folder


def lock(folder: Path) -> None:
    text = f"{stamp(folder / 'requirements.in')}\n{LOCK}"
    (folder / "requirements.lock").write_text(text, encoding="utf-8")


def test_a_stack_knows_its_lock(folder: Path, tmp_path: Path) -> None:
    loaded = find_stacks(tmp_path)["small"]
    digest = hashlib.sha256((folder / "requirements.lock").read_bytes()).hexdigest()
    assert loaded.lock_sha256 == digest
    assert loaded.image() == f"twinrun/small:{digest[:12]}"
    assert loaded.lock(tmp_path) == folder / "requirements.lock"
    assert loaded.locked(tmp_path) == {"alpha": ("1.0",), "beta-two": ("2.0", "3.0")}


def test_requirements_changed_after_the_lock_are_refused(folder: Path, tmp_path: Path) -> None:
    old = stamp(folder / "requirements.in")
    (folder / "requirements.in").write_text("alpha==1.1\nbeta-two\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"does not belong to requirements\.in") as caught:
        load_stack(tmp_path, "small")
    assert (caught.value.found, caught.value.allowed) == (old, stamp(folder / "requirements.in"))
    assert "invoke lock --stack small" in str(caught.value)
    lock(folder)
    assert load_stack(tmp_path, "small").stack.name == "small"


def test_a_lock_without_stamp_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "requirements.lock").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match=r"\(no stamp\)"):
        load_stack(tmp_path, "small")


@pytest.mark.parametrize("name", ["requirements.in", "requirements.lock"])
def test_a_missing_file_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name}: missing"):
        load_stack(tmp_path, "small")


def test_an_unknown_stack_is_told_with_the_nearest(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean `small`"):
        load_stack(tmp_path, "smal")


def test_the_name_is_the_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "stack.toml").write_text(MANIFEST.format(name="large"), encoding="utf-8")
    with pytest.raises(InputError, match=r"stack\.toml:name: the name is not the folder's"):
        load_stack(tmp_path, "small")


def test_a_folder_without_manifest_is_told_not_skipped(folder: Path, tmp_path: Path) -> None:
    (folder.parent / "half-made").mkdir()
    with pytest.raises(InputError, match="half-made"):
        find_stacks(tmp_path)


def test_what_the_lock_has_no_hash_for_is_listed(folder: Path, tmp_path: Path) -> None:
    pinned = ("alpha==1.0", "alpha==1.0+rocm6.3", "gamma==2.0")
    text = MANIFEST.format(name="small") + "".join(UNVERIFIED.format(pin) for pin in pinned)
    (folder / "stack.toml").write_text(text, encoding="utf-8")
    assert load_stack(tmp_path, "small").unhashed(tmp_path) == ("alpha==1.0+rocm6.3", "gamma==2.0")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("torch==2.7.0+rocm6.3\n", {"torch": ("2.7.0+rocm6.3",)}),
        ("numpy==2.2.0 ; python_version < '3.12'\nNumPy==2.3.0;x\n", {"numpy": ("2.2.0", "2.3.0")}),
        ("# numpy==1.0\n    --hash=sha256:0\nnumpy>=2\n", {}),
        ("zope.interface==7.0 \\\n", {"zope-interface": ("7.0",)}),
    ],
)
def test_pins_are_exact_versions_by_normal_name(text: str, found: dict[str, tuple[str, ...]]) -> None:
    assert pins(text) == found


@pytest.mark.parametrize("name", ["Zope.Interface", "zope_interface", "zope--interface"])
def test_spellings_of_one_package_are_one(name: str) -> None:
    assert normalise(name) == "zope-interface"


def test_the_stacks_of_the_project_load() -> None:
    assert {"cpu"} <= set(find_stacks(ROOT))


def test_a_lock_that_is_not_utf8_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "requirements.lock").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"requirements\.lock"):
        load_stack(tmp_path, "small")
