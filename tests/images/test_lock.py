from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import invoke
from tests.indexes import MANIFEST, digest_of, forget, serving, small_stack, source_archive, wheel
from twinrun.foundation.errors import InputError, MachineError
from twinrun.images.lock import PinFinding, check, exit_code, refresh, stack_names
from twinrun.images.wheels import fetch_wheels, requirements
from twinrun.manifests.stack import load_stack, pins, stamp


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, address: str) -> Path:
    return small_stack(tmp_path)


@pytest.fixture
def locked(folder: Path, tmp_path: Path) -> str:
    """The lock of the small stack."""
    refresh(tmp_path, "small")
    return text_of(folder)


def states(findings: tuple[PinFinding, ...]) -> list[tuple[str, str]]:
    return [(finding.state, finding.what) for finding in findings]


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
    assert changed[1] == "requirements.lock: beta: absent -> 2.0"
    assert refresh(tmp_path, "small") == ()
    assert text_of(folder) == text
    assert load_stack(tmp_path, "small").stack.name == "small"


def test_a_newer_release_comes_only_with_an_upgrade(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    # Neither does a further file of the locked one.
    source_archive(tmp_path / "served" / "general", "beta", "2.0")
    wheel(tmp_path / "served" / "general", "beta", "3.0")
    forget(tmp_path)
    assert refresh(tmp_path, "small") == ()
    assert refresh(tmp_path, "small", upgrade=True) == ("requirements.lock: beta: 2.0 -> 3.0",)


def test_a_check_tells_and_writes_nothing(folder: Path, locked: str, tmp_path: Path) -> None:
    (folder / "requirements.in").write_text("beta==2.0\n", encoding="utf-8")
    found = check(tmp_path, "small")
    assert states(found) == [
        ("stale", "requirements.lock: does not belong to requirements.in"),
        ("stale", "requirements.lock: alpha: 1.0 -> absent"),
        ("stale", "requirements.lock: nvidia-gamma: 1.0 -> absent"),
    ]
    assert exit_code(found) == 1
    assert text_of(folder) == locked


def test_a_release_that_the_index_has_no_longer_is_gone(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    index = tmp_path / "served" / "general"
    (index / "beta" / "beta-2.0-py3-none-any.whl").unlink()
    wheel(index, "beta", "2.1")
    forget(tmp_path)
    found = check(tmp_path, "small")
    assert states(found) == [("gone", "requirements.lock: beta: 2.0 -> 2.1")]
    assert exit_code(found) == 1


def test_a_release_that_was_yanked_stays_locked_and_is_fetched(
    folder: Path, locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "served/general/beta/index.html"
    wheel(tmp_path / "served/general", "beta", "2.1")
    yanked = page.read_text(encoding="utf-8").replace('">beta-2.0', '" data-yanked="broken">beta-2.0')
    page.write_text(yanked, encoding="utf-8")
    forget(tmp_path)
    assert check(tmp_path, "small", only=["python"]) == ()
    refresh(tmp_path, "small")
    assert text_of(folder) == locked
    assert "beta-2.0-py3-none-any.whl" in {path.name for path in fetched(tmp_path, monkeypatch)}


def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """Fetch the locked wheels from the general index into an empty cache."""
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "fetched"))
    monkeypatch.setenv("PIP_INDEX_URL", os.environ["UV_DEFAULT_INDEX"])
    stack = load_stack(tmp_path, "small")
    entries = requirements(stack.lock(tmp_path), stack.stack)
    return fetch_wheels(entries, lock="x", wheelhouse=None, stack=stack.stack, index=None, say=print)


def test_a_changed_hash_is_told_and_repaired(folder: Path, locked: str, tmp_path: Path) -> None:
    digest = digest_of(next((tmp_path / "served" / "general" / "beta").glob("*.whl")))
    (folder / "requirements.lock").write_text(locked.replace(digest, "0" * 64), encoding="utf-8")
    assert states(check(tmp_path, "small")) == [("gone", "requirements.lock: beta: other files")]
    refresh(tmp_path, "small")
    assert text_of(folder) == locked


def test_packages_of_the_build_stage_have_a_lock_of_their_own(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    (folder / "build.in").write_text("beta==2.0\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"build\.lock: missing"):
        load_stack(tmp_path, "small")
    refresh(tmp_path, "small")
    lock = load_stack(tmp_path, "small").build_lock(tmp_path)
    assert lock is not None
    assert pins(lock.read_text(encoding="utf-8")) == {"beta": ("2.0",)}


FRAMEWORK = """\
# github:some/project@0123456789ab:uv.lock
alpha==1.0+rocm6.3 \\
    --hash=sha256:{digest}
"""


@pytest.fixture
def framework(folder: Path, tmp_path: Path, address: str) -> str:
    """The digest of the framework's own wheel, which stands in framework.txt."""
    more = 'replaces = ["alpha", "nvidia-*"]\n'
    (folder / "stack.toml").write_text(MANIFEST + more, encoding="utf-8")
    digest = digest_of(next((tmp_path / "served" / "own" / "alpha").glob("*.whl")))
    (folder / "framework.txt").write_text(FRAMEWORK.format(digest=digest), encoding="utf-8")
    return digest


def test_a_hash_is_a_hash_wherever_it_was_found(
    folder: Path, tmp_path: Path, address: str, framework: str
) -> None:
    refresh(tmp_path, "small")
    assert pins(text_of(folder)) == {"beta": ("2.0",), "alpha": ("1.0+rocm6.3",)}
    # As pip reads it, with the comment that says where the hash was found.
    assert text_of(folder).endswith(FRAMEWORK.format(digest=framework))
    assert text_of(folder).startswith("# requirements.in, framework.txt sha256: ")
    assert check(tmp_path, "small", index=f"{address}/own") == ()
    load_stack(tmp_path, "small")
    (folder / "framework.txt").write_text(FRAMEWORK.format(digest="0" * 64), encoding="utf-8")
    with pytest.raises(InputError, match=r"does not belong to requirements\.in, framework\.txt"):
        load_stack(tmp_path, "small")
    refresh(tmp_path, "small")
    found = check(tmp_path, "small", index=f"{address}/own")
    missing = f"framework.txt: alpha==1.0+rocm6.3: the index has no file of it with sha256 {'0' * 64}"
    assert states(found) == [("gone", missing)]
    (silent,) = check(tmp_path, "small", index="http://127.0.0.1:1/x")
    assert silent.state == "out of reach"


@pytest.mark.parametrize("requirement", ["alpha==9.0", "delta==1.0"])
def test_what_cannot_be_resolved_leaves_the_old_lock(
    folder: Path, locked: str, tmp_path: Path, requirement: str
) -> None:
    (folder / "requirements.in").write_text(f"{requirement}\n", encoding="utf-8")
    with pytest.raises(MachineError, match="could not be resolved"):
        refresh(tmp_path, "small")
    assert text_of(folder) == locked


def test_an_index_out_of_reach_leaves_the_old_lock(
    folder: Path, locked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        # Bound but not listening: every connection is refused, and nobody else takes the port.
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://127.0.0.1:{closed.getsockname()[1]}/general")
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "empty"))
        with pytest.raises(MachineError, match="the old lock stays"):
            refresh(tmp_path, "small", upgrade=True)
        found = check(tmp_path, "small")
    assert [one.state for one in found] == ["out of reach"]
    assert exit_code(found) == 3
    assert text_of(folder) == locked
    assert {path.name for path in folder.iterdir()} == {"requirements.in", "requirements.lock", "stack.toml"}


def test_one_stack_or_all_are_named_and_parts_that_there_are(folder: Path, tmp_path: Path) -> None:
    assert stack_names(tmp_path, None) == stack_names(tmp_path, "small") == ["small"]
    with pytest.raises(InputError, match="did you mean `small`"):
        stack_names(tmp_path, "smal")
    for ask in (refresh, check):
        with pytest.raises(InputError, match="did you mean `python`"):
            ask(tmp_path, "small", only=["pyton"])


@pytest.mark.parametrize(
    ("only", "code", "parts"),
    [
        (["python"], 0, set()),
        (["system"], 1, {"apt.lock", "image.lock"}),
        ([], 1, {"apt.lock", "image.lock"}),
    ],
)
def test_a_check_of_some_parts_is_silent_of_the_others(
    folder: Path, tmp_path: Path, only: list[str], code: int, parts: set[str]
) -> None:
    refresh(tmp_path, "small")
    # The image of a stack whose lock files are missing.
    base = '[base]\nsuite = "bookworm"\n'
    (folder / "stack.toml").write_text(MANIFEST + base, encoding="utf-8")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "images" / "gpus.toml").touch()
    named = [word for part in only for word in ("--only", part)]
    done = invoke(tmp_path, "lock", "--stack", "small", "--check", *named)
    assert done.returncode == code
    lines = done.stdout.splitlines()
    assert {line.split(": ")[1] for line in lines[1:]} == parts
