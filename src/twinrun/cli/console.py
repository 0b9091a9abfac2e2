"""Both ends of a command: options that Invoke does not check, and JSON, messages and exit codes."""

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
from collections.abc import Iterator

from invoke.exceptions import Exit

from twinrun import __version__
from twinrun.foundation.errors import InputError, MachineError, RunInterruptedError, TwinrunError
from twinrun.foundation.text import redacted

# What a system refuses to any program: a full or closed disk, too many files, a reader that went away.
_REFUSALS = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.EPIPE),
}


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn every error and Ctrl-C into a message and an exit code, without a traceback."""
    # A scheduler ends a job with SIGTERM, a closed terminal with SIGHUP: the same orderly stop as Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup the signal is ignored, and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    # What an encoding lacks becomes a question mark, which keeps the columns of a table.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        error: TwinrunError = RunInterruptedError("stopped")
    except TwinrunError as ours:
        error = ours
    except OSError as refused:
        error = _refusal(refused) if refused.errno in _REFUSALS else _fault(refused)
    except Exception as unforeseen:
        error = _fault(unforeseen)
    else:
        return
    # The interpreter's end takes handlers away: a second Ctrl-C would change the exit code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Where stderr is full or closed too, the exit code is all there is.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{error}\n")
    raise Exit(code=error.exit_code)


def _refusal(error: OSError) -> MachineError:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # The interpreter flushes again when it ends; where that fails it changes the exit code.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return MachineError(
        f"refused by the system: {error.strerror}",
        # A file that is open, as standard output is, has no name in the error.
        place=error.filename or "standard output, or another open file",
        hint="free some space or choose another place, TWINRUN_CACHE for the cache and --out for a run;"
        " what was being written is lost, what was whole before is kept",
    )


def _fault(error: Exception) -> TwinrunError:
    """Write the traceback to a file of its own and return what to say of it."""
    lines = (
        f"twinrun {__version__}, Python {platform.python_version()}, {platform.platform()}\n",
        f"{shlex.join(sys.argv)}\n",
        *traceback.format_exception(error),
    )
    text = redacted("".join(lines))
    try:
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",
            prefix="twinrun-fault-",
            suffix=".log",
            delete=False,
        ) as log:
            log.write(text)
        kept = f"the traceback is in {log.name}"
    except OSError:
        kept = f"the traceback, which no temporary folder takes:\n{text}"
    found = redacted(f"{type(error).__name__}: {error}")
    return TwinrunError(
        "a fault of twinrun itself", found=found, hint=f"report it as CONTRIBUTING.md says; {kept}"
    )


def demand_with(name: str, given: bool, **options: object) -> None:
    """Refuse what was typed for `options`, where the option that they belong to is not given."""
    typed = [option for option, value in options.items() if value]
    if typed and not given:
        found = ", ".join(f"--{option}" for option in typed)
        raise InputError(f"only with {name}", place=found, found=f"no {name}", hint=f"add {name}")


def demand_without(name: str, given: bool, **options: object) -> None:
    """Refuse what was typed for `options`, by their names, beside an option that does something else."""
    if given and (typed := [option for option, value in options.items() if value]):
        found = ", ".join(f"--{option}" for option in typed)
        raise InputError(
            "two questions at once", place=name, found=found, allowed=f"{name}, or {found}, alone"
        )


def count(text: str, option: str) -> int | None:
    """Return the whole number that was typed for `option`, None for nothing; raises InputError."""
    if not text:
        return None
    if not text.isdecimal():
        raise InputError("not a whole number", place=option, found=text, allowed="digits alone, such as 3")
    return int(text)


def print_json(content: object) -> None:
    """Print `content` as JSON on stdout."""
    sys.stdout.write(f"{json.dumps(content, indent=1)}\n")
