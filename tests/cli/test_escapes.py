"""Names, settings, records and logs that would move a cursor, hide text or turn its order."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from tests.records import again
from tests.report.committed import newest
from twinrun.foundation.errors import InputError
from twinrun.foundation.terminal import VisibleConsole, say
from twinrun.foundation.text import visible
from twinrun.protocol.allocation import Allocation
from twinrun.report.page import write_report
from twinrun.results.reading import FinishedRun
from twinrun.runs.run import Display

ROOT = Path(__file__).resolve().parents[2]
TRAINING = newest("mpt7b-scaling")
# Clears the screen, retitles the window, goes to the begin of the line, a C1 control, and turns the order.
HOSTILE = "a\x1b[2J\x1b]0;t\x07\rb\x9b1m\u202ec\u2066d\u200be\u2028f"
SHOWN = "a\\x1b[2J\\x1b]0;t\\x07\\rb\\x9b1m\\u202ec\\u2066d\\u200be\\u2028f"


def test_only_text_comes_through() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("two\nlines\tä中\U0001f600") == "two\nlines\tä中\U0001f600"
    assert visible("\udcff\ud800") == "\\udcff\\ud800"


def test_what_is_printed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    Display().say(HOSTILE)
    told = capsys.readouterr()
    assert told.out == f"{SHOWN}\n"
    assert told.err == f"{SHOWN}\n"


def test_errors_are_shown() -> None:
    error = InputError(HOSTILE, place=HOSTILE, found=[HOSTILE], allowed=HOSTILE, hint=HOSTILE)
    assert str(error).count(SHOWN) == 5
    assert not set("\x1b\x07\r\x9b\u202e") & set(str(error))


def test_a_terminal_obeys_the_view_and_not_what_stands_in_it() -> None:
    stream, table = io.StringIO(), Table("name")
    table.add_row(HOSTILE, style="red")
    VisibleConsole(file=stream, force_terminal=True, width=120).print(table)
    assert "\\x1b[2J" in re.sub(r"\s|\x1b\[[\d;]*m|│", "", stream.getvalue())
    assert "\x1b[31m" in stream.getvalue()
    assert not set("\x07\r\x9b\u202e\u2066\u200b\u2028") & set(stream.getvalue())
    assert "\x1b[2J" not in stream.getvalue()


def hostile() -> str:
    return f"{HOSTILE}<script>alert(1)</script>|[x](y)@all`"


def with_driver(driver: str) -> Allocation:
    allocation = TRAINING.record.allocation
    report = TRAINING.node.model_copy(update={"driver": driver})
    return allocation.model_copy(update={"reports": dict.fromkeys(allocation.nodes, report)})


def test_a_page_shows_what_a_record_says(tmp_path: Path) -> None:
    record = again(TRAINING, run=hostile(), allocation=with_driver(hostile()))
    page = tmp_path / "page.html"
    write_report(page, FinishedRun(record=record, folder=tmp_path, file=tmp_path / "record.json"))
    text = page.read_text(encoding="utf-8")
    assert SHOWN in text
    assert not set("\x1b\x07\x9b\u202e\u2066\u2028") & set(text)
    assert "<script" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "recipes/{}"),
        ("run", "recipes/mpt7b-scaling", "--dry", "--set", "model={}"),
        ("run", "recipes/mpt7b-scaling", "--dry", "--checkpoint", "place={}"),
        ("report", "{}"),
        ("compare", "{}", "{}"),
        ("checkpoint", "verify", "{}"),
        ("sign", "{}", "--key", "{}"),
    ],
)
def test_a_command_takes_any_bytes_for_wrong_input(arguments: tuple[str, ...]) -> None:
    half = os.fsdecode(b"\xff\x1b[2J")
    command = [sys.executable, "-m", "twinrun", *(one.replace("{}", half) for one in arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=60)
    assert done.returncode == 2, done.stderr
    assert b"error: " in done.stderr
    assert b"\x1b" not in done.stdout + done.stderr
