from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.indexes import MANIFEST, digest_of, forget, serving, small_stack, source_archive, wheel
from twinrun.foundation.errors import InputError, MachineError
from twinrun.images.artifact_cache import download_wheels
from twinrun.images.artifacts import wheel_artifacts
from twinrun.images.lock import PinFinding, check, exit_code, likely_effect, refresh, stack_names
from twinrun.manifests.locks import with_checksums
from twinrun.manifests.stack import load_stack, pins, stamp

REPLACES = """
replaces = ["alpha", "nvidia-*"]
[[unverified]]
requirement = "alpha==1.0+rocm6.3"
source = "its release"
"""


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, address: str) -> Path:
    return small_stack(tmp_path)


def states(findings: tuple[PinFinding, ...]) -> list[tuple[str, str]]:
    return [(finding.state, finding.pin) for finding in findings]


def text_of(folder: Path) -> str:
    return (folder / "requirements.lock").read_text(encoding="utf-8")


def test_a_lock_has_stamp_and_hashes_and_names_no_index(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    changed = refresh(tmp_path, "small", say=said.append)
    assert said == ["small: resolving the Python packages"]
    assert check(tmp_path, "small", say=said.append) == ()
    assert said[1:] == ["small: asking the package index"]
    text = text_of(folder)
    assert text.splitlines()[0] == stamp(folder / "requirements.in")
    assert pins(text) == {"alpha": ("1.0",), "beta": ("2.0",), "nvidia-gamma": ("1.0",)}
    wheels = (tmp_path / "served" / "general").glob("*/*.whl")
    assert sorted(line.split(":")[1] for line in text.splitlines() if "--hash=sha256" in line) == sorted(
        map(digest_of, wheels)
    )
    assert "127.0.0.1" not in text
    assert "http" not in text
    assert [str(change) for change in changed][1] == "beta: absent -> 2.0 (none expected)"
    assert load_stack(tmp_path, "small").stack.name == "small"


def test_resolving_again_changes_nothing(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    assert refresh(tmp_path, "small") == ()
    assert text_of(folder) == text
    assert check(tmp_path, "small") == ()


def test_a_newer_release_comes_only_with_an_upgrade(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    wheel(tmp_path / "served" / "general", "beta", "3.0")
    forget(tmp_path)
    assert refresh(tmp_path, "small") == ()
    (change,) = refresh(tmp_path, "small", upgrade=True)
    assert (change.name, change.old, change.new) == ("beta", "2.0", "3.0")


def test_a_check_tells_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    (folder / "requirements.in").write_text("beta==2.0\n", encoding="utf-8")
    found = check(tmp_path, "small")
    assert states(found) == [
        ("stale", "requirements.lock"),
        ("stale", "requirements.lock: alpha"),
        ("stale", "requirements.lock: nvidia-gamma"),
    ]
    assert exit_code(found) == 1
    assert text_of(folder) == text


def test_a_release_that_the_index_has_no_longer_is_gone(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    index = tmp_path / "served" / "general"
    (index / "beta" / "beta-2.0-py3-none-any.whl").unlink()
    wheel(index, "beta", "2.1")
    forget(tmp_path)
    found = check(tmp_path, "small")
    assert states(found) == [("gone", "requirements.lock: beta")]
    assert "2.0 -> 2.1" in found[0].detail
    assert exit_code(found) == 1


def test_a_release_that_was_yanked_stays_locked_and_is_fetched(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(tmp_path, "small")
    before = text_of(folder)
    page = tmp_path / "served/general/beta/index.html"
    wheel(tmp_path / "served/general", "beta", "2.1")
    yanked = page.read_text(encoding="utf-8").replace('">beta-2.0', '" data-yanked="broken">beta-2.0')
    page.write_text(yanked, encoding="utf-8")
    forget(tmp_path)
    assert check(tmp_path, "small", only=["python"]) == ()
    refresh(tmp_path, "small")
    assert text_of(folder) == before
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    stack = load_stack(tmp_path, "small")
    monkeypatch.setenv("PIP_INDEX_URL", os.environ["UV_DEFAULT_INDEX"])
    download_wheels(wheel_artifacts(tmp_path, stack), fetched, stack=stack.stack)
    assert "beta-2.0-py3-none-any.whl" in {path.name for path in fetched.iterdir()}


def test_another_file_under_a_locked_name_is_refused_and_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(tmp_path, "small")
    stack, fetched = load_stack(tmp_path, "small"), tmp_path / "fetched"
    fetched.mkdir()
    wheel(tmp_path / "served/general", "beta", "2.0", files={"beta.py": "planted = True\n"})
    monkeypatch.setenv("PIP_INDEX_URL", os.environ["UV_DEFAULT_INDEX"])
    with pytest.raises(MachineError, match="cannot be fetched") as caught:
        download_wheels(wheel_artifacts(tmp_path, stack), fetched, stack=stack.stack)
    assert "beta" in str(caught.value.found)
    assert list(fetched.iterdir()) == []


def test_a_changed_hash_is_told_and_repaired(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    digest = digest_of(next((tmp_path / "served" / "general" / "beta").glob("*.whl")))
    wrong = text.rpartition("# entries")[0].replace(digest, "0" * 64)
    (folder / "requirements.lock").write_text(with_checksums(wrong), encoding="utf-8")
    assert [str(finding.detail) for finding in check(tmp_path, "small")] == [
        "beta: other files (none expected)"
    ]
    refresh(tmp_path, "small")
    assert text_of(folder) == text


def test_a_further_file_of_a_locked_release_leaves_the_lock(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    text = text_of(folder)
    source_archive(tmp_path / "served" / "general", "beta", "2.0")
    forget(tmp_path)
    assert refresh(tmp_path, "small") == ()
    assert text_of(folder) == text


def test_a_second_hand_hash_stays_through_a_refresh(folder: Path, tmp_path: Path) -> None:
    second = f'[[alternative]]\nrequirement = "alpha==1.0+cpu"\nsha256 = "{"e" * 64}"\nsource = "a list"\n'
    refresh(tmp_path, "small")
    without = text_of(folder)
    (folder / "stack.toml").write_text(MANIFEST + second, encoding="utf-8")
    for _ in range(2):
        refresh(tmp_path, "small")
        assert "e" * 64 in text_of(folder)
        assert pins(text_of(folder)) == pins(without)
    found = check(tmp_path, "small")
    assert states(found) == [("unverified", "requirements.lock: alpha==1.0+cpu")]
    assert exit_code(found) == 0
    (folder / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    refresh(tmp_path, "small")
    assert text_of(folder) == without


def test_packages_of_the_build_stage_have_a_lock_of_their_own(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    (folder / "build.in").write_text("beta==2.0\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"build\.lock: missing"):
        load_stack(tmp_path, "small")
    refresh(tmp_path, "small")
    lock = load_stack(tmp_path, "small").build_lock(tmp_path)
    assert lock is not None
    assert pins(lock.read_text(encoding="utf-8")) == {"beta": ("2.0",)}


def test_without_the_frameworks_index_replaced_packages_stay_out(folder: Path, tmp_path: Path) -> None:
    (folder / "stack.toml").write_text(MANIFEST + REPLACES, encoding="utf-8")
    refresh(tmp_path, "small")
    assert pins(text_of(folder)) == {"beta": ("2.0",)}
    assert text_of(folder).count("--hash") == 1
    assert load_stack(tmp_path, "small").unhashed(tmp_path) == ("alpha==1.0+rocm6.3",)
    assert states(check(tmp_path, "small")) == [("unverified", "stack.toml: alpha==1.0+rocm6.3")]


def test_the_frameworks_index_gives_the_local_version(folder: Path, tmp_path: Path, address: str) -> None:
    (folder / "stack.toml").write_text(MANIFEST + REPLACES, encoding="utf-8")
    refresh(tmp_path, "small", index=f"{address}/own")
    assert pins(text_of(folder)) == {"alpha": ("1.0+rocm6.3",), "beta": ("2.0",)}
    assert digest_of(next((tmp_path / "served" / "own" / "alpha").glob("*.whl"))) in text_of(folder)
    assert "127.0.0.1" not in text_of(folder)
    assert load_stack(tmp_path, "small").unhashed(tmp_path) == ()


@pytest.mark.parametrize("requirement", ["alpha==9.0", "delta==1.0"])
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
        found = check(tmp_path, "small")
    assert states(found) == [("out of reach", "requirements.lock")]
    assert exit_code(found) == 3
    assert text_of(folder) == text
    assert sorted(path.name for path in folder.iterdir()) == [
        "requirements.in",
        "requirements.lock",
        "stack.toml",
    ]


def test_one_stack_or_all_are_named(folder: Path, tmp_path: Path) -> None:
    assert stack_names(tmp_path, None) == stack_names(tmp_path, "small") == ["small"]
    with pytest.raises(InputError, match="did you mean `small`"):
        stack_names(tmp_path, "smal")


def test_a_part_that_does_not_exist_is_told(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean `python`"):
        refresh(tmp_path, "small", only=["pyton"])


def checkout(root: Path) -> None:
    """Make what a command knows a project by."""
    (root / "recipes").mkdir()
    (root / "images" / "gpus.toml").touch()


def test_the_command_says_what_changed_and_its_effect(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel(tmp_path / "served" / "general", "torch", "1.0")
    (folder / "requirements.in").write_text("torch==1.0\n", encoding="utf-8")
    checkout(tmp_path)
    done = invoke(tmp_path, "lock", "--stack", "small")
    assert (done.returncode, done.stdout) == (
        0,
        "small: 1 changed\n  requirements.lock: torch: absent -> 1.0 (numerics and speed)\n",
    )
    (folder / "requirements.in").write_text("# asked for\ntorch==1.0\n", encoding="utf-8")
    done = invoke(tmp_path, "lock", "--stack", "small", "--check")
    assert done.returncode == 1
    assert "stale: requirements.lock: does not belong to requirements.in" in done.stdout


@pytest.mark.parametrize(
    ("only", "code", "parts"),
    [
        (["python"], 0, set()),
        (["system"], 1, {"apt.lock", "image.lock"}),
        ([], 1, {"apt.lock", "image.lock"}),
    ],
)
def test_a_check_of_some_parts_is_silent_of_the_others(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    only: list[str],
    code: int,
    parts: set[str],
) -> None:
    refresh(tmp_path, "small")
    # The image of a stack whose lock files are missing.
    base = '[base]\nsuite = "bookworm"\n'
    (folder / "stack.toml").write_text(MANIFEST + base, encoding="utf-8")
    checkout(tmp_path)
    named = [word for part in only for word in ("--only", part)]
    done = invoke(tmp_path, "lock", "--stack", "small", "--check", *named)
    assert done.returncode == code
    lines = done.stdout.splitlines()
    assert {line.split(": ")[1] for line in lines[1:]} == parts


def test_a_check_of_an_unknown_part_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean `python`"):
        check(tmp_path, "small", only=["pyton"])


@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("torch", "numerics and speed"),
        ("pytorch-triton-rocm", "numerics and speed"),
        ("nvidia-nccl-cu12", "collectives: speed, and order of summation"),
        ("librccl1", "collectives: speed, and order of summation"),
        ("flash-attention", "attention: numerics and speed"),
        ("libc6", "system libraries below everything"),
        ("idna", "none expected"),
    ],
)
def test_a_pin_has_a_likely_effect(name: str, effect: str) -> None:
    assert likely_effect(name) == effect
