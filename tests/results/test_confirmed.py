"""A second signer's record confirms a verdict: two keys, two runs, the commands as a user types them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkouts import ROOT, checkout
from tests.doors import Command
from tests.records import sealed, smoke

pytestmark = pytest.mark.needs("ssh-keygen")
RECIPE = "mpt7b-scaling"
Sign = Callable[[Path, str], None]


@pytest.fixture
def sign(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Sign:
    """Sign a record with the key of somebody, whom the file of signers names."""
    signers = tmp_path / "signers"
    monkeypatch.setenv("TWINRUN_SIGNERS", str(signers))

    def with_key(record: Path, who: str) -> None:
        key = tmp_path / who
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
            kind, public, *_ = key.with_name(f"{who}.pub").read_text().split()
            with signers.open("a") as file:
                file.write(f"{who}@example.org {kind} {public}\n")
        done = command("sign", str(record), "--key", str(key), TWINRUN_SIGNERS=str(signers))
        assert done.code == 0, done.stderr

    return with_key


def again(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a second run of the same plan wrote."""
    for point in content["points"]:
        for step in point["result"]["steps"]:
            step["seconds"] *= 1.01
    return sealed(content | {"run": "20261128-120000-00000000-0000"})


@pytest.mark.parametrize(
    ("who", "code", "said"),
    [
        ("bob", 0, "same-loss-at-every-world-size: confirmed, "),
        ("ada", 1, "not confirmed, both are signed by ada@example.org: a second signer confirms"),
        ("", 1, "is unsigned, and both must be signed by somebody who is known"),
    ],
)
def test_compare_says_whether_a_second_signer_confirms_and_why(
    tmp_path: Path, command: Command, sign: Sign, who: str, code: int, said: str
) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps(smoke(RECIPE)))
    b.write_text(json.dumps(again(smoke(RECIPE))))
    sign(a, "ada")
    if who:
        sign(b, who)
    done = command("compare", "--confirm", str(a), str(b), TWINRUN_SIGNERS=str(tmp_path / "signers"))
    assert (done.code, said in done.stdout) == (code, True), done.stdout + done.stderr


def test_report_says_who_confirms_a_verdict(tmp_path: Path, command: Command, sign: Sign) -> None:
    root = checkout(tmp_path, RECIPE)
    shutil.copy(ROOT / "tasks.py", root)
    results = root / "recipes" / RECIPE / "results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    mine, theirs = tmp_path / "record.json", results / "theirs.json"
    mine.write_text(json.dumps(smoke(RECIPE)))
    theirs.write_text(json.dumps(again(smoke(RECIPE))))
    sign(mine, "ada")
    sign(theirs, "bob")
    words = ("report", str(mine), "--why", "same-loss-at-every-world-size")
    done = command(*words, root=root, TWINRUN_SIGNERS=str(tmp_path / "signers"))
    assert done.code == 0, done.stderr
    assert "confirmed by bob@example.org" in done.stdout
