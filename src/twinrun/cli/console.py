"""The end of a command: JSON, messages, and one exit code for whatever ended it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import to_jsonable_python
from rich.console import RenderableType

from twinrun import __version__
from twinrun.foundation.errors import InputError, MachineError, RunInterruptedError, TwinrunError
from twinrun.foundation.redaction import HiddenNames
from twinrun.foundation.terminal import say


def _stop(number: int, _: object) -> None:
    raise KeyboardInterrupt(number)


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; an error becomes a message on stderr."""
    # A scheduler ends a job with SIGTERM, a closed terminal with SIGHUP: the same orderly stop as Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup the signal is ignored, and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    message = ""
    try:
        _check_streams()
        code = command()
        sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        message, code = _end_of(error)
    # The interpreter's end takes handlers away: a second Ctrl-C would change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where stderr is full or closed too, the exit code is all there is.
    with contextlib.suppress(OSError):
        sys.stderr.write(message)
    if sys.stdout is not None:
        # Drop what it did not take: the interpreter tries again, and changes the exit code.
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _check_streams() -> None:
    """Make streams take every text; raises MachineError where standard output is closed."""
    if sys.stderr is None:
        # Keep descriptor 2 occupied, so that no later file opens as stderr.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        raise MachineError("standard output is closed", hint="send it to a file, or to /dev/null")
    # A sign that the encoding lacks becomes one that it has, which keeps the columns of a table.
    for stream, errors in ((sys.stderr, "backslashreplace"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _end_of(error: BaseException) -> tuple[str, int]:
    """Return what to say of the error that ended a command, which may be nothing, and its exit code."""
    if isinstance(error, KeyboardInterrupt):
        # Resumable runs raise RunInterruptedError instead.
        # Shells tell a program that a signal ended by 128 and the number of the signal.
        return "", 128 + (*error.args, signal.SIGINT)[0]
    if isinstance(error, BrokenPipeError):
        # The program that read our output has ended.
        return "", 128 + signal.SIGPIPE
    if isinstance(error, FileNotFoundError) and not error.filename:
        # The one file without a name is the folder that the command works in.
        error = InputError("no folder to work in", place="twinrun", hint="change to the project's folder")
    if isinstance(error, OSError) and error.errno and not isinstance(error, FileNotFoundError):
        # A file that is open, as standard output is, has no name in the error.
        place = error.filename or "standard output, or another open file"
        hint = "free some space or choose another place, TWINRUN_CACHE for the cache and --out for a run;"
        hint += " what was being written is lost, what was whole before is kept"
        error = MachineError(f"refused by the system: {error.strerror}", place=place, hint=hint)
    if not isinstance(error, TwinrunError):
        error = _fault(error)
    return f"{error}\n", error.exit_code


def _fault(error: BaseException) -> TwinrunError:
    """Write the traceback to a file of its own and return what to say of it."""
    head = f"twinrun {__version__}, Python {sys.version}, {os.uname().sysname} {os.uname().release}\n"
    hide = HiddenNames()
    text = hide.text("".join((head, f"{sys.argv}\n", *traceback.format_exception(error))))
    found = hide.text(f"{type(error).__name__}: {error}")
    kept = f"report it as CONTRIBUTING.md says; the traceback, which no temporary folder takes:\n{text}"
    with contextlib.suppress(OSError):
        log = Path(tempfile.mkstemp(prefix="twinrun-fault-", suffix=".log")[1])
        log.write_text(text, encoding="utf-8", errors="backslashreplace")
        kept = f"report it as CONTRIBUTING.md says; the traceback is in {log}"
    return TwinrunError("a fault of twinrun itself", found=found, hint=kept)


@contextlib.contextmanager
def resumable(place: str) -> Iterator[None]:
    """Say of a stop that the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        hint = "the same command goes on from here"
        raise RunInterruptedError("stopped; what is finished is kept", place=place, hint=hint) from None


def tell(line: object) -> None:
    """Print a line on stderr, where what is no data goes."""
    say(line, file=sys.stderr, flush=True)


class Shown(NamedTuple):
    """What a command has found: a view for people, the same as data, and the exit code."""

    view: RenderableType
    data: Any
    """What JSON has, or a pydantic model, or both in each other."""
    code: int = 0

    def show(self, *, as_json: bool) -> int:
        """Print the view, or the data as JSON, on stdout and return the exit code."""
        if as_json:
            say(json.dumps(to_jsonable_python(self.data, by_alias=False), indent=1))
        elif isinstance(self.view, str):
            say(self.view)
        else:
            from twinrun.report.terminal import show

            show(self.view)
        return self.code


def listed(rows: Sequence[Any], *columns: str, none: str, code: int = 0) -> Shown:
    """Return rows as a table of these columns, or `none` where there is no row."""
    from twinrun.report.plan import plain_table

    data = to_jsonable_python(rows, by_alias=False)
    table = plain_table(columns, [[str(row[name]) for name in columns] for row in data])
    return Shown(table if rows else none, data, code)


def written(file: Path) -> Shown:
    """Return what a command shows that has written a file or a folder."""
    return Shown(str(file), {"written": file})
