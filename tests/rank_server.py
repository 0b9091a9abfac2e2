"""Ranks of a script, each a fork of this process; the arguments are the modules that it imports for them."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forks import serve


def rank(arguments: Sequence[str]) -> None:
    """Run a script, or a module by its name, as the interpreter does."""
    script = arguments[0]
    sys.argv = list(arguments)
    folders = [str(Path(script).parent), *os.environ["PYTHONPATH"].split(os.pathsep)]
    sys.path[:0] = [one for one in folders if one]
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


serve(rank, modules=sys.argv[1:])
