"""The program `twinrun`: its commands, how their words are read, and what is said of a wrong line."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import cyclopts
from cyclopts import App, CycloptsError, Parameter, exceptions
from cyclopts.argument import Argument
from cyclopts.token import Token
from cyclopts.validators import Number

from twinrun import __version__
from twinrun.cli.console import Shown, exit_code_of
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError, closest, elsewhere
from twinrun.foundation.terminal import VisibleConsole
from twinrun.foundation.text import duration

# What commands have in common: words, paths, counts, shares, where to write, how much runs, the plan alone.
Word = str | None
Paths = tuple[Path, ...]
Count = Annotated[int | None, Parameter(validator=Number(gte=1))]
Share = Annotated[float | None, Parameter(validator=Number(lt=1))]
Out = Annotated[Path | None, Parameter(alias="-o")]
Scale = Literal["smoke", "node", "paper"] | None
Dry = Annotated[bool, Parameter(alias="-n")]
# What may start without --yes.
LONG_SECONDS = 900.0
JSON, LACKING = "--json", "this option needs a value"
# A module and its commands; it is imported when one of them is asked for.
_MODULES = {
    "run": ("run", "recipes", "data"),
    "records": ("report", "compare", "checkpoint", "sign"),
    "curves": ("parity", "history", "bisect"),
    "predict": ("predict",),
    "sites": ("build", "lock", "doctor", "cluster", "site", "jobs"),
}
COMMANDS = {name: module for module, names in _MODULES.items() for name in names}
_NUMBERS = {
    int: ("[0-9]{1,9}", "not a whole number", "a whole number of at most 9 digits, such as 3"),
    float: (r"[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?", "not a number", "a finite number above 0, such as 2.5e9"),
}


def _number(kind: type[int] | type[float], text: str, place: str) -> float:
    """Return a whole or a finite number; raises InputError."""
    form, message, allowed = _NUMBERS[kind]
    value = float(text) if re.fullmatch(form, text, re.IGNORECASE) else math.inf
    if math.isinf(value) or (kind is float and not value):
        raise InputError(message, place=place, found=text, allowed=allowed)
    return kind(value)


def read(kind: Any, tokens: Sequence[Any]) -> Any:
    """Return the value of an argument, for cyclopts; several numbers may stand between commas."""
    place, texts = tokens[0].keyword or "", [token.value for token in tokens]
    if place and not all(texts):
        raise InputError(LACKING, place=place, found="nothing")
    # Of a field that may be left out the kind is `int | None`.
    many, number = get_origin(kind) is tuple, next(iter(get_args(kind)), kind)
    if number in _NUMBERS:
        parts = [one for text in texts for one in (text.split(",") if many else [text])]
        found = [_number(number, one, place) for one in parts]
        return tuple(found) if many else found[0]
    return cyclopts.convert(kind, tokens)


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


def unasked(text: str, *, place: str) -> InputError:
    """Return what stands against a start of what takes long, without --yes."""
    allowed = f"up to {duration(LONG_SECONDS)} without --yes"
    return InputError("this starts only with --yes", place=place, found=text, allowed=allowed)


# What a shell may complete by the folders of the project.
_FOLDERS = dict.fromkeys(("RECIPE", "SUBJECT", "--recipe"), "recipes")
_FOLDERS |= {"--stack": "images/stacks", "--vendor": "images/vendors"}


def completed(context: Any) -> list[str]:
    """Return what a shell may complete a word to: recipes, stacks, vendors and cards."""
    root, name = project_root(), context.argument.name
    if name == "--gpu":
        return re.findall('^id = "(.*)"', (root / "images" / "gpus.toml").read_text("utf-8"), re.MULTILINE)
    return sorted(one.name for one in (root / _FOLDERS.get(name, "none")).glob("*/"))


def _first_line(name: str) -> str:
    """Return what a command does, without importing what it needs."""
    source = (Path(__file__).parent / f"{COMMANDS[name]}.py").read_text(encoding="utf-8")
    function = source[source.index(f"\ndef {name}(") :]
    return function.split('"""')[1].partition("\n")[0]


app = App(
    name="twinrun",
    help="Run published LLM-training experiments again and say whether their claims hold.",
    help_epilogue=f"{JSON} prints JSON on stdout, and nothing else there.",
    version=__version__,
    help_format="plaintext",
    parse_mode="strict",
    suppress_keyboard_interrupt=False,
    console=VisibleConsole(),
    default_parameter=Parameter(negative=(), show_default=False, converter=read, completer=completed),
)
for _name, _module in COMMANDS.items():
    app.command(f"twinrun.cli.{_module}:{_name}", name=_name, help=_first_line(_name))
app.register_install_completion_command(help="Let a shell complete commands, recipes, cards and stacks.")


def main(words: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    return exit_code_of(lambda: _run(words))


def start() -> None:
    """Run the command line of this process, and end with its exit code."""
    sys.exit(main(sys.argv[1:]))


def _run(words: Sequence[str]) -> int:
    Path.cwd()
    own = [word for word in words if word != JSON]
    try:
        found = app(own, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise _explained(error, own) from None
    return found.show(as_json=JSON in words) if isinstance(found, Shown) else 0


def arguments(command: str) -> list[Argument]:
    """Return what a command takes, each with its names and its text of help."""
    with app.app_stack([command]):
        found = app[command].assemble_argument_collection(parse_docstring=True)
    return [one for one in found if one.parse and not one.children]


def usage(command: str) -> str:
    """Return how a command is written."""
    words = [one.name for one in arguments(command) if one.is_positional_only()]
    return " ".join(["twinrun", command, *words])


def _explained(error: CycloptsError, words: Sequence[str]) -> InputError:
    """Return what could not be read of a command line, in the form of every other refusal."""
    command = (error.command_chain or words)[0]
    see = f"`twinrun {command} --help` lists what it takes"
    refused = partial(InputError, place=f"twinrun {command}", hint=see)
    said = refused(str(error))
    match error:
        case exceptions.UnknownCommandError():
            known = [name for name in app if not name.startswith("-")]
            near = closest(command, known) or "`twinrun --help` says what each does"
            said = InputError("unknown command", place="twinrun", found=command, allowed=known, hint=near)
        case exceptions.UnknownOptionError(token=token):
            options = (one for one in arguments(command) if not one.is_positional_only())
            known, found = sorted(name for one in options for name in one.names), token.keyword or token.value
            said = refused("no such option", found=found, allowed=known, hint=_meant(found, known) or see)
        case exceptions.RepeatArgumentError(token=token):
            said = InputError("given twice", place=token.keyword, hint="leave one of the two out")
        case exceptions.MissingArgumentError(argument=Argument(name=name) as one, keyword=keyword):
            helped = next(other.parameter.help for other in arguments(command) if other.name == name)
            allowed = usage(command) if one.is_positional_only() else helped
            said = refused(f"{name} is missing", allowed=allowed)
            if keyword:
                said = refused(LACKING, place=keyword, found="nothing", allowed=helped)
        case exceptions.CoercionError(argument=Argument(name=name) as one, token=Token(value=found)):
            known, what = list(one.get_choices() or ()), name.lstrip("-").lower()
            hint = closest(found, known)
            said = InputError(f"unknown {what}", place=name, found=found, allowed=known, hint=hint)
        case CycloptsError(unused_tokens=[word, *_]):
            said = refused("one word too many", place=usage(command), found=word)
    return said


def _meant(found: str, known: Sequence[str]) -> str | None:
    """Return the option that was meant; what other programs have as an option may be a field of `--set`."""
    hint, field = closest(found, known), elsewhere(found.lstrip("-").replace("-", "_"))
    return f"it is set by `--set {field}=...`" if field and "--set" in known and not hint else hint
