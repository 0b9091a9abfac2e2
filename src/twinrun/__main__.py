"""`python -m twinrun` is `twinrun`."""

from twinrun.cli.program import start

start()
