"""Records, submissions and checkpoints that are signed by an SSH key, with the real ssh-keygen."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.checkpoints.writing import write
from tests.records import PROJECT, ROOT
from twinrun.checkpoints import store_at
from twinrun.cli import report as report_command
from twinrun.cli.checkpoint import checkpoint
from twinrun.cli.signing import signature_for
from twinrun.foundation.errors import InputError, MachineError
from twinrun.results.reading import read_record

pytestmark = pytest.mark.needs("ssh-keygen")

COMMITTED = next(iter(sorted((ROOT / "recipes/mpt-throughput/results").glob("h200x1_*.json"))))


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key of somebody whom a file of signers names."""
    path = tmp_path / "key"
    make(path)
    kind, public, *_ = path.with_name("key.pub").read_text().split()
    signers = tmp_path / "signers"
    signers.write_text(f"ada@example.org {kind} {public}\n")
    monkeypatch.setenv("TWINRUN_SIGNERS", str(signers))
    return path


def make(path: Path, *options: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path), *options], check=True)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return Path(shutil.copy(COMMITTED, tmp_path / "record.json"))


def test_a_record_says_who_signed_it(
    record: Path, key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_record(record, PROJECT).signature == "unsigned"
    assert signature_for(ROOT, str(record), key=key) == f"{record}.sig"
    assert read_record(record, PROJECT).signature == "signed by ada@example.org"
    report_command.report(ROOT, str(record), out=tmp_path / "page.html", form=False, add=None)
    assert "the record is signed by ada@example.org" in capsys.readouterr().err
    assert "signed by ada@example.org" in (tmp_path / "page.html").read_text()


def test_a_signature_is_over_the_digest_as_the_page_says(record: Path, key: Path, tmp_path: Path) -> None:
    signature_for(ROOT, str(record), key=key)
    command = ["ssh-keygen", "-Y", "verify", "-f", str(tmp_path / "signers"), "-I", "ada@example.org"]
    digest = json.loads(record.read_text())["sha256"] + "\n"
    subprocess.run([*command, "-n", "twinrun", "-s", f"{record}.sig"], input=digest.encode(), check=True)


def test_a_key_that_nobody_vouches_for_is_shown_as_such(record: Path, key: Path, tmp_path: Path) -> None:
    make(tmp_path / "other")
    signature_for(ROOT, str(record), key=tmp_path / "other")
    assert read_record(record, PROJECT).signature.startswith("signed with the key SHA256:")
    assert "which signers does not vouch for" in read_record(record, PROJECT).signature


def test_a_signature_of_another_record_is_refused(record: Path, key: Path) -> None:
    other = next(one for one in COMMITTED.parent.glob("*.json") if one.read_bytes() != COMMITTED.read_bytes())
    signature = Path(signature_for(ROOT, str(record), key=key)).read_bytes()
    shutil.copy(other, record)
    Path(f"{record}.sig").write_bytes(signature)
    with pytest.raises(InputError, match="the signature does not match"):
        read_record(record, PROJECT)


@pytest.mark.parametrize(
    "text", ["", "junk", "-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"]
)
def test_what_is_no_signature_is_refused(record: Path, text: str) -> None:
    Path(f"{record}.sig").write_text(text)
    with pytest.raises(InputError, match="the signature does not match"):
        read_record(record, PROJECT)


def test_a_signature_for_another_purpose_is_refused(record: Path, key: Path) -> None:
    digest = json.loads(record.read_text())["sha256"] + "\n"
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", "git"]
    done = subprocess.run(command, input=digest.encode(), check=True, capture_output=True)
    Path(f"{record}.sig").write_bytes(done.stdout)
    with pytest.raises(InputError, match="the signature does not match"):
        read_record(record, PROJECT)


def test_a_key_that_may_sign_no_longer_is_refused(record: Path, key: Path, tmp_path: Path) -> None:
    signature_for(ROOT, str(record), key=key)
    signers = tmp_path / "signers"
    before = signers.read_text()
    signers.write_text(before.replace(" ssh", ' valid-before="20200101" ssh', 1))
    assert "which signers does not vouch for" in read_record(record, PROJECT).signature
    signers.write_text(before.replace(" ssh", ' namespaces="git" ssh', 1))
    with pytest.raises(InputError, match=r"the key of ada@example\.org may not sign"):
        read_record(record, PROJECT)


def test_a_changed_record_is_not_signed(record: Path, key: Path) -> None:
    record.write_text(record.read_text().replace('"twinrun": "', '"twinrun": "9'))
    with pytest.raises(InputError, match="changed after it was written"):
        signature_for(ROOT, str(record), key=key)
    assert not Path(f"{record}.sig").exists()


@pytest.mark.parametrize("text", [None, "no key"])
def test_what_is_no_key_does_not_sign(record: Path, tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "other").write_text(text)
    with pytest.raises(InputError):
        signature_for(ROOT, str(record), key=tmp_path / "other")


def test_a_signed_record_needs_ssh_keygen_to_be_read(
    record: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature_for(ROOT, str(record), key=key)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="cannot start ssh-keygen"):
        read_record(record, PROJECT)


def verified(place: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    code = checkpoint("verify", str(place), step=None, out=None, as_json=True)
    rows: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    assert code == (4 if any(row["damage"] for row in rows) else 0)
    return rows


def test_the_newest_checkpoint_is_signed(
    tmp_path: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    store = store_at(str(place))
    token = store.claim("run")
    for step in (2, 4):
        write(store, step=step, token=token)
    signature = Path(signature_for(ROOT, str(place), key=key))
    assert signature == place / "step-00000004" / "manifest.json.sig"
    rows = verified(place, capsys)
    assert [row["signature"] for row in rows] == ["unsigned", "signed by ada@example.org"]
    signature.rename(place / "step-00000002" / "manifest.json.sig")
    rows = verified(place, capsys)
    assert "manifest.json.sig: the signature does not match" in rows[0]["damage"]
    assert rows[1]["signature"] == "unsigned"
