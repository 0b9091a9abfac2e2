"""Wheels of the framework's own index by hashes of public lock files: locked, verified, installed."""

from __future__ import annotations

import contextlib
import socket
import threading
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.indexes import digest_of, serving, small_stack, wheel
from tests.records import ROOT
from twinrun.execution.engine import Workspace
from twinrun.execution.engines import load_engine
from twinrun.foundation.errors import InputError, MachineError
from twinrun.images.framework_index import demand_answer
from twinrun.images.lock import PinFinding, check, refresh
from twinrun.manifests.stack import load_manifest, load_stack, pins
from twinrun.manifests.vendor import load_vendors

FILE = "alpha-1.0+rocm6.3-py3-none-any.whl"
FOUND = f'{{ repository = "one/locks", commit = "{"a" * 40}", path = "uv.lock" }}'


def table(digest: str) -> str:
    return f"""
index = "https://wheels.invalid/whl"
replaces = ["alpha", "nvidia-*"]
[[attested]]
file = "{FILE}"
sha256 = "{digest}"
found = [{FOUND}]
"""


WRONG = "0" * 64


def attest(folder: Path, text: str) -> None:
    manifest = folder / "stack.toml"
    kept = manifest.read_text(encoding="utf-8").partition("\nindex =")[0].rstrip("\n")
    manifest.write_text(f"{kept}\n{text.lstrip()}", encoding="utf-8")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve a general index and the framework's own, which is the one that is set; return its folder."""
    with serving(tmp_path, monkeypatch) as address:
        monkeypatch.setenv("TWINRUN_INDEX", f"{address}/own")
        monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "twinrun"))
        yield tmp_path / "served/own"


@pytest.fixture
def folder(tmp_path: Path, served: Path) -> Path:
    folder = small_stack(tmp_path)
    attest(folder, table(digest_of(served / "alpha" / FILE)))
    return folder


@pytest.fixture
def unreachable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set an index that nothing answers at."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        address = f"http://name:secret@127.0.0.1:{free.getsockname()[1]}/own"
    monkeypatch.setenv("TWINRUN_INDEX", address)
    return address


def states(found: tuple[PinFinding, ...]) -> list[tuple[str, str]]:
    return [(one.state, one.pin) for one in found]


def install(root: Path) -> Path:
    """Install the environment of the stack's lock and return its packages."""
    stack, vendor = load_stack(root, "small"), load_vendors(ROOT)["cpu"]
    workspace = Workspace(root=root, run=root / "run", data=root / "data")
    load_engine("venv").open_engine(stack=stack, vendor=vendor, workspace=workspace, say=lambda text: None)
    (found,) = (root / "twinrun").glob("**/site-packages")
    return found


def test_an_index_that_answers_verifies_what_was_attested(folder: Path, tmp_path: Path) -> None:
    refresh(tmp_path, "small")
    stack = load_stack(tmp_path, "small")
    assert stack.locked(tmp_path) == {"alpha": ("1.0+rocm6.3",), "beta": ("2.0",)}
    assert (stack.attested(tmp_path), stack.unhashed(tmp_path)) == ((), ())
    assert states(check(tmp_path, "small")) == [("verified", f"stack.toml: {FILE}")]
    assert refresh(tmp_path, "small") == ()


def test_without_its_index_the_lock_is_as_whole_and_says_attested(
    folder: Path, tmp_path: Path, unreachable: str
) -> None:
    refresh(tmp_path, "small")
    stack = load_stack(tmp_path, "small")
    assert stack.locked(tmp_path)["alpha"] == ("1.0+rocm6.3",)
    assert (stack.attested(tmp_path), stack.unhashed(tmp_path)) == (("alpha==1.0+rocm6.3",), ())
    (found,) = check(tmp_path, "small")
    assert (found.state, found.pin) == ("attested", f"stack.toml: {FILE}")
    assert "one/locks" in found.detail


def test_what_was_verified_once_stays_so_without_the_index(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh(tmp_path, "small")
    before = (folder / "requirements.lock").read_bytes()
    monkeypatch.setenv("TWINRUN_INDEX", "http://127.0.0.1:9/own")
    assert refresh(tmp_path, "small") == ()
    assert (folder / "requirements.lock").read_bytes() == before


def test_an_index_that_gives_no_hash_leaves_it_attested(folder: Path, tmp_path: Path, served: Path) -> None:
    page = served / "alpha/index.html"
    page.write_text(page.read_text(encoding="utf-8").replace("#sha256", "#nothing"), encoding="utf-8")
    refresh(tmp_path, "small")
    assert load_stack(tmp_path, "small").attested(tmp_path) == ("alpha==1.0+rocm6.3",)
    (found,) = check(tmp_path, "small")
    assert (found.state, "no hash" in found.detail) == ("attested", True)


@pytest.mark.parametrize("gone", [False, True])
def test_an_index_that_contradicts_it_ends_the_lock(
    folder: Path, tmp_path: Path, served: Path, *, gone: bool
) -> None:
    refresh(tmp_path, "small")
    before = (folder / "requirements.lock").read_bytes()
    right = digest_of(served / "alpha" / FILE)
    if gone:
        (served / "alpha/index.html").write_text("<html></html>", encoding="utf-8")
    else:
        attest(folder, table(WRONG))
    with pytest.raises(InputError) as refused:
        refresh(tmp_path, "small")
    assert FILE in str(refused.value.place)
    assert refused.value.found == ("no such file" if gone else right)
    assert refused.value.allowed == (right if gone else WRONG)
    assert (folder / "requirements.lock").read_bytes() == before
    assert [state for state, _ in states(check(tmp_path, "small"))][-1] == "gone"


def test_the_environment_takes_the_wheel_from_that_index(folder: Path, tmp_path: Path, served: Path) -> None:
    # Older releases of others there hide nothing.
    wheel(served, "beta", "1.0")
    refresh(tmp_path, "small")
    assert {path.name for path in install(tmp_path).glob("*.dist-info")} == {
        "alpha-1.0+rocm6.3.dist-info",
        "beta-2.0.dist-info",
    }


@pytest.mark.parametrize("fault", ["hash", "file", "index"])
def test_an_environment_is_whole_or_not_there(
    folder: Path, tmp_path: Path, served: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    refresh(tmp_path, "small")
    locked = digest_of(served / "alpha" / FILE)
    if fault == "hash":
        wheel(served, "alpha", "1.0+rocm6.3", files={"alpha.py": "changed = True\n"})
    elif fault == "file":
        (served / "alpha" / FILE).unlink()
    else:
        monkeypatch.setenv("TWINRUN_INDEX", "http://name:secret@127.0.0.1:9/own")
    with pytest.raises(MachineError) as failed:
        install(tmp_path)
    told = {
        "hash": ("alpha==1.0+rocm6.3", locked, digest_of(served / "alpha" / FILE) if fault == "hash" else ""),
        "file": (FILE.replace("+", "%2B"), "404"),
        "index": ("127.0.0.1:9", "refused"),
    }
    assert all(part in str(failed.value.found) for part in told[fault])
    assert "secret" not in str(failed.value)
    assert not list((tmp_path / "twinrun").glob("**/site-packages"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (table("0" * 63), "sha256"),
        (f"{table(WRONG)}{table('1' * 64).partition(']')[2]}", "two hashes"),
        (table(WRONG).replace("alpha-1.0+rocm6.3-py3", "alpha-py3"), "filename"),
        (table(WRONG).replace("py3-none-any", "cp39-cp39-linux_x86_64"), "Python 3.9"),
        (table(WRONG).replace("py3-none-any", "cp311-cp311-linux_aarch64"), "aarch64"),
        (table(WRONG).replace(FOUND, f"{FOUND}, {FOUND}"), "one witness"),
        (table(WRONG).replace(FOUND, ""), "found"),
        (table(WRONG).replace('index = "https://wheels.invalid/whl"', ""), "index"),
        (table(WRONG).replace("https://", "https://name:secret@"), "index"),
    ],
)
def test_an_attestation_that_says_nothing_is_refused(folder: Path, text: str, said: str) -> None:
    attest(folder, text)
    with pytest.raises(InputError) as refused:
        load_manifest(folder.parents[2], "small")
    assert said in str(refused.value)


def test_a_wheel_of_another_version_than_is_asked_for_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "requirements.in").write_text("alpha==2.0\n", encoding="utf-8")
    wheel(tmp_path / "served/general", "alpha", "2.0")
    with pytest.raises(InputError) as refused:
        refresh(tmp_path, "small")
    assert (refused.value.found, refused.value.allowed) == (FILE, "alpha==2.0")


def test_every_attested_wheel_of_the_stacks_is_locked() -> None:
    for folder in sorted((ROOT / "images/stacks").iterdir()):
        stack = load_manifest(ROOT, folder.name)
        text = (folder / "requirements.lock").read_text(encoding="utf-8")
        for one in stack.attested:
            assert f"--hash=sha256:{one.sha256}" in text, one.file
            assert one.version() in pins(text)[one.package()]


def test_an_index_that_does_not_answer_is_named_before_packages_are_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(MachineError, match="out of reach") as refused:
        demand_answer(f"http://someone:secret@127.0.0.1:{port}/secret/rocm6.3?key=secret")
    assert refused.value.place == f"http://127.0.0.1:{port}/***"
    assert "Connection refused" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("address", ["http://host:secret/x", "http://[::secret/x"])
def test_what_is_no_address_of_an_index_is_refused_without_its_secret(address: str) -> None:
    with pytest.raises(MachineError, match="found: no valid address") as refused:
        demand_answer(address)
    assert "secret" not in str(refused.value)


def test_an_index_gets_the_password_of_its_address_and_no_other_host_does() -> None:
    asked: dict[str, str | None] = {}

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked[self.path] = self.headers["Authorization"]
            moved = self.path == "/simple"
            self.send_response(302 if moved else 200)
            if moved:
                self.send_header("Location", f"http://localhost:{server.server_port}/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever).start()
        demand_answer(f"http://me:p%40ss@127.0.0.1:{server.server_port}/simple")
        server.shutdown()
    assert asked == {"/simple": f"Basic {b64encode(b'me:p@ss').decode()}", "/elsewhere": None}
