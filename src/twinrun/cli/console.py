"""The end of a command: JSON, messages, and one exit code for whatever ended it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import platform
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic_core import to_jsonable_python
from rich.console import RenderableType

from twinrun import __version__
from twinrun.foundation.errors import InputError, MachineError, RunInterruptedError, TwinrunError
from twinrun.foundation.redaction import HiddenNames
from twinrun.foundation.terminal import say
from twinrun.foundation.text import duration

# What commands have in common: a place to write, how much runs, and the plan alone.
Out = Annotated[Path | None, Parameter(alias="-o")]
Scale = Literal["smoke", "node", "paper"] | None
Count = Annotated[int | None, Parameter(validator=Number(gte=1))]
Dry = Annotated[bool, Parameter(alias="-n")]
# Without a question.
LONG_SECONDS = 900.0
# Shells tell a program that a signal ended by 128 and the number of the signal.
_BY_SIGNAL = 128
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _stop(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def exit_code_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; an error becomes a message on stderr."""
    for number in _STOPS:
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
        return "", _BY_SIGNAL + (*error.args, signal.SIGINT)[0]
    if isinstance(error, BrokenPipeError):
        # The program that read our output has ended.
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


def _is_refusal(error: OSError) -> bool:
    """Say whether the system refused; to open a file that is not there is a fault of ours."""
    if error.errno != errno.ENOENT or not error.filename:
        return error.errno not in (None, errno.ENOENT)
    # /proc and its like hold no files but their own; they answer as if the folder were missing.
    folder = next(one for one in Path(error.filename).absolute().parents if one.is_dir())
    return os.statvfs(folder).f_blocks == 0


def _fault(error: BaseException) -> TwinrunError:
    """Write the traceback to a file of its own and return what to say of it."""
    head = f"twinrun {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
    hide = HiddenNames()
    text = hide.text("".join((head, f"{shlex.join(sys.argv)}\n", *traceback.format_exception(error))))
    found = hide.text(f"{type(error).__name__}: {error}")
    kept = f"the traceback, which no temporary folder takes:\n{text}"
    with contextlib.suppress(OSError):
        log = Path(tempfile.mkstemp(prefix="twinrun-fault-", suffix=".log")[1])
        log.write_text(text, encoding="utf-8", errors="backslashreplace")
        kept = f"the traceback is in {log}"
    hint = f"report it as CONTRIBUTING.md says; {kept}"
    return TwinrunError("a fault of twinrun itself", found=found, hint=hint)


def demand_with(name: str, given: object, **options: object) -> None:
    """Refuse what was typed for `options`, where the option that they belong to is not given."""
    if not given and (found := _typed(options)):
        raise InputError(f"only with {name}", place=found, found=f"no {name}", hint=f"add {name}")


def demand_without(name: str, given: object, **options: object) -> None:
    """Refuse what was typed for `options` beside an option that does something else, by their names."""
    if given and (found := _typed(options)):
        allowed = f"--{name}, or {found}, alone"
        raise InputError("options exclude each other", place=f"--{name}", found=found, allowed=allowed)


def demand_one(**options: object) -> None:
    """Refuse more than one of these options, by their names."""
    for name, value in options.items():
        demand_without(name, value, **{other: options[other] for other in options if other != name})


def _typed(options: dict[str, object]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name, value in options.items() if value)


@contextlib.contextmanager
def resumable(place: str) -> Iterator[None]:
    """Say of a stop that the same command goes on."""
    try:
        yield
    except KeyboardInterrupt:
        hint = "the same command goes on from here"
        raise RunInterruptedError("stopped; what is finished is kept", place=place, hint=hint) from None


def agreed(text: str, *, place: str) -> None:
    """Ask whether what takes long is to start.

    Raises:
        InputError: there is no terminal to ask on.
        RunInterruptedError: the answer is no.
    """
    if not sys.stdin.isatty():
        message = "what takes so long is started only after a question, and there is no terminal to ask on"
        allowed = f"up to {duration(LONG_SECONDS)} without a question"
        raise InputError(message, place=place, found=text, allowed=allowed, hint="--yes starts it")
    tell(f"this takes {text}; start it? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise RunInterruptedError("not started", hint="--yes starts it without a question")


def tell(line: object) -> None:
    """Print a line on stderr, where what is no data goes."""
    say(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Shown:
    """What a command has found: a view for people, the same as data, and the exit code."""

    view: RenderableType
    data: Any
    """What JSON has, or a pydantic model, or both in each other."""
    code: int = 0
    columns: int = 160
    """The most that a view takes, where its reader is a program."""

    def show(self, *, as_json: bool) -> int:
        """Print the view, or the data as JSON, on stdout and return the exit code."""
        if as_json:
            sys.stdout.write(f"{json.dumps(to_jsonable_python(self.data, by_alias=False), indent=1)}\n")
        elif isinstance(self.view, str):
            say(self.view)
        else:
            from twinrun.report.terminal import show

            show(self.view, most=self.columns)
        return self.code


def written(file: Path) -> Shown:
    """Return what a command shows that has written a file or a folder."""
    return Shown(str(file), {"written": file})
