"""The base and the sources of an image, asked from a registry, repositories and an index of this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.indexes import MANIFEST, serving, small_stack, source_archive
from tests.registries import RunningRegistry, wire, without_proxies
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.manifest import load_toml
from twinrun.images.locking.check import Finding, check, exit_code
from twinrun.images.locking.refresh import refresh
from twinrun.manifests.apt_lock import AptLock, apt_lock_text
from twinrun.manifests.image_lock import BasePin, ImageLock, image_lock_text, load_image_lock
from twinrun.manifests.stack import Stack, load_stack

pytestmark = pytest.mark.needs("docker-registry")

IMAGE = """
[base]
kind = "registry"
suite = "bookworm"
repository = "{host}/some/base"
tag = "1.0"
{sources}
"""


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, address: str) -> Path:
    return small_stack(tmp_path)


def states(findings: tuple[Finding, ...]) -> list[tuple[str, str]]:
    return [(finding.state, finding.pin) for finding in findings]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningRegistry]:
    without_proxies(monkeypatch, tmp_path)
    (tmp_path / "registry").mkdir()
    with RunningRegistry(tmp_path / "registry") as made:
        yield made


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a git repository with a branch, a tag with a message, and a commit after it."""
    path = tmp_path / "attention"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(path))
    git(path, "commit", "--quiet", "--allow-empty", "--message=first")
    git(path, "tag", "--annotate", "v1", "--message=the first")
    git(path, "commit", "--quiet", "--allow-empty", "--message=second")
    return path


def git(folder: Path, *arguments: str) -> str:
    name = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(
        ["git", "-C", str(folder), *name, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def imaged(folder: Path, host: str, *sources: str) -> None:
    """Give the stack an image: a base in the registry, and these sources; its old lock knows no digest."""
    (folder / "stack.toml").write_text(
        MANIFEST + IMAGE.format(host=host, sources="\n".join(f"[[sources]]\n{one}" for one in sources)),
        encoding="utf-8",
    )
    stack = load_toml(folder / "stack.toml", Stack)
    base = BasePin(name="base", verified=False, source="a list")
    (folder / "apt.lock").write_text(apt_lock_text(stack.system_stamp(), AptLock()), encoding="utf-8")
    text = image_lock_text(stack.image_stamp(), ImageLock(epoch=1_700_000_000, base=base))
    (folder / "image.lock").write_text(text, encoding="utf-8")


WITHOUT_SYSTEM = ("python", "image")


def test_a_tag_a_branch_a_commit_and_a_release_are_locked(
    folder: Path, tmp_path: Path, registry: RunningRegistry, repository: Path
) -> None:
    first, second = git(repository, "rev-parse", "v1^{commit}"), git(repository, "rev-parse", "main")
    archive = source_archive(tmp_path / "served" / "general", "delta", "4.0")
    imaged(
        folder,
        registry.host,
        f'name = "tag"\nrepository = "{repository}"\nref = "v1"',
        f'name = "branch"\nrepository = "{repository}"\nref = "main"',
        f'name = "commit"\nrepository = "file://{repository}"\nref = "{first}"',
        'name = "release"\npackage = "delta"\nversion = "4.0"',
    )
    one = registry.push_image("some/base", "amd")
    other = registry.push_image("some/base", "arm", "linux/arm64")
    registry.push_index("some/base", "1.0", {"linux/arm64": other, "linux/amd64": one})
    changed = refresh(tmp_path, "small", only=WITHOUT_SYSTEM)
    lock = load_image_lock(folder)
    assert (lock.base.sha256, lock.base.verified, lock.epoch) == (one, True, 1_700_000_000)
    assert [pin.commit for pin in lock.sources] == [first, second, first, None]
    assert lock.source("release").sha256 == archive
    assert lock.unverified() == ()
    assert f"base: unknown (unverified) -> {one[:12]}" in "\n".join(map(str, changed))
    assert load_stack(tmp_path, "small").unverified_pins(tmp_path) == ()
    assert refresh(tmp_path, "small", only=WITHOUT_SYSTEM) == ()


@pytest.mark.parametrize(
    ("repository_at", "ref", "error"),
    [("{}", "no-such-ref", InputError), ("{}", "f" * 40, MachineError), ("{}-gone", "main", MachineError)],
)
def test_a_source_that_is_not_there(
    folder: Path,
    tmp_path: Path,
    registry: RunningRegistry,
    repository: Path,
    *,
    repository_at: str,
    ref: str,
    error: type[Exception],
) -> None:
    place = repository_at.format(repository)
    imaged(folder, registry.host, f'name = "source"\nrepository = "{place}"\nref = "{ref}"')
    old = contents(folder)
    with pytest.raises(error):
        refresh(tmp_path, "small", only=["image"])
    assert contents(folder) == old


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_registry_killed_in_the_middle_leaves_every_old_lock(
    folder: Path, tmp_path: Path, registry: RunningRegistry
) -> None:
    registry.push_image("some/base", "1.0")

    def kill(number: int, answer: bytes) -> bytes:
        registry.kill()
        return answer

    with wire(registry, kill) as host:
        imaged(folder, host)
        old = contents(folder)
        with pytest.raises(MachineError, match="the registry is out of reach") as caught:
            refresh(tmp_path, "small", only=WITHOUT_SYSTEM)
    assert caught.value.exit_code == 3
    # The Python lock was resolved before the registry went: it is not there either.
    assert contents(folder) == old


def checked(root: Path) -> tuple[Finding, ...]:
    """Return what is found beside the system packages, whose mirror may be out of reach here."""
    return tuple(finding for finding in check(root, "small") if finding.pin != "apt.lock")


def test_what_moved_and_what_is_gone_is_told(
    folder: Path, tmp_path: Path, registry: RunningRegistry, repository: Path
) -> None:
    imaged(folder, registry.host, f'name = "branch"\nrepository = "{repository}"\nref = "main"')
    old = registry.push_image("some/base", "1.0")
    refresh(tmp_path, "small", only=WITHOUT_SYSTEM)
    assert checked(tmp_path) == ()
    git(repository, "commit", "--quiet", "--allow-empty", "--message=third")
    registry.push_image("some/base", "1.0", kind="application/vnd.docker.distribution.manifest.v2+json")
    found = checked(tmp_path)
    assert states(found) == [("stale", "image.lock: base"), ("stale", "image.lock: branch")]
    assert old[:12] in found[0].detail
    assert "system libraries" in found[0].detail
    registry.delete("some/base", old)
    assert states(checked(tmp_path))[0] == ("gone", "image.lock: base")
    registry.kill()
    found = checked(tmp_path)
    assert states(found) == [("out of reach", "image.lock: base"), ("stale", "image.lock: branch")]
    assert exit_code(found[:1]) == 3


def test_an_unverified_pin_out_of_reach_is_told_once(
    folder: Path, tmp_path: Path, registry: RunningRegistry
) -> None:
    imaged(folder, registry.host)
    refresh(tmp_path, "small", only=["python"])
    registry.kill()
    found = checked(tmp_path)
    assert states(found) == [("unverified", "image.lock: base")]
    assert exit_code(found) == 0
