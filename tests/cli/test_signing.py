"""Records, submissions and checkpoints that are signed by an SSH key, with the real ssh-keygen."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from tests.checkpoints.writing import write
from tests.cli.flow_sites import FlowSite
from tests.cli.played_ranks import Job
from tests.commands import invoke
from tests.execution.fake_engine import Play
from tests.records import PROJECT, RECORDS, ROOT
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.verification import demand_signed_checkpoint
from twinrun.cli.records import checkpoint, report, sign
from twinrun.foundation.errors import InputError, MachineError, RunInterruptedError
from twinrun.results.reading import read_record

pytestmark = pytest.mark.needs("ssh-keygen")

COMMITTED = RECORDS / "rmsnorm.json"


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
    assert read_record(record, PROJECT).signer == "unsigned"
    assert sign(record, key=key).view == f"{record}.sig"
    assert read_record(record, PROJECT).signer == "signed by ada@example.org"
    report(str(record), out=tmp_path / "page.html")
    assert "the record is signed by ada@example.org" in capsys.readouterr().err
    assert "signed by ada@example.org" in (tmp_path / "page.html").read_text()


def test_a_signature_is_over_the_digest_as_the_page_says(record: Path, key: Path, tmp_path: Path) -> None:
    sign(record, key=key)
    command = ["ssh-keygen", "-Y", "verify", "-f", str(tmp_path / "signers"), "-I", "ada@example.org"]
    digest = json.loads(record.read_text())["sha256"] + "\n"
    subprocess.run([*command, "-n", "twinrun", "-s", f"{record}.sig"], input=digest.encode(), check=True)


def test_a_key_that_nobody_vouches_for_is_shown_as_such(record: Path, key: Path, tmp_path: Path) -> None:
    make(tmp_path / "other")
    sign(record, key=tmp_path / "other")
    assert read_record(record, PROJECT).signer.startswith("signed with the key SHA256:")
    assert "which signers does not vouch for" in read_record(record, PROJECT).signer


def _of_another_record(record: Path, key: Path) -> None:
    other = next(one for one in COMMITTED.parent.glob("*.json") if one.read_bytes() != COMMITTED.read_bytes())
    shutil.copy(other, record)


def _of_git(record: Path, key: Path) -> None:
    digest = json.loads(record.read_text())["sha256"] + "\n"
    command = ["ssh-keygen", "-Y", "sign", "-f", str(key), "-n", "git"]
    done = subprocess.run(command, input=digest.encode(), check=True, capture_output=True)
    Path(f"{record}.sig").write_bytes(done.stdout)


def _no_signature(text: str, record: Path, key: Path) -> None:
    Path(f"{record}.sig").write_text(text)


def _with_option(option: str, record: Path, key: Path) -> None:
    signers = key.with_name("signers")
    signers.write_text(signers.read_text().replace(" ssh", f" {option} ssh", 1))


def _revoked(form: str, record: Path, key: Path) -> None:
    revoked, public = key.with_name("revoked_keys"), key.with_name("key.pub")
    make(key.with_name("other"))
    shutil.copy(key.with_name("other.pub"), revoked)
    assert read_record(record, PROJECT).signer == "signed by ada@example.org"
    if form == "KRL":
        subprocess.run(["ssh-keygen", "-q", "-k", "-f", str(revoked), str(public)], check=True)
    else:
        revoked.write_text(public.read_text() if form == "key" else "nonsense")


def _signers_at(kind: str, record: Path, key: Path) -> None:
    place = key.with_name("named")
    if kind != "absent":
        place.mkdir() if kind == "folder" else os.mkfifo(place)
    os.environ["TWINRUN_SIGNERS"] = str(place)


ARMOUR = "-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"
UNLIKE, REVOKED = "the signature does not match", "the key of ada@example.org is revoked"
REFUSED: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "another record": (_of_another_record, UNLIKE),
    "another purpose": (_of_git, UNLIKE),
    **{repr(text[:9]): (partial(_no_signature, text), UNLIKE) for text in ("", "junk", ARMOUR)},
    **{f"revoked by {form}": (partial(_revoked, form), REVOKED) for form in ("key", "KRL", "none")},
    **{
        f"signers {kind}": (partial(_signers_at, kind), "named: the signers cannot be read")
        for kind in ("absent", "folder", "pipe")
    },
    **{
        option: (partial(_with_option, option), said)
        for option, said in {
            'valid-before="20200101"': "was not valid when it signed\n  found: line 1: key has expired",
            'valid-after="20900101"': "not valid when it signed\n  found: line 1: key is not yet valid",
            'namespaces="git"': "the key of ada@example.org may not sign this",
            'nonsense="1"': "signers: not a line of a signer\n  found: line 1: bad options",
        }.items()
    },
}


@pytest.mark.parametrize(("spoil", "said"), REFUSED.values(), ids=REFUSED)
def test_a_signature_that_says_nothing_is_refused(
    record: Path, key: Path, spoil: Callable[[Path, Path], None], said: str
) -> None:
    sign(record, key=key)
    spoil(record, key)
    with pytest.raises(InputError) as caught:
        read_record(record, PROJECT)
    assert said in str(caught.value)


@pytest.mark.parametrize("by", ["option", "policy"])
def test_a_signature_can_be_demanded(record: Path, key: Path, tmp_path: Path, by: str) -> None:
    option = ("--require-signature",) if by == "option" else ()
    if by == "policy":
        with (tmp_path / "signers").open("a") as stream:
            stream.write("# twinrun: require-signature\n")
    lines = [
        ("report", str(record), "--out", str(tmp_path / "page.html")),
        ("compare", str(record), str(record)),
        ("report", str(record), "--why", "throughput-1b"),
    ]
    make(tmp_path / "stranger")
    for found in ("unsigned", "which signers does not vouch for"):
        for line in lines:
            done = invoke(ROOT, *line, *option)
            assert done.returncode == 2, done.stderr
            assert "record.json: a signature of a known signer is demanded" in done.stderr
            assert found in done.stderr
        sign(record, key=tmp_path / "stranger")
    sign(record, key=key)
    for line in lines[:2]:
        done = invoke(ROOT, *line, *option)
        assert done.returncode == 0, done.stderr


def test_a_changed_record_is_not_signed(record: Path, key: Path) -> None:
    record.write_text(record.read_text().replace('"twinrun": "', '"twinrun": "9'))
    with pytest.raises(InputError, match="changed after it was written"):
        sign(record, key=key)
    assert not Path(f"{record}.sig").exists()


@pytest.mark.parametrize("text", [None, "no key"])
def test_what_is_no_key_does_not_sign(record: Path, tmp_path: Path, text: str | None) -> None:
    if text:
        (tmp_path / "other").write_text(text)
    with pytest.raises(InputError):
        sign(record, key=tmp_path / "other")


def test_a_signed_record_needs_ssh_keygen_to_be_read(
    record: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign(record, key=key)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError, match="cannot start ssh-keygen"):
        read_record(record, PROJECT)


def test_ranks_go_on_only_from_a_signed_checkpoint_where_that_is_demanded(tmp_path: Path, key: Path) -> None:
    store = FolderStore(tmp_path / "place")
    demand_signed_checkpoint(store, step=None, root=ROOT)
    token = store.claim("run")
    for step in (2, 4):
        write(store, step=step, token=token)
    with pytest.raises(InputError, match=r"manifest\.json: a signature of a known signer is demanded"):
        demand_signed_checkpoint(store, step=None, root=ROOT)
    sign(tmp_path / "place", key=key)
    demand_signed_checkpoint(store, step=None, root=ROOT)
    with pytest.raises(InputError, match="is demanded"):
        demand_signed_checkpoint(store, step=2, root=ROOT)


def test_a_run_is_resumed_only_from_a_signed_checkpoint_where_that_is_demanded(
    trained: FlowSite, key: Path
) -> None:
    def stopped(job: Job) -> Play:
        return dataclasses.replace(trained.play(job), result=None, interrupted=KeyboardInterrupt())

    trained.script.play = stopped
    with pytest.raises(RunInterruptedError):
        trained.invoke(checkpoint=("steps=5",))
    trained.script.play = trained.play
    place = trained.folders()[0] / "checkpoints" / "devices=1"
    write(FolderStore(place), step=5, token=FolderStore(place).claim("run"))
    again = partial(trained.invoke, checkpoint=("steps=5",), resume=True, require_signature=True)
    with pytest.raises(InputError, match=r"manifest\.json: a signature of a known signer is demanded"):
        again()
    sign(place, key=key)
    assert again() == 0


def verified(place: Path) -> list[dict[str, str]]:
    found = checkpoint("verify", place)
    rows = cast("list[dict[str, str]]", found.data)
    assert found.code == (4 if any(row["damage"] for row in rows) else 0)
    return rows


def test_the_newest_checkpoint_is_signed(tmp_path: Path, key: Path) -> None:
    place = tmp_path / "place"
    store = FolderStore(place)
    token = store.claim("run")
    for step in (2, 4):
        write(store, step=step, token=token)
    signature = Path(sign(place, key=key).data["signature"])
    assert signature == place / "step-00000004" / "manifest.json.sig"
    rows = verified(place)
    assert [row["signature"] for row in rows] == ["unsigned", "signed by ada@example.org"]
    signature.rename(place / "step-00000002" / "manifest.json.sig")
    rows = verified(place)
    assert "manifest.json.sig: the signature does not match" in rows[0]["damage"]
    assert rows[1]["signature"] == "unsigned"
