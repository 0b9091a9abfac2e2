"""Ten builds at once on one cold cache: each gets every file whole, and each file comes once."""

from __future__ import annotations

import functools
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.indexes import MANIFEST, Quiet, digest_of, wheel
from twinrun.foundation.files import sha256_of_file
from twinrun.foundation.manifest import load_toml
from twinrun.images.artifact_cache import fetch_debs, fetch_wheels
from twinrun.images.artifacts import Artifact
from twinrun.manifests.locks import SystemPackage
from twinrun.manifests.stack import Base, Stack

BUILDS, FILES, LIMIT_SECONDS = 10, 6, 120
DEBS = tuple(f"part{number}_1.0_amd64.deb" for number in range(FILES))


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    (tmp_path / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    return load_toml(tmp_path / "stack.toml", Stack).model_copy(update={"base": Base(suite="bookworm")})


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, Counter[str]]]:
    """Serve an index of wheels and count what is asked for."""
    asked: Counter[str] = Counter()

    class Counting(Quiet):
        def translate_path(self, path: str) -> str:
            asked[Path(path).name] += 1
            return super().translate_path(path)

    for number in range(FILES):
        content = {f"part{number}.py": f"N = {number}\n" * 20_000}
        wheel(tmp_path / "index", f"part{number}", "1.0", files=content)
    handler = functools.partial(Counting, directory=str(tmp_path / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def at_once(target: Callable[..., None], *arguments: object, cache: Path, **variables: str) -> None:
    """Run a function in ten processes that begin together, and demand that each ends well."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.images.test_artifact_cache"])
    ours = {"TWINRUN_CACHE": str(cache), "PIP_CONFIG_FILE": os.devnull, **variables}
    begin = context.Barrier(BUILDS)
    processes = [
        context.Process(target=_begin, args=(begin, ours, target, *arguments), daemon=True)
        for _ in range(BUILDS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_SECONDS)
        assert process.exitcode == 0


def _begin(
    begin: threading.Barrier, ours: dict[str, str], target: Callable[..., None], *rest: object
) -> None:
    os.environ.update(ours)
    begin.wait(LIMIT_SECONDS)
    target(*rest)


def _fetch_wheels(stack: Stack, artifacts: list[Artifact]) -> None:
    found = fetch_wheels(artifacts, wheelhouse=None, stack=stack, index_url=None, say=lambda _text: None)
    for artifact, files in found.items():
        assert [sha256_of_file(file) for file in files] == list(artifact.digests)


def _fetch_debs(stack: Stack, packages: tuple[SystemPackage, ...], wheelhouse: Path) -> None:
    found = fetch_debs(packages, wheelhouse=wheelhouse, stack=stack, epoch=1, say=lambda _text: None)
    assert all(sha256_of_file(file) == package.sha256 for package, file in found.items())


def test_ten_builds_fetch_each_wheel_once(
    tmp_path: Path, stack: Stack, index: tuple[str, Counter[str]]
) -> None:
    address, asked = index
    wheels = sorted((tmp_path / "index").rglob("*.whl"))
    artifacts = [
        Artifact(
            lock="requirements.lock",
            entry=f"{file.name.split('-')[0]}==1.0",
            kind="wheel",
            folder="python",
            digests=(digest_of(file),),
        )
        for file in wheels
    ]
    # What a killed build has left is not whole.
    left = tmp_path / "cache" / "wheels" / ".downloading-left"
    left.mkdir(parents=True)
    (left / wheels[0].name).write_bytes(b"half")
    at_once(_fetch_wheels, stack, artifacts, cache=tmp_path / "cache", PIP_INDEX_URL=address)
    assert {name: asked[name] for name in asked if name.endswith(".whl")} == {file.name: 1 for file in wheels}
    assert sorted(path.name for path in left.parent.glob("*.whl")) == [file.name for file in wheels]


def test_ten_builds_copy_packages_from_one_folder(tmp_path: Path, stack: Stack) -> None:
    house = tmp_path / "house"
    house.mkdir()
    for name in DEBS:
        (house / name).write_bytes(name.encode() * 50_000)
    packages = tuple(
        SystemPackage(name=name.partition("_")[0], version="1.0", sha256=digest_of(house / name))
        for name in DEBS
    )
    at_once(_fetch_debs, stack, packages, house, cache=tmp_path / "cache")
    kept = (tmp_path / "cache" / "packages").glob("*.deb")
    assert {file.stem: digest_of(file) for file in kept} == {one.sha256: one.sha256 for one in packages}
