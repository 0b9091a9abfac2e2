"""Downloads against a server on this machine that answers as the Hugging Face Hub does."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import urllib.parse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from twinrun.foundation.errors import InputError, MachineError
from twinrun.runs.download import LISTING, RepositoryCommit, fetch

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# More than the 10 MiB that the library takes at once.
LARGE = bytes(range(256)) * 50_000
FILES = {
    "en/train.00000.json.gz": LARGE,
    "en/train.00001.json.gz": LARGE[::-1],
    "en/validation.json.gz": b"other",
    "tokenizer.json": b'{"small": true}',
    "empty": b"",
}
STORED_IN_GIT = {"tokenizer.json", "empty"}


class Hub(http.server.ThreadingHTTPServer):
    """Serves FILES; its attributes make it fail."""

    cut_after: int | None = None
    """Close the connection after this many bytes, and each later one before any."""
    flip = False
    """Change the first byte of each file."""
    ranges = True
    kind, prefix = "datasets", "/datasets"
    """What addresses of the kind of repository begin with."""
    answer: bytes | None = None
    """Say this to everything."""
    asked: list[tuple[str, str | None]]
    """Paths and Range headers of the requests, in order."""
    authorised: list[str]
    """Authorization headers that came."""


class DownloadHandler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        """Describe a file as the hub does: its commit, its digest and its size."""
        path = urllib.parse.unquote(self.path.partition("?")[0])
        name = path.partition(f"{COMMIT}/")[2]
        if not path.startswith(f"{self.server.prefix}/owner/texts/resolve/{COMMIT}/"):
            self.send_error(404)
            return
        listed: dict[str, Any] = entry(name, FILES[name])
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{listed["lfs"]["oid"] if "lfs" in listed else listed["oid"]}"')
        self.send_header("Content-Length", str(len(FILES[name])))
        self.end_headers()

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        self.server.authorised += filter(None, [self.headers.get("Authorization")])
        path, _, query = self.path.partition("?")
        if self.server.answer is not None:
            self.send_body(self.server.answer)
        elif path.startswith(f"/api/{self.server.kind}/owner/texts/tree/{COMMIT}"):
            folder = path.partition(COMMIT)[2].lstrip("/")
            self.send_page(folder, page=int(dict(urllib.parse.parse_qsl(query)).get("page", 0)))
        elif path.startswith(f"{self.server.prefix}/owner/texts/resolve/{COMMIT}/"):
            self.send_file(FILES[urllib.parse.unquote(path).partition(f"{COMMIT}/")[2]])
        else:
            self.send_error(404)

    def send_page(self, folder: str, *, page: int) -> None:
        """Answer with one entry, and a link to the next page if there is one."""
        entries = [{"type": "directory", "path": "en/more", "size": 0, "oid": "0" * 40}]
        entries += [entry(path, content) for path, content in FILES.items() if path.startswith(folder)]
        address = f"http://{self.headers['Host']}{self.path.partition('?')[0]}?page={page + 1}"
        following = {"Link": f'<{address}>; rel="next"'} if page + 1 < len(entries) else {}
        self.send_body(json.dumps(entries[page : page + 1]).encode(), **following)

    def send_body(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, content: bytes) -> None:
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1]) if self.server.ranges else 0
        if self.server.flip:
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.server.cut_after])
        self.server.cut_after = self.server.cut_after and 0

    def log_message(self, *arguments: object) -> None:
        pass


@cache
def entry(path: str, content: bytes) -> dict[str, object]:
    """Return the listing's line of a file; large ones are named by SHA-256, others as git does."""
    blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    listed: dict[str, object] = {"type": "file", "path": path, "size": len(content), "oid": blob}
    if path not in STORED_IN_GIT:
        listed["oid"] = "f" * 40
        listed["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return listed


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the library ask again at once, where it gives a server up to 23 s."""
    monkeypatch.setattr("time.sleep", lambda _: None)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), DownloadHandler) as server:
        server.asked, server.authorised = [], []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def endpoint(hub: Hub) -> str:
    return f"http://127.0.0.1:{hub.server_port}"


def bring(
    hub: Hub,
    folder: Path,
    pattern: str = "en/train.*.json.gz",
    *,
    name: str = "owner/texts",
    kind: str = "dataset",
    limit: int | None = None,
    said: list[str] | None = None,
) -> list[Path]:
    source = RepositoryCommit(name, COMMIT, kind, endpoint(hub))
    return fetch(source, (pattern,), folder=folder, limit=limit, say=([] if said is None else said).append)


def test_brings_what_matches_from_every_page(hub: Hub, tmp_path: Path) -> None:
    paths = bring(hub, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == list(FILES)[:2]
    assert [path.read_bytes() for path in paths] == [LARGE, LARGE[::-1]]
    assert not list(tmp_path.rglob("*.incomplete"))


def test_files_kept_in_git_are_checked_as_git_blobs(hub: Hub, tmp_path: Path) -> None:
    assert bring(hub, tmp_path, "tokenizer.json")[0].read_bytes() == FILES["tokenizer.json"]
    assert bring(hub, tmp_path, "empty")[0].read_bytes() == b""


def test_models_live_at_other_addresses(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "a b.json", b"{}")
    hub.kind, hub.prefix = "models", ""
    assert bring(hub, tmp_path, "a b.json", kind="model")[0].read_bytes() == b"{}"
    assert hub.asked[-1][0] == f"/owner/texts/resolve/{COMMIT}/a%20b.json"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_named_and_the_next_goes_on(hub: Hub, tmp_path: Path, ranges: bool) -> None:
    hub.ranges, hub.cut_after = ranges, len(LARGE) - 1
    with pytest.raises(MachineError, match="the download failed"):
        bring(hub, tmp_path, limit=1)
    hub.cut_after = None
    assert bring(hub, tmp_path, limit=1)[0].read_bytes() == LARGE


def test_an_interrupted_download_goes_on_in_the_next_run(hub: Hub, tmp_path: Path) -> None:
    bring(hub, tmp_path, limit=1)
    hub.asked.clear()
    assert [path.read_bytes() for path in bring(hub, tmp_path)] == [LARGE, LARGE[::-1]]
    assert [path.rpartition("/")[2] for path, _ in hub.asked] == ["train.00001.json.gz"]


def test_a_flipped_byte_is_refused_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.flip = True
    with pytest.raises(MachineError, match="not the published file"):
        bring(hub, tmp_path, limit=1)
    # What the library knows of a file lies in its own folder.
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [LISTING]
    assert not list((tmp_path / "en").iterdir())


def test_a_damaged_file_on_disk_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    path = bring(hub, tmp_path, limit=1)[0]
    path.write_bytes(b"\1" + LARGE[1:])
    assert bring(hub, tmp_path, limit=1)[0].read_bytes() == LARGE


def test_a_whole_folder_needs_no_network(hub: Hub, tmp_path: Path) -> None:
    bring(hub, tmp_path)
    hub.asked.clear()
    bring(hub, tmp_path)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("commit", "server", "pattern", "said"),
    [
        ("main", None, "*", "not a commit"),
        (COMMIT, "file:///tmp", "*", "not an address of the web"),
        (COMMIT, None, "en/nothing*", "no file matches"),
    ],
)
def test_what_names_nothing_is_wrong_input(
    hub: Hub, tmp_path: Path, commit: str, server: str | None, pattern: str, said: str
) -> None:
    source = RepositoryCommit("owner/texts", commit, endpoint=server or endpoint(hub))
    with pytest.raises(InputError, match=said):
        fetch(source, (pattern,), folder=tmp_path, say=print)


def test_a_file_that_the_server_lists_and_does_not_have_is_named(hub: Hub, tmp_path: Path) -> None:
    bring(hub, tmp_path, limit=1)
    hub.prefix = "/elsewhere"
    with pytest.raises(MachineError, match=r"en/train\.00001\.json\.gz: the download failed") as caught:
        bring(hub, tmp_path)
    assert caught.value.found == "status 404"


@pytest.mark.parametrize(
    "answer", [b"<html>log in</html>", b"{}", b'{"error": 1}', b"[1]", b'[{"type": "file"}]']
)
def test_a_server_that_is_no_hub_is_named(hub: Hub, tmp_path: Path, answer: bytes) -> None:
    hub.answer = answer
    with pytest.raises((MachineError, InputError), match="owner/texts"):
        bring(hub, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    # Port 9 of this machine: nothing listens there.
    away = RepositoryCommit("owner/texts", COMMIT, endpoint="http://127.0.0.1:9")
    with pytest.raises(MachineError, match="the download failed") as caught:
        fetch(away, "*", folder=tmp_path, say=print)
    assert "offline.md" in str(caught.value.hint)


def test_files_stay_below_the_folder(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "en/../../outside", b"x")
    with pytest.raises(MachineError, match="outside its repository"):
        bring(hub, tmp_path, "en/*outside")


def test_a_token_goes_to_the_configured_hub_over_https_alone(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary_of_a_token")
    bring(hub, tmp_path)
    assert hub.asked
    assert not hub.authorised
    assert RepositoryCommit("owner/texts", COMMIT).token is None
    assert RepositoryCommit("owner/texts", COMMIT, endpoint="https://elsewhere.example").token is False


def test_a_password_in_an_address_is_not_shown(tmp_path: Path) -> None:
    for address in ("http://bob:canary@127.0.0.1:9", "ftp://bob:canary@127.0.0.1:9"):
        source = RepositoryCommit("owner/texts", COMMIT, endpoint=address)
        with pytest.raises((InputError, MachineError)) as caught:
            fetch(source, ("en/train.*.json.gz",), folder=tmp_path, say=print)
        assert "canary" not in str(caught.value)


def test_a_list_of_another_server_is_not_taken(hub: Hub, tmp_path: Path) -> None:
    bring(hub, tmp_path)
    other = RepositoryCommit("owner/texts", COMMIT, endpoint="http://127.0.0.1:9")
    with pytest.raises(InputError, match="the list of these files is another server's"):
        fetch(other, ("en/train.*.json.gz",), folder=tmp_path, say=print)
