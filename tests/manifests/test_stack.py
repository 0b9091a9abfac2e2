from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.records import ROOT
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import load_toml
from twinrun.manifests.locks import (
    AptLock,
    ImageLock,
    SystemPackage,
    apt_lock_text,
    first_changed_entry,
    image_lock_text,
    with_checksums,
)
from twinrun.manifests.stack import Stack, find_stacks, load_stack, normalise, pins, stamp

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
IMAGE = """
packages = ["python3"]
build_packages = ["g++"]

[base]
suite = "bookworm"
"""
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
    text = with_checksums(f"{stamp(folder / 'requirements.in')}\n{LOCK}")
    (folder / "requirements.lock").write_text(text, encoding="utf-8")


@pytest.fixture
def imaged(folder: Path) -> Path:
    """Return the folder of the same stack with all that an image needs."""
    text = MANIFEST.format(name="small") + IMAGE.format()
    (folder / "stack.toml").write_text(text, encoding="utf-8")
    image_locks(folder)
    return folder


def image_locks(folder: Path) -> None:
    stack = load_toml(folder / "stack.toml", Stack)
    package = SystemPackage(name="python3", version="3.10.6-1~22.04", sha256="b" * 64)
    (folder / "apt.lock").write_text(
        apt_lock_text(stack.system_stamp(), AptLock(runtime=(package,))), encoding="utf-8"
    )
    lock = ImageLock(epoch=1_700_000_000, base="c" * 64)
    (folder / "image.lock").write_text(image_lock_text(stack.image_stamp(), lock), encoding="utf-8")


def test_a_stack_knows_its_lock(folder: Path, tmp_path: Path) -> None:
    loaded = find_stacks(tmp_path)["small"]
    digest = hashlib.sha256((folder / "requirements.lock").read_bytes()).hexdigest()
    assert loaded.requirements_sha256(tmp_path) == digest != loaded.lock_sha256
    assert loaded.image() == f"twinrun/small:{loaded.inputs_sha256[:12]}"
    assert (loaded.image_lock(tmp_path), loaded.system_packages(tmp_path)) == (None, None)
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


def test_the_locks_of_an_image_are_read_as_they_were_written(imaged: Path, tmp_path: Path) -> None:
    loaded = load_stack(tmp_path, "small")
    lock, packages = loaded.image_lock(tmp_path), loaded.system_packages(tmp_path)
    assert lock is not None
    assert packages is not None
    assert [str(package) for package in packages.all()] == ["python3=3.10.6-1~22.04"]
    assert packages.runtime[0].sha256 == "b" * 64
    assert (lock.epoch, lock.base) == (1_700_000_000, "c" * 64)


def test_a_second_hand_wheel_is_no_pin_that_every_image_needs(folder: Path, tmp_path: Path) -> None:
    more = f'[[alternative]]\nrequirement = "alpha==1.0+cpu"\nsha256 = "{"a" * 64}"\nsource = "a list"\n'
    (folder / "stack.toml").write_text(MANIFEST.format(name="small") + more, encoding="utf-8")
    loaded = load_stack(tmp_path, "small")
    assert loaded.unhashed(tmp_path) == ()


@pytest.mark.parametrize(
    ("old", "new", "lock"),
    [
        ('packages = ["python3"]', 'packages = ["python3", "git"]', "apt.lock"),
        ('build_packages = ["g++"]', "build_packages = []", "apt.lock"),
        ('suite = "bookworm"', 'suite = "trixie"', "apt.lock"),
        ('vendor = "cpu"', 'vendor = "cpu"\nplatform = "linux/arm64"', "apt.lock"),
    ],
)
def test_a_lock_of_another_manifest_is_refused(
    imaged: Path, tmp_path: Path, old: str, new: str, lock: str
) -> None:
    text = (imaged / "stack.toml").read_text(encoding="utf-8")
    assert old in text
    (imaged / "stack.toml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match="the lock does not belong to") as caught:
        load_stack(tmp_path, "small")
    assert str(caught.value.place).endswith(lock)
    assert "invoke lock --stack small" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('vendor = "cpu"', 'vendor = "cpu"\narchs = ["gfx90a"]'),
        ("A stack", "Another title"),
        (">=3.11,<3.13", ">=3.12"),
    ],
)
def test_what_else_goes_into_an_image_gives_it_another_name(
    imaged: Path, tmp_path: Path, old: str, new: str
) -> None:
    before = load_stack(tmp_path, "small")
    text = (imaged / "stack.toml").read_text(encoding="utf-8")
    (imaged / "stack.toml").write_text(text.replace(old, new), encoding="utf-8")
    after = load_stack(tmp_path, "small")
    assert after.image() != before.image()
    assert after.requirements_sha256(tmp_path) == before.requirements_sha256(tmp_path)


@pytest.mark.parametrize(
    "base",
    [
        'kind = "registry"\nsuite = "bookworm"',
        'suite = "jammy"',
        'suite = "bookworm"\ntag = "1"',
        'suite = "bookworm --hook-dir=."',
    ],
)
def test_a_base_that_cannot_be_is_refused(folder: Path, tmp_path: Path, base: str) -> None:
    text = f"{MANIFEST.format(name='small')}[base]\n{base}\n"
    (folder / "stack.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"stack\.toml:base"):
        load_stack(tmp_path, "small")


def test_a_line_that_is_no_package_is_named(imaged: Path, tmp_path: Path) -> None:
    path = imaged / "apt.lock"
    text = path.read_text(encoding="utf-8").rpartition("# entries")[0].replace("python3=", "python3 ")
    path.write_text(with_checksums(text), encoding="utf-8")
    with pytest.raises(InputError, match=r"apt\.lock:4: not a locked package"):
        load_stack(tmp_path, "small").system_packages(tmp_path)


LOCKS = sorted((ROOT / "images" / "stacks").glob("*/*.lock"))


@pytest.fixture(scope="session")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout that has the project's stacks and nothing else."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "images" / "stacks", root / "images" / "stacks")
    return root


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lock=st.sampled_from(LOCKS), seed=st.integers(min_value=0), bit=st.integers(0, 7))
def test_a_changed_byte_in_any_lock_is_noticed_and_its_entry_named(
    copied: Path, lock: Path, seed: int, bit: int
) -> None:
    path = copied / lock.relative_to(ROOT)
    content = bytearray(lock.read_bytes())
    place = random.Random(seed).randrange(len(content))
    content[place] ^= 1 << bit
    path.write_bytes(bytes(content))
    try:
        with pytest.raises(InputError) as caught:
            load_stack(copied, lock.parent.name)
    finally:
        path.write_bytes(lock.read_bytes())
    assert caught.value.place == str(path)
    assert caught.value.message.startswith(("the lock was changed", "the lock does not belong"))
    assert caught.value.found


@given(st.lists(st.text("abc =-\n", max_size=20), max_size=6), st.data())
def test_a_seal_finds_every_change(lines: list[str], data: st.DataObject) -> None:
    text = "stamp\n" + "".join(f"x{line}\n" for line in lines)
    whole = with_checksums(text)
    assert first_changed_entry(whole) is None
    place = data.draw(st.integers(len("stamp\n"), len(whole) - 1))
    other = data.draw(st.characters(codec="utf-8", exclude_characters=whole[place]))
    assert first_changed_entry(whole[:place] + other + whole[place + 1 :]) is not None


def test_the_entry_with_the_change_is_the_one_that_is_named() -> None:
    text = with_checksums(f"stamp\n{LOCK}")
    assert first_changed_entry(text.replace("Beta_Two==2.0", "Beta_Two==2.1")) == (
        "Beta_Two==2.1 ; python_full_version < '3.12'"
    )
    assert first_changed_entry(text.replace("a" * 64, "b" + "a" * 63, 1)) == "alpha==1.0"
    assert first_changed_entry(
        text.partition("beta-two")[0] + "# entries: " + text.rpartition("# entries: ")[2]
    )


def test_no_stack_has_an_unverified_pin() -> None:
    assert not any(stack.unhashed(ROOT) for stack in find_stacks(ROOT).values())
