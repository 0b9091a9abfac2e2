"""The program `twinrun`: its commands, how their words are read, and what is said of a wrong line."""

from __future__ import annotations

import ast
import importlib
import math
import pkgutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import cyclopts
from cyclopts import App, Parameter
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
)

from twinrun import __version__
from twinrun.cli.console import Shown, exit_code_of
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError, closest, elsewhere
from twinrun.foundation.terminal import VisibleConsole

JSON = "--json"
# The module of each command, which is imported when the command is asked for.
COMMANDS = {
    "run": "run",
    "build": "stacks",
    "predict": "predict",
    "compare": "records",
    "parity": "curves",
    "history": "curves",
    "bisect": "curves",
    "report": "records",
    "doctor": "sites",
    "lock": "stacks",
    "data": "run",
    "recipes": "run",
    "checkpoint": "checkpoint",
    "sign": "checkpoint",
    "cluster": "sites",
    "site": "sites",
    "jobs": "sites",
}
_DIGITS = 9
_NUMBERS = {
    int: ("not a whole number", f"a whole number of at most {_DIGITS} digits, such as 3"),
    float: ("not a number", "a finite number, such as 2.5e9"),
}


def _number(kind: type[int] | type[float], text: str, place: str) -> float:
    """Return a whole or a finite number; raises InputError."""
    try:
        value = kind(text) if kind is float or (text.isascii() and text.isdecimal()) else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (kind is int and len(text) > _DIGITS):
        message, allowed = _NUMBERS[kind]
        raise InputError(message, place=place, found=text, allowed=allowed)
    return value


def read(kind: Any, tokens: Sequence[Any]) -> Any:
    """Return the value of an argument, for cyclopts; several numbers may stand between commas."""
    place, texts = tokens[0].keyword or "", [token.value for token in tokens]
    if tokens[0].keyword and not all(texts):
        raise InputError("this option needs a value", place=place, found="nothing")
    if kind in _NUMBERS:
        return _number(kind, texts[0], place)
    if (inner := get_args(kind)[:1]) and inner[0] in _NUMBERS:
        return tuple(_number(inner[0], one, place) for text in texts for one in text.split(","))
    return cyclopts.convert(kind, tokens)


# What a shell may complete: folders of the project, tables of manifests, parts of execution.
_FOLDERS = dict.fromkeys(("RECIPE", "SUBJECT", "--recipe"), "recipes")
_FOLDERS |= {"--stack": "images/stacks", "--vendor": "images/vendors"}
_PARTS = ("--engine", "--launcher", "--scheduler")


def completed(context: Any) -> list[str]:
    """Return what a shell may complete a word to: recipes, stacks, cards, sites, and parts of execution."""
    root, name = project_root(), context.argument.name
    if name in _FOLDERS:
        return sorted(one.name for one in (root / _FOLDERS[name]).iterdir() if one.is_dir())
    if name in _PARTS:
        part = importlib.import_module(f"twinrun.execution{name.replace('--', '.')}s")
        known = getattr(part, f"{name[2:].upper()}S", None)
        return sorted(known or (one.name for one in pkgutil.iter_modules(part.__path__)))
    if name == "--gpu":
        rows = tomllib.loads((root / "images" / "gpus.toml").read_text("utf-8"))["gpu"]
        return sorted(row["id"] for row in rows)
    if name in ("--cluster", "SITE"):
        from twinrun.manifests.cluster import site_files

        texts = [one.read_text("utf-8") for one in site_files(root) if one.is_file()]
        return sorted(name for text in texts for name in tomllib.loads(text)["site"])
    return []


def _first_line(module: str, function: str) -> str:
    """Return what a command does, without importing what it needs."""
    source = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    found = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)}
    return (ast.get_docstring(found[function]) or "").partition("\n")[0]


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
for _name, _module in COMMANDS.items():
    app.command(f"twinrun.cli.{_module}:{_name}", name=_name, help=_first_line(_module, _name))
app.register_install_completion_command(help="Let a shell complete commands, recipes, cards and stacks.")


def main(words: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    return exit_code_of(lambda: _run(words))


def start() -> None:
    """Run the command line of this process, and end with its exit code."""
    sys.exit(main(sys.argv[1:]))


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
        raise _explained(error, own) from None
    return found.show(as_json=JSON in words) if isinstance(found, Shown) else 0


def arguments(command: str) -> ArgumentCollection:
    """Return what a command takes, each with its names and its text of help."""
    with app.app_stack([command]):
        return app[command].assemble_argument_collection(parse_docstring=True)


def usage(command: str) -> str:
    """Return how a command is written."""
    words = [one.name for one in arguments(command) if one.is_positional_only()]
    return " ".join(["twinrun", command, *words])


def _explained(error: CycloptsError, words: Sequence[str]) -> InputError:
    """Return what could not be read of a command line, in the form of every other refusal."""
    if isinstance(error, UnknownCommandError):
        known = [name for name in app if not name.startswith("-")]
        near = closest(words[0], known) or "`twinrun --help` says what each does"
        return InputError("unknown command", place="twinrun", found=words[0], allowed=known, hint=near)
    command = (error.command_chain or words)[0]
    place, see = f"twinrun {command}", f"`twinrun {command} --help` lists what it takes"
    said: dict[str, Any] = {"message": str(error)}
    match error:
        case UnknownOptionError(token=token):
            options = (one for one in arguments(command) if not one.is_positional_only())
            known, found = sorted(name for one in options for name in one.names), token.keyword or token.value
            said = {"message": "no such option", "found": found, "allowed": known}
            see = _option(found, known) or see
        case RepeatArgumentError(token=token):
            said = {"message": "given twice"}
            place, see = str(token.keyword), "leave one of the two out"
        case MissingArgumentError(argument=Argument(name=name) as one):
            helped = next(other.parameter.help for other in arguments(command) if other.name == name)
            allowed = usage(command) if one.is_positional_only() else helped
            said = {"message": f"{name} is missing", "allowed": allowed}
            if error.keyword:
                place, said = (
                    error.keyword,
                    said | {"message": "this option needs a value", "found": "nothing"},
                )
        case CoercionError(argument=Argument(name=name) as one, token=token) if token:
            choices, place = list(one.get_choices() or ()), name
            said = {
                "message": f"unknown {name.lstrip('-').lower()}",
                "found": token.value,
                "allowed": choices,
            }
            see = closest(token.value, choices) or ""
        case CycloptsError(unused_tokens=[word, *_]):
            said, place = {"message": "one word too many", "found": word}, usage(command)
    return InputError(**said, place=place, hint=see)


def _option(found: str, known: Sequence[str]) -> str | None:
    """Return the option that was meant; what other programs have as an option may be a field of `--set`."""
    hint, field = closest(found, known), elsewhere(found.lstrip("-").replace("-", "_"))
    return f"it is set by `--set {field}=...`" if field and "--set" in known and not hint else hint
