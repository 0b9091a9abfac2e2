"""The end of a command: JSON, messages, and one exit code for whatever ended it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import platform
import select
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import RenderableType

from twinrun import __version__
from twinrun.foundation.errors import InputError, MachineError, RunInterruptedError, TwinrunError
from twinrun.foundation.redaction import HiddenNames
from twinrun.foundation.terminal import say

# Without a question.
LONG_SECONDS = 900.0
# Shells tell a program that a signal ended by 128 and the number of the signal.
_BY_SIGNAL = 128
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal(KeyboardInterrupt):
    """A signal that ends a command, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def _stop(number: int, _: FrameType | None) -> None:
    raise StopSignal(number)


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; an error becomes a message on stderr."""
    # A scheduler ends a job with SIGTERM, a closed terminal with SIGHUP: the same orderly stop as Ctrl-C.
    before = {number: signal.getsignal(number) for number in _STOPS}
    for number, handler in before.items():
        # Under nohup the signal is ignored, and stays so.
        if handler is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        _check_streams()
        try:
            code = command() or 0
        finally:
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        message, code = _end_of(error)
        # The interpreter's end takes handlers away: a second Ctrl-C would change the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Where stderr is full or closed too, the exit code is all there is.
        with contextlib.suppress(OSError):
            sys.stderr.write(message)
        _discard_output()
        return code
    for number, handler in before.items():
        signal.signal(number, handler)
    return code


def _check_streams() -> None:
    """Make streams take every text; raises MachineError where standard output is closed."""
    if sys.stderr is None:
        # Keep descriptor 2 occupied, so that no later file opens as stderr.
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        raise MachineError("standard output is closed", hint="send it to a file, or to /dev/null")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    # A sign that the encoding lacks becomes one that it has, which keeps the columns of a table.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _end_of(error: BaseException) -> tuple[str, int]:
    """Return what to say of the error that ended a command, which may be nothing, and its exit code."""
    if isinstance(error, KeyboardInterrupt):
        # Resumable runs raise RunInterruptedError instead.
        return "", _BY_SIGNAL + (error.number if isinstance(error, StopSignal) else signal.SIGINT)
    if isinstance(error, OSError) and error.errno == errno.EPIPE and _reader_is_gone():
        return "", _BY_SIGNAL + signal.SIGPIPE
    if isinstance(error, OSError) and _is_refusal(error):
        error = MachineError(
            f"refused by the system: {error.strerror}",
            # A file that is open, as standard output is, has no name in the error.
            place=error.filename or "standard output, or another open file",
            hint="free some space or choose another place, TWINRUN_CACHE for the cache and --out for a run;"
            " what was being written is lost, what was whole before is kept",
        )
    if not isinstance(error, TwinrunError):
        error = _fault(error)
    return f"{error}\n", error.exit_code


def _reader_is_gone() -> bool:
    """Say whether the program that read our output, or our messages, has ended."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        poll.register(stream.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _discard_output() -> None:
    """Drop what standard output did not take: the interpreter tries again, and changes the exit code."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_refusal(error: OSError) -> bool:
    """Say whether the system refused; to open a file that is not there is a fault of ours."""
    if error.errno != errno.ENOENT or not error.filename:
        return error.errno not in (None, errno.ENOENT)
    # /proc and its like hold no files but their own; they answer as if the folder were missing.
    folder = next((one for one in Path(error.filename).absolute().parents if one.is_dir()), Path("/"))
    return os.statvfs(folder).f_blocks == 0


def _fault(error: BaseException) -> TwinrunError:
    """Write the traceback to a file of its own and return what to say of it."""
    head = f"twinrun {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    hide = HiddenNames()
    text = hide.text("".join((head, f"{shlex.join(sys.argv)}\n", *traceback.format_exception(error))))
    found = hide.text(f"{type(error).__name__}: {error}")
    try:
        descriptor, name = tempfile.mkstemp(prefix="twinrun-fault-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as log:
            log.write(text)
        kept = f"the traceback is in {name}"
    except OSError:
        kept = f"the traceback, which no temporary folder takes:\n{text}"
    return TwinrunError(
        "a fault of twinrun itself", found=found, hint=f"report it as CONTRIBUTING.md says; {kept}"
    )


def demand_with(name: str, given: bool, **options: object) -> None:
    """Refuse what was typed for `options`, where the option that they belong to is not given."""
    if not given and (found := _typed(options)):
        raise InputError(f"only with {name}", place=found, found=f"no {name}", hint=f"add {name}")


def demand_without(name: str, given: bool, **options: object) -> None:
    """Refuse what was typed for `options`, by their names, beside an option that does something else."""
    if given and (found := _typed(options)):
        allowed = f"{name}, or {found}, alone"
        raise InputError("options exclude each other", place=name, found=found, allowed=allowed)


def _typed(options: dict[str, object]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name, value in options.items() if value)


def agreed(text: str, *, place: str, allowed: str | None = None, hint: str) -> None:
    """Ask whether what takes long is to start.

    Raises:
        InputError: there is no terminal to ask on.
        RunInterruptedError: the answer is no.
    """
    if not sys.stdin.isatty():
        message = "what takes so long is started only after a question, and there is no terminal to ask on"
        raise InputError(message, place=place, found=text, allowed=allowed, hint=hint)
    sys.stderr.write(f"this takes {text}; start it? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RunInterruptedError("not started", hint="--yes starts it without a question")


def tell(line: object) -> None:
    """Print a line on stderr, where what is no data goes."""
    say(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a command has found: a view for people, the same as data, and the exit code."""

    view: Callable[[], RenderableType]
    data: Callable[[], object]
    code: int = 0
    columns: int = 160
    """The most that a view takes, where its reader is a program."""

    def show(self, *, as_json: bool) -> int:
        """Print the view, or the data as JSON, on stdout and return the exit code."""
        if as_json:
            sys.stdout.write(f"{json.dumps(self.data(), indent=1)}\n")
            return self.code
        view = self.view()
        if isinstance(view, str):
            say(view)
        else:
            from twinrun.report.terminal import show

            show(view, most=self.columns)
        return self.code
