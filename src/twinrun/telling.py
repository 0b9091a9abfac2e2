"""What a command tells of an error or a stop: a message and an exit code, no traceback."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

from invoke.exceptions import Exit

from twinrun.errors import Interrupted, TwinrunError


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turn our errors and Ctrl-C into a message and an exit code, without a traceback."""
    # A scheduler ends a job with SIGTERM, a closed terminal with SIGHUP: the same orderly stop as Ctrl-C.
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup the signal is ignored, and stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    except TwinrunError as error:
        sys.stderr.write(f"{error}\n")
        raise Exit(code=error.exit_code) from None
    except KeyboardInterrupt:
        sys.stderr.write("error: stopped\n")
        raise Exit(code=Interrupted.exit_code) from None
