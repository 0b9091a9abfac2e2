"""The commands of `twinrun` as tasks of Invoke: `invoke --list` shows them, `invoke run --help` one."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, get_origin

from invoke.collection import Collection
from invoke.context import Context
from invoke.exceptions import Exit
from invoke.tasks import Task

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from twinrun.cli.program import COMMANDS, app, arguments, main


def invoked(command: str) -> Task[Any]:
    """Return the task that writes the words of a command, for `twinrun` to read."""
    known = {one.field_info.name: one for one in arguments(command)}
    words = [name for name, one in known.items() if one.is_positional_only()]
    flags = {"json", *(name for name, one in known.items() if one.is_flag())}
    names = {"json": "--json"} | {name: one.name for name, one in known.items()}

    def body(_context: Context, **given: Any) -> None:
        line = [command, *(given.pop(name) for name in words if given[name])]
        for name, value in given.items():
            if name in flags:
                line += [names[name]] * bool(value)
            elif name not in words:
                values = value if isinstance(value, list) else [] if value is None else [value]
                line += [f"{names[name]}={one}" for one in values]
        raise Exit(code=main(line))

    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    taken = [inspect.Parameter("_context", inspect.Parameter.POSITIONAL_ONLY)]
    for name in names:
        default = empty if name in words else False if name in flags else None
        taken.append(inspect.Parameter(name, kind, default=default))
    body.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    body.__doc__ = app[command].help.partition("Args:")[0]
    return Task(
        body,
        name=command,
        positional=words,
        iterable=[name for name, one in known.items() if get_origin(one.hint) is tuple],
        help={name: one.parameter.help or "" for name, one in known.items()} | {"json": "print JSON"},
        auto_shortflags=False,
    )


# Modules of commands are slow to import: only what the line names is.
ns = Collection(*map(invoked, [name for name in COMMANDS if name in sys.argv] or COMMANDS))
