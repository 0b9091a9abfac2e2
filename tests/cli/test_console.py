"""What a machine refuses and what is our own fault, as real processes end: code, message, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from twinrun.foundation.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/mpt7b-scaling"
PLAN = ("run", RECIPE, "--vendor", "cpu", "--engine", "host", "--dry", "--json")


def ended(
    *command: str, stdout: int = subprocess.PIPE, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, in the project with these variables."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
        timeout=600,
    )
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    return done


def block(statement: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run `statement` as the body of a task."""
    code = (
        "import os, signal, sys\n"
        "from twinrun.cli.console import exit_code_of\nfrom twinrun.foundation.errors import *\n"
        f"def body():\n    {statement}\nsys.exit(exit_code_of(body))\n"
    )
    return ended("-c", code, variables=variables)


@pytest.mark.parametrize("statement", ["assert 1 > 2", "{}['absent']", "open('absent')", "1 / 0"])
def test_a_fault_of_ours_ends_with_6_and_keeps_its_traceback(statement: str, tmp_path: Path) -> None:
    done = block(statement, TMPDIR=str(tmp_path), A_TOKEN="a-secret-word")
    assert done.returncode == 6
    (log,) = tmp_path.iterdir()
    assert str(log) in done.stderr.decode()
    assert "CONTRIBUTING.md" in done.stderr.decode()
    text = log.read_text(encoding="utf-8")
    assert "Traceback" in text
    assert f"Python {sys.version.split()[0]}" in text


def test_a_fault_tells_no_secret(tmp_path: Path) -> None:
    done = block("raise ValueError('a-secret-' + 'word')", TMPDIR=str(tmp_path), A_TOKEN="a-secret-word")
    (log,) = tmp_path.iterdir()
    assert "a-secret-word" not in done.stderr.decode() + log.read_text(encoding="utf-8")


def test_what_is_known_keeps_its_code() -> None:
    assert block("raise InputError('wrong')").returncode == InputError.exit_code
    assert block("raise RunInterruptedError('stopped')").returncode == 5
    assert block("pass").returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_has_nothing_to_go_on_with_is_stopped_in_silence(number: int) -> None:
    done = block(f"print('whole'); os.kill(os.getpid(), {number:d})")
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, b"whole\n", b"")


def test_ctrl_c_before_a_command_begins_is_silent(tmp_path: Path) -> None:
    # The shell sees 130 of a program that this signal ended: ours while it imports, Invoke's in tasks.py.
    begins = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    text = (ROOT / "tasks.py").read_text(encoding="utf-8")
    (tmp_path / "tasks.py").write_text(f"{text}\n{begins}\n", encoding="utf-8")
    for command in (
        ("-c", f"import twinrun.cli; {begins}"),
        ("-m", "invoke", "--search-root", str(tmp_path), "--list"),
    ):
        done = ended(*command)
        assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


def test_a_second_stop_while_the_interpreter_ends_keeps_the_code() -> None:
    # Deleted with the modules, when Python's own handler of the signal is gone.
    late = "sys.late = type('', (), {'__del__': lambda _, kill=os.kill, me=os.getpid(): kill(me, 2)})()"
    assert block(f"{late}; os.kill(os.getpid(), signal.SIGINT)").returncode == 130


def test_a_full_disk_behind_standard_output() -> None:
    with Path("/dev/full").open("wb") as full:
        done = ended("-m", "twinrun", *PLAN, stdout=full.fileno())
    assert done.returncode == 3
    message = done.stderr.decode()
    assert "error: standard output" in message
    assert "No space left on device" in message
    assert "what was being written is lost, what was whole before is kept" in message


@pytest.mark.parametrize("command", [PLAN, ("--help",), ("run", "--help"), ("doctor",)], ids=" ".join)
def test_a_reader_that_went_away(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = ended("-m", "twinrun", *command, stdout=writer)
    finally:
        os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert b"error" not in done.stderr


@pytest.mark.parametrize("command", [PLAN, ("--help",)], ids=" ".join)
def test_standard_output_that_is_closed(command: tuple[str, ...]) -> None:
    script = 'exec "$@" >&-'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", sys.executable, "-m", "twinrun", *command],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: standard output is closed\nhint: ")


def test_a_place_that_holds_no_files() -> None:
    done = ended("-m", "twinrun", "report", str(committed()), "--out", "/proc/page.html")
    message = done.stderr.decode()
    assert done.returncode == 3, message
    assert "error: /proc/" in message


def committed() -> Path:
    """Return a record that a recipe carries."""
    return ROOT / "tests" / "data" / "records" / f"{Path(RECIPE).name}.json"


DATA = ("data", "c4", "--engine", "host")
BUILD = pytest.param(("build", "--vendor", "cpu"), marks=pytest.mark.needs("docker"))


@pytest.mark.parametrize("arguments", [DATA, BUILD], ids=["data", "build"])
@pytest.mark.parametrize("variable", ["TWINRUN_CACHE", "HOME"])
def test_a_cache_that_cannot_be_written(tmp_path: Path, arguments: tuple[str, ...], variable: str) -> None:
    (tmp_path / ".cache").touch()
    place = tmp_path / ".cache" / "twinrun"
    value = str(tmp_path if variable == "HOME" else place)
    variables = {"TWINRUN_CACHE": "", "XDG_CACHE_HOME": "", variable: value}
    done = ended("-m", "twinrun", *arguments, variables=variables)
    message = done.stderr.decode()
    assert done.returncode == 3, message
    assert f"{place}" in message
    assert "Not a directory" in message
    assert "TWINRUN_CACHE" in message


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_in_an_encoding_without_our_characters(encoding: str, tmp_path: Path) -> None:
    out = tmp_path / "größer"
    locale = {"PYTHONIOENCODING": encoding, "LC_ALL": "C", "LANG": "C"}
    plan = ended("-m", "twinrun", *PLAN, "--out", str(out), variables=locale)
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout.decode("ascii"))["plan"]
    table = ended("-m", "twinrun", "doctor", variables=locale)
    assert table.returncode in (0, 3), table.stderr
    assert table.stdout.decode(encoding)
    listed = ended("-m", "twinrun", "--help", variables=locale)
    assert listed.returncode == 0
    printed = block("print('größer \\N{GREEK SMALL LETTER MU} ✓ ✗ ≠ ○')", **locale)
    assert printed.returncode == 0
    assert printed.stdout.endswith(b" ? ? ? ? ?\n")
