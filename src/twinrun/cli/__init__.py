"""The commands, from their arguments to their output and exit code."""

import signal

# Until a command begins Ctrl-C ends it in silence; what is imported before is most of that time.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
