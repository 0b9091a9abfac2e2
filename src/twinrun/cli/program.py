"""The command line: usage errors that end with 2, and help that starts nothing.

Invoke ends with 1 where it cannot read a command line. Here 1 says that a claim does not hold, so its
ParseError becomes an InputError. It takes an unknown option for a word, and an option twice: those are
refused before.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import shutil
from collections.abc import Sequence
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from invoke import main
from invoke.collection import Collection
from invoke.config import Config
from invoke.exceptions import Exit, ParseError
from invoke.parser import Parser
from invoke.parser.argument import Argument
from invoke.parser.context import ParserContext, to_flag
from invoke.program import Program
from invoke.tasks import task

from twinrun import __version__
from twinrun.cli.console import exit_on_error
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, closest, require_known
from twinrun.foundation.files import sha256_of_bytes

# A letter that many programs give the same meaning; every other option has its name alone.
LETTERS = {"--out": "-o", "--dry": "-n"}
HELP = ("-h", "--help")
# Options of Invoke itself that concern shell commands, which no command here runs through Invoke.
IDLE = ("command-timeout", "config", "dry", "echo", "hide", "prompt-for-sudo-password", "pty", "warn-only")
# The word of a command that one of its options implies where it is left out.
IMPLIED = {"report": {"--hardware": "all"}}
# An option that takes all words up to the next option.
MANY = {"parity": "--controls"}
LIST_FORMATS = ("flat", "nested", "json")

command = partial(task, auto_shortflags=False)


def contexts(collection: Collection) -> list[ParserContext]:
    """Return what each command takes, with the letters of its options."""
    found: list[ParserContext] = collection.to_contexts()
    for context in found:
        # Lexicon, which Invoke carries with it, has no types.
        flags: Any = context.flags
        for name in LETTERS.keys() & flags.keys():
            flags.alias(LETTERS[name], to=name)
    return found


def usage(context: ParserContext) -> str:
    """Return how a command is written."""
    words = [str(argument.name).upper() for argument in context.positional_args]
    return " ".join(["invoke", str(context.name), *words])


def options(context: ParserContext) -> list[tuple[str, str]]:
    """Return what may follow a command: its words in their order, then its options, with what each means."""
    rows = []
    for argument in context.args.values():
        flag = to_flag(argument.names[0])
        name = argument.names[0].upper()
        if argument.positional:
            rows.append((0, name, argument.help or ""))
        else:
            letter = f"{LETTERS[flag]}, " if flag in LETTERS else ""
            value = f" {name}" if argument.takes_value else ""
            rows.append((1, f"{letter}{flag}{value}", argument.help or ""))
    return [(spelled, text) for _, spelled, text in sorted(rows, key=lambda row: row[0])]


class InvokeSettings(Config):
    """Invoke's settings, none of which a command here has: their files, which may be broken, are not read."""

    def _unread(self, merge: bool = True) -> None: ...

    load_system = load_user = load_project = load_runtime = _unread


class Commands(Program):
    """Invoke's program, once it has found the commands of this project."""

    known: dict[str, ParserContext]

    def parse_core(self, argv: list[str] | None) -> None:
        """Read the options before the command; raises Exit with 2 where one lacks its value."""
        with exit_on_error():
            try:
                Path.cwd()
            except OSError as error:
                hint = "change to the folder of the project"
                raise InputError(
                    "no folder to work in", place="invoke", found=error.strerror, hint=hint
                ) from None
            try:
                super().parse_core(argv)
            # The second is that of a number which is none.
            except (ParseError, ValueError) as error:
                hint = "`invoke --help` lists the commands; options follow them"
                raise InputError(f"no such line of options: {error}", place="invoke", hint=hint) from None

    def parse_collection(self) -> None:
        """Read tasks.py; help without a command lists the commands, outside a checkout too."""
        if self.args.help.value is True:
            # Invoke would print its help before it has read any command.
            self.print_help()
            raise Exit
        super().parse_collection()

    def load_collection(self) -> None:
        """Read tasks.py; raises Exit with 2 where there is none."""
        with exit_on_error():
            try:
                super().load_collection()
            except Exit as error:
                root = shipped_root()
                if root is None or self.args["search-root"].value:
                    hint = "change to the folder of the project, which has a tasks.py"
                    raise InputError(
                        "no commands here", place="invoke", found=error.message, hint=hint
                    ) from None
                self.args["search-root"].value = str(root)
                super().load_collection()

    def _make_parser(self) -> Parser:
        return Parser(initial=self.initial_context, contexts=self.known.values())

    def parse_tasks(self) -> None:
        """Read the words after Invoke's own options; raises Exit with 2 where they are wrong."""
        with exit_on_error():
            # Once: Invoke takes the texts of help away from a command that it has read.
            self.known = {str(one.name): one for one in contexts(self.collection)}
            self._check_own_options()
            if (rest := self.core.remainder) and not self.args.complete.value:
                raise InputError("no command takes words after `--`", place="invoke", found=rest)
            words = self.core.unparsed
            if words:
                require_known(words[0], self.known, "unknown command", place="invoke")
                if set(HELP) & set(words[1:]):
                    self.args.help.value = words[0]
                    self.core.unparsed.clear()
                else:
                    words[1:] = spread(MANY.get(words[0], ""), words[1:])
                    refuse_options(self.known[words[0]], words[1:])
                    words += implied(self.known[words[0]], words[1:])
            try:
                super().parse_tasks()
            except ParseError as error:
                raise _explained(error, self.known[words[0]]) from None
            if len(self.tasks) > 1:
                raise _one_word_too_many(self.known[words[0]], str(self.tasks[1].name))

    def parse_cleanup(self) -> None:
        """Print help or a list where it was asked for."""
        with exit_on_error():
            super().parse_cleanup()

    def _check_own_options(self) -> None:
        """Raise InputError for an option before the command that does nothing, or has no such value."""
        for name in IDLE:
            if self.args[name].got_value and self.args[name].value:
                hint = f"write it after the command: invoke COMMAND --{name}" if name == "dry" else None
                raise InputError("this option does nothing here", place=f"invoke --{name}", hint=hint)
        if isinstance(asked := self.args.help.value, str):
            require_known(asked, self.known, "unknown command", place="invoke --help")
        if isinstance(listed := self.args.list.value, str):
            hint = "`invoke COMMAND --help` explains one"
            raise InputError("all commands are listed", place="invoke --list", found=listed, hint=hint)
        require_known(self.args["list-format"].value, LIST_FORMATS, "unknown format", place="--list-format")

    def print_help(self) -> None:
        """Print how commands are written, and those of this checkout or else of the package's own."""
        print("Usage: invoke COMMAND [--options]; invoke COMMAND --help explains one\n")
        try:
            super().load_collection()
        except Exit:
            self.args["search-root"].value = str(shipped_root() or Path(__file__).resolve().parents[3])
            self.load_collection()
        self.list_root, self.list_depth, self.list_format = None, None, "flat"
        self.scoped_collection = self.collection
        self.list_tasks()

    def print_task_help(self, name: str) -> None:
        """Print how a command is written and what it takes."""
        rows = options(self.known[name])
        given = " [--options]" if rows else ""
        print(f"Usage: {usage(self.known[name])}{given}\n\n{inspect.getdoc(self.collection[name])}\n")
        if rows:
            self.print_columns(rows)


def shipped_root() -> Path | None:
    """Return what an installed wheel ships, copied to where its runs may be written; None in a checkout."""
    shipped = Path(__file__).parents[1] / "checkout"
    if not shipped.is_dir():
        return None
    # Two builds of one version are two projects.
    record = distribution("twinrun").read_text("RECORD") or ""
    target = cache_root() / f"project-{__version__}-{sha256_of_bytes(record.encode())[:12]}"
    if not target.is_dir():
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        shutil.copytree(shipped, partial)
        with contextlib.suppress(OSError):
            # Another process may have been faster.
            partial.rename(target)
        shutil.rmtree(partial, ignore_errors=True)
    return target


def refuse_options(context: ParserContext, words: Sequence[str]) -> None:
    """Refuse options of which Invoke would make something else; raises InputError.

    Those are unknown ones, one given twice, one without its value, and a value for one that takes none.
    """
    given: set[str] = set()
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("-") or flag == "-":
            continue
        argument = _option(context, flag)
        if argument.takes_value and not equals:
            value = next(rest, "")
        if argument.takes_value and (not value or value in context.flags):
            found = value or "nothing"
            raise InputError("this option needs a value", place=flag, found=found, allowed=argument.help)
        if equals and not argument.takes_value:
            raise InputError("this option takes no value", place=flag, found=word)
        if argument.kind is not list and argument.name in given:
            raise InputError("given twice", place=flag, hint="leave one of the two out")
        given.add(str(argument.name))


def spread(flag: str, words: Sequence[str]) -> list[str]:
    """Return the words with `flag` before each that follows it up to the next option."""
    found: list[str] = []
    within = False
    for word in words:
        within = word == flag or (within and not word.startswith("-"))
        if within and word != flag:
            found += [flag] * (found[-1] != flag)
        found.append(word)
    return found


def implied(context: ParserContext, words: Sequence[str]) -> list[str]:
    """Return the word of a command that one of its options implies where it is left out."""
    flags = IMPLIED.get(str(context.name), {})
    alone = all(word.startswith("-") for word in words[:1])
    return [word for flag, word in flags.items() if flag in words and alone]


def _option(context: ParserContext, flag: str) -> Argument:
    """Return the option called `flag`; raises InputError for none."""
    # Words have a place and no name: one way to say a thing.
    known = sorted(name for name, one in context.flags.items() if not one.positional)
    if flag not in {*known, *(LETTERS[name] for name in known if name in LETTERS)}:
        raise InputError(
            "no such option",
            place=f"invoke {context.name}",
            found=flag,
            allowed=known,
            hint=closest(flag, known) or _see_help(context),
        )
    argument: Argument = context.flags[flag]
    return argument


def _explained(error: ParseError, context: ParserContext) -> InputError:
    """Return what Invoke could not read of the words of a command: one is missing, or one is too many."""
    read: ParserContext = error.context or context
    if read.name != context.name:
        return _one_word_too_many(context, str(read.name))
    if not (lacking := read.missing_positional_args):
        found = re.search(r"No idea what '(.*)' is!", str(error), re.DOTALL)
        return _one_word_too_many(context, found[1] if found else str(error))
    missing = [str(one.name).upper() for one in lacking]
    return InputError(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing",
        place=f"invoke {context.name}",
        allowed=usage(context),
        hint=_see_help(context),
    )


def _one_word_too_many(context: ParserContext, word: str) -> InputError:
    return InputError("one word too many", place=usage(context), found=word, hint=_see_help(context))


def _see_help(context: ParserContext) -> str:
    return f"`invoke {context.name} --help` lists what it takes"


def start() -> None:
    """Run the command line; the program `invoke` of this distribution, which replaces that of Invoke."""
    names = ["invoke", "inv", "twinrun"]
    Commands(
        name="twinrun",
        binary="inv[oke]",
        binary_names=names,
        version=__version__,
        config_class=InvokeSettings,
    ).run()


def take_over() -> None:
    """Let Invoke's program go on as `Commands`, where it was started and not ours, as by `python -m invoke`.

    Invoke makes its program before it reads tasks.py and has no setting for another; so the one that is
    running changes its class.
    """
    main.program.__class__ = Commands
