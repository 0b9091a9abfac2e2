from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import load_toml
from twinrun.manifests.locks import AptLock, ImageLock, SystemPackage, apt_lock_text, image_lock_text
from twinrun.manifests.stack import Stack, find_stacks, load_stack, stamp

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


@pytest.fixture
def imaged(folder: Path) -> Path:
    """Return the folder of the same stack with all that an image needs."""
    (folder / "stack.toml").write_text(MANIFEST.format(name="small") + IMAGE, encoding="utf-8")
    stack = load_toml(folder / "stack.toml", Stack)
    path = "debian/pool/main/p/python3/python3_3.10.6-1_amd64.deb"
    package = SystemPackage(name="python3", version="3.10.6-1~22.04", sha256="b" * 64, size=1, path=path)
    system = apt_lock_text(stack.system_stamp(), AptLock(root=(package,)))
    image = image_lock_text(stack.image_stamp(), ImageLock(epoch=1_700_000_000, root="c" * 64))
    (folder / "apt.lock").write_text(system, encoding="utf-8")
    (folder / "image.lock").write_text(image, encoding="utf-8")
    return folder


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


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("requirements.lock", b"", r"\(no stamp\)"),
        ("requirements.lock", b"\xff\xfe", r"requirements\.lock"),
        ("requirements.lock", None, "requirements.lock: missing"),
        ("requirements.in", None, "requirements.in: missing"),
        ("stack.toml", MANIFEST.format(name="large").encode(), r"stack\.toml:name: the name is not the"),
        ("stack.toml", None, "did you mean|unknown stack"),
    ],
)
def test_a_stack_that_is_not_whole_is_refused(
    folder: Path, tmp_path: Path, file: str, content: bytes | None, said: str
) -> None:
    (folder / file).write_bytes(content or b"")
    if content is None:
        (folder / file).unlink()
    with pytest.raises(InputError, match=said):
        load_stack(tmp_path, "small")


def test_an_unknown_stack_is_told_with_the_nearest_and_a_half_made_one_is_not_skipped(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="did you mean `small`"):
        load_stack(tmp_path, "smal")
    (folder.parent / "half-made").mkdir()
    with pytest.raises(InputError, match="half-made"):
        find_stacks(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "stale"),
    [
        ('packages = ["python3"]', 'packages = ["python3", "git"]', True),
        ('build_packages = ["g++"]', "build_packages = []", True),
        ('suite = "bookworm"', 'suite = "trixie"', True),
        ('vendor = "cpu"', 'vendor = "cpu"\nplatform = "linux/arm64"', True),
        ('vendor = "cpu"', 'vendor = "cpu"\narchs = ["gfx90a"]', False),
        ("A stack", "Another title", False),
        (">=3.11,<3.13", ">=3.12", False),
    ],
)
def test_a_change_of_the_manifest_makes_the_locks_stale_or_the_image_another(
    imaged: Path, tmp_path: Path, old: str, new: str, stale: bool
) -> None:
    before = load_stack(tmp_path, "small")
    lock, packages = before.image_lock(tmp_path), before.system_packages(tmp_path)
    assert lock is not None
    assert packages is not None
    assert [(str(one), one.sha256) for one in packages.all()] == [("python3=3.10.6-1~22.04", "b" * 64)]
    assert (lock.epoch, lock.root) == (1_700_000_000, "c" * 64)
    text = (imaged / "stack.toml").read_text(encoding="utf-8")
    assert old in text
    (imaged / "stack.toml").write_text(text.replace(old, new), encoding="utf-8")
    if stale:
        with pytest.raises(InputError, match=r"apt\.lock: the lock does not belong to"):
            load_stack(tmp_path, "small")
    else:
        after = load_stack(tmp_path, "small")
        assert after.image() != before.image()
        assert after.requirements_sha256(tmp_path) == before.requirements_sha256(tmp_path)
