"""The program `twinrun`: its commands, each a typed function that is imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError

from twinrun import __version__
from twinrun.cli.console import Shown, exit_code_of
from twinrun.cli.words import completed, explained, first_line, read
from twinrun.foundation.errors import InputError
from twinrun.foundation.terminal import VisibleConsole

JSON = "--json"
COMMANDS = {
    "run": "run:run",
    "build": "stacks:build",
    "predict": "predict:predict",
    "compare": "compare:compare",
    "parity": "parity:parity",
    "history": "history:history",
    "bisect": "history:bisect",
    "report": "report:report",
    "doctor": "sites:doctor",
    "lock": "stacks:lock",
    "data": "run:data",
    "recipes": "recipes:recipes",
    "checkpoint": "checkpoint:checkpoint",
    "sign": "checkpoint:sign",
    "cluster": "sites:cluster",
    "site": "sites:site",
    "jobs": "sites:jobs",
}

app = App(
    name="twinrun",
    help="Run published LLM-training experiments again and say whether their claims hold.",
    help_epilogue=f"{JSON} prints JSON on stdout, and nothing else there.",
    version=__version__,
    help_format="plaintext",
    parse_mode="strict",
    suppress_keyboard_interrupt=False,
    console=VisibleConsole(),
    default_parameter=Parameter(
        negative=(), allow_repeating=False, show_default=False, converter=read, completer=completed
    ),
)
for _name, _place in COMMANDS.items():
    app.command(f"twinrun.cli.{_place}", name=_name, help=first_line(*_place.split(":")))
app.register_install_completion_command(help="Let a shell complete commands, recipes, cards and stacks.")


def main(words: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    return exit_code_of(lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    try:
        Path.cwd()
    except OSError as error:
        hint = "change to the folder of the project"
        raise InputError("no folder to work in", place="twinrun", found=error.strerror, hint=hint) from None
    own = [word for word in words if word != JSON]
    try:
        found = app(own, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise explained(app, error, own) from None
    return found.show(as_json=JSON in words) if isinstance(found, Shown) else 0


def start() -> None:
    """Run the command line of this process, and end with its exit code."""
    sys.exit(main(sys.argv[1:]))
