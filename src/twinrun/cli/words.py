"""How a command line is read: words of each type, completion, and what is said of a wrong line."""

from __future__ import annotations

import ast
import math
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, get_args

import cyclopts
from cyclopts import App
from cyclopts.argument import Argument, ArgumentCollection
from cyclopts.exceptions import (
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
)

from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError, closest, elsewhere

_DIGITS = 9


def count(text: str, place: str) -> int:
    """Return the whole number in `text`; raises InputError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        allowed = f"a whole number of at most {_DIGITS} digits, such as 3"
        raise InputError("not a whole number", place=place, found=text, allowed=allowed)
    return int(text)


def amount(text: str, place: str) -> float:
    """Return the finite number in `text`; raises InputError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError("not a number", place=place, found=text, allowed="a finite number, such as 2.5e9")
    return value


def read(kind: Any, tokens: Sequence[Any]) -> Any:
    """Return the value of an argument, for cyclopts; several numbers may stand between commas."""
    place, texts = tokens[0].keyword or "", [token.value for token in tokens]
    if tokens[0].keyword and not all(texts):
        raise InputError("this option needs a value", place=place, found="nothing")
    numbers: dict[object, Callable[[str, str], float]] = {int: count, float: amount}
    if kind in numbers:
        return numbers[kind](texts[0], place)
    if (inner := get_args(kind)[:1]) and inner[0] in numbers:
        return tuple(numbers[inner[0]](one, place) for text in texts for one in text.split(","))
    return cyclopts.convert(kind, tokens)


def _folders(place: str) -> list[str]:
    return [one.name for one in (project_root() / place).iterdir() if one.is_dir()]


def _module(name: str) -> Any:
    """Return a module of execution, which only completion imports."""
    return import_module(f"twinrun.execution.{name}")


def _sites() -> list[str]:
    from twinrun.manifests.cluster import site_files

    texts = (one.read_text("utf-8") for one in site_files(project_root()) if one.is_file())
    return [name for text in texts for name in tomllib.loads(text)["site"]]


def _cards() -> list[str]:
    text = (project_root() / "images" / "gpus.toml").read_text("utf-8")
    return [row["id"] for row in tomllib.loads(text)["gpu"]]


_KNOWN: dict[str, Callable[[], list[str]]] = {
    "RECIPE": partial(_folders, "recipes"),
    "SUBJECT": partial(_folders, "recipes"),
    "--recipe": partial(_folders, "recipes"),
    "--stack": partial(_folders, "images/stacks"),
    "--vendor": partial(_folders, "images/vendors"),
    "--gpu": _cards,
    "--engine": lambda: [*_module("engines").ENGINES],
    "--launcher": lambda: [*_module("launchers").LAUNCHERS],
    "--scheduler": lambda: [one.name for one in iter_modules(_module("schedulers").__path__)],
    "--cluster": _sites,
    "SITE": _sites,
}


def completed(context: Any) -> list[str]:
    """Return what a shell may complete a word to: recipes, stacks, cards, sites, and parts of execution."""
    return sorted(_KNOWN.get(context.argument.name, list)())


def first_line(module: str, function: str) -> str:
    """Return what a command does, without importing what it needs."""
    source = (Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8")
    found = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)}
    return (ast.get_docstring(found[function]) or "").partition("\n")[0]


def arguments(app: App, command: str) -> ArgumentCollection:
    """Return what a command takes, each with its names and its text of help."""
    with app.app_stack([command]):
        return app[command].assemble_argument_collection(parse_docstring=True)


def usage(app: App, command: str) -> str:
    """Return how a command is written."""
    words = [one.name for one in arguments(app, command) if one.is_positional_only()]
    return " ".join(["twinrun", command, *words])


def explained(app: App, error: CycloptsError, words: Sequence[str]) -> InputError:
    """Return what could not be read of a command line, in the form of every other refusal."""
    if isinstance(error, UnknownCommandError):
        known = [name for name in app if not name.startswith("-")]
        near = closest(words[0], known) or "`twinrun --help` says what each does"
        return InputError("unknown command", place="twinrun", found=words[0], allowed=known, hint=near)
    command = (error.command_chain or words)[0]
    place, see = f"twinrun {command}", f"`twinrun {command} --help` lists what it takes"
    found: str | None
    allowed: str | None
    hint: str | None
    match error:
        case UnknownOptionError(token=token):
            options = (one for one in arguments(app, command) if not one.is_positional_only())
            known, found = sorted(name for one in options for name in one.names), token.keyword or token.value
            hint = _option(found, known) or see
            refusal = InputError("no such option", place=place, found=found, allowed=known, hint=hint)
        case RepeatArgumentError(token=token):
            refusal = InputError("given twice", place=token.keyword, hint="leave one of the two out")
        case MissingArgumentError(argument=Argument(name=name) as one):
            helps = {other.name: other.parameter.help for other in arguments(app, command)}
            allowed = usage(app, command) if one.is_positional_only() else helps[name]
            message = "this option needs a value" if error.keyword else f"{name} is missing"
            where, nothing = error.keyword or place, "nothing" if error.keyword else None
            refusal = InputError(message, place=where, found=nothing, allowed=allowed, hint=see)
        case CoercionError(argument=Argument(name=name) as one, token=token) if token:
            choices, what = list(one.get_choices() or ()), name.lstrip("-").lower()
            hint, word = closest(token.value, choices), token.value
            refusal = InputError(f"unknown {what}", place=name, found=word, allowed=choices, hint=hint)
        case CycloptsError(unused_tokens=[word, *_]):
            refusal = InputError("one word too many", place=usage(app, command), found=word, hint=see)
        case _:
            refusal = InputError(str(error), place=place, hint=see)
    return refusal


def _option(found: str, known: Sequence[str]) -> str | None:
    """Return the option that was meant; what other programs have as an option may be a field of `--set`."""
    hint, field = closest(found, known), elsewhere(found.lstrip("-").replace("-", "_"))
    return f"it is set by `--set {field}=...`" if field and "--set" in known and not hint else hint
