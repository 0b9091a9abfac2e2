"""Downloads against a server on this machine that answers as the Hugging Face Hub does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub import COMMIT, Hub
from twinrun.foundation.errors import InputError, MachineError
from twinrun.runs.download import RepositoryCommit, fetch

# More than the 10 MiB that the library takes at once.
LARGE = bytes(range(256)) * 50_000
FILES = {
    "en/train.00000.json.gz": LARGE,
    "en/train.00001.json.gz": LARGE[::-1],
    "en/validation.json.gz": b"other",
    "tokenizer.json": b'{"small": true}',
    "empty": b"",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the files; the library asks again at once, where it gives a server up to 23 s."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    with Hub(datasets=dict(FILES), models={"a b.json": b"{}"}).serving() as server:
        yield server


def bring(server: Hub | str, folder: Path, pattern: str = "en/train.*.json.gz", **options: Any) -> list[Path]:
    endpoint = server if isinstance(server, str) else server.endpoint
    revision, kind = options.pop("revision", COMMIT), options.pop("kind", "dataset")
    source = RepositoryCommit("owner/texts", revision, kind, endpoint)
    return fetch(source, (pattern,), folder=folder, say=print, **options)


def test_files_kept_in_git_and_models_at_other_addresses_are_checked_too(hub: Hub, tmp_path: Path) -> None:
    assert bring(hub, tmp_path, "tokenizer.json")[0].read_bytes() == FILES["tokenizer.json"]
    assert bring(hub, tmp_path, "empty")[0].read_bytes() == b""
    assert bring(hub, tmp_path, "a b.json", kind="model")[0].read_bytes() == b"{}"
    assert hub.asked[-1][0] == f"/owner/texts/resolve/{COMMIT}/a%20b.json"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_named_and_the_next_goes_on(hub: Hub, tmp_path: Path, ranges: bool) -> None:
    hub.ranges, hub.cut_after = ranges, len(LARGE) - 1
    with pytest.raises(MachineError, match="the download failed"):
        bring(hub, tmp_path, limit=1)
    hub.cut_after = None
    assert bring(hub, tmp_path, limit=1)[0].read_bytes() == LARGE


def test_all_that_matches_comes_once(hub: Hub, tmp_path: Path) -> None:
    bring(hub, tmp_path, limit=1)
    hub.asked.clear()
    paths = bring(hub, tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == list(FILES)[:2]
    assert [path.read_bytes() for path in paths] == [LARGE, LARGE[::-1]]
    assert not list(tmp_path.rglob("*.incomplete"))
    assert [path.rpartition("/")[2] for path, _ in hub.asked] == ["train.00001.json.gz"]
    hub.asked.clear()
    bring(hub, tmp_path)
    # A whole one needs no network.
    assert hub.asked == []


def test_a_flipped_byte_is_refused_and_removed(hub: Hub, tmp_path: Path) -> None:
    hub.flip = True
    with pytest.raises(MachineError, match="not the published file"):
        bring(hub, tmp_path, limit=1)
    # What the library knows of a file lies in its own folder.
    assert all(path.name.startswith("files-") for path in tmp_path.iterdir() if path.is_file())
    assert not list((tmp_path / "en").iterdir())


def test_a_damaged_file_is_fetched_again_and_so_is_what_another_server_called_whole(
    hub: Hub, tmp_path: Path
) -> None:
    path = bring(hub, tmp_path, limit=1)[0]
    path.write_bytes(b"\1" + LARGE[1:])
    assert bring(hub, tmp_path, limit=1)[0].read_bytes() == LARGE
    with Hub(datasets=dict.fromkeys(FILES, LARGE[1:])).serving() as lying:
        assert bring(lying, tmp_path, limit=1)[0].read_bytes() == LARGE[1:]
    assert bring(hub, tmp_path, limit=1)[0].read_bytes() == LARGE


@pytest.mark.parametrize(
    ("revision", "server", "pattern", "said"),
    [
        ("main", None, "*", "not a commit"),
        (COMMIT, "file:///tmp", "*", "not an address of the web"),
        (COMMIT, None, "en/nothing*", "no file matches"),
    ],
)
def test_what_names_nothing_is_wrong_input(
    hub: Hub, tmp_path: Path, revision: str, server: str | None, pattern: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        bring(server or hub, tmp_path, pattern, revision=revision)


@pytest.mark.parametrize("answer", [b"<html>log in</html>", b'{"error": 1}', b"[1]", b'[{"type": "file"}]'])
def test_a_server_that_is_no_hub_is_named(hub: Hub, tmp_path: Path, answer: bytes) -> None:
    hub.answer = answer
    with pytest.raises((MachineError, InputError), match="owner/texts"):
        bring(hub, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("protocol", ["http", "ftp"])
def test_a_server_that_is_away_is_named_without_a_password(tmp_path: Path, protocol: str) -> None:
    # Port 9 of this machine: nothing listens there.
    with pytest.raises((InputError, MachineError)) as caught:
        bring(f"{protocol}://bob:canary@127.0.0.1:9", tmp_path)
    assert "canary" not in str(caught.value)
    assert protocol == "ftp" or "offline.md" in str(caught.value.hint)


def test_files_stay_below_the_folder(hub: Hub, tmp_path: Path) -> None:
    hub.files["datasets"]["en/../../outside"] = b"x"
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
