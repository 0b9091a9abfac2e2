"""Errors a user can cause or meet; each knows its exit code and prints without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from twinrun.foundation.text import visible

# Characters of a word in a message.
_LONGEST = 300


class TwinrunError(Exception):
    """A failure told as place, found, allowed and hint.

    Subclasses fix `exit_code`; the meaning of the codes is in docs/reference/exit-codes.md.
    """

    exit_code = 6

    def __init__(
        self,
        message: str,
        *,
        place: str | None = None,
        found: object = None,
        allowed: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.found = found
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        # Names, settings and lines of logs come from elsewhere: a terminal obeys none of them.
        return visible(self._text())

    def _text(self) -> str:
        # A key of a manifest, and a name that was typed, may be as long as the file.
        head = f"{_inline(self.place)}: {self.message}" if self.place else self.message
        lines = [f"error: {head}"]
        for label, value in (("found", self.found), ("allowed", self.allowed)):
            if value is not None:
                lines.append(f"  {label}: {_inline(value)}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


class InputError(TwinrunError):
    """The command or a file it reads is wrong."""

    exit_code = 2


class MachineError(TwinrunError):
    """The input is right, but this machine cannot run it."""

    exit_code = 3


class RunError(TwinrunError):
    """The run started and failed."""

    exit_code = 4


class RunInterruptedError(TwinrunError):
    """The run was stopped and can be resumed."""

    exit_code = 5


def require_known(name: str, known: Iterable[str], message: str, *, place: str) -> None:
    """Raise InputError where `name` is none of `known`; it names all of them and the nearest."""
    names = list(known)
    if name not in names:
        raise InputError(message, place=place, found=name, allowed=names, hint=closest(name, names))


def require_equal(
    found: object,
    allowed: object,
    message: str,
    *,
    place: str,
    hint: str | None = None,
    error: type[TwinrunError] = InputError,
) -> None:
    """Raise an error, an InputError unless told otherwise, where what is found is not what it must be."""
    if found != allowed:
        raise error(message, place=place, found=found, allowed=allowed, hint=hint)


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return a hint naming the choice nearest to `word`, if one is near."""
    names = list(choices)
    near = [name for name in names if _abbreviates(word, name)] or _begins(word, names)
    near = near or difflib.get_close_matches(word, names, n=1)
    return f"did you mean `{near[0]}`?" if near else None


def _begins(word: str, names: list[str]) -> list[str]:
    """Return the names of which `word` is the first part, as `h100` is of `h100-80gb`."""
    return [name for name in names if re.match(rf"{re.escape(word)}[-_.]", name)] if word else []


def _abbreviates(word: str, name: str) -> bool:
    """Say whether `word` has the initials of `name`, part by part, as `lr` has of `learning_rate`."""
    short, long = word.lower().split("."), name.lower().split(".")
    if len(short) != len(long) or short == long:
        return False
    pairs = zip(short, long, strict=True)
    return all(a == b or (len(a) > 1 and a == _initials(b)) for a, b in pairs)


def _initials(name: str) -> str:
    return "".join(part[:1] for part in re.split(r"[-_]", name))


def _inline(value: object) -> str:
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(str(item) for item in value) or "(none)"
    text = str(value)
    # The last lines of a log are shown whole; one endless line is not.
    return text if len(text) <= _LONGEST or "\n" in text else text[: _LONGEST - 3] + "..."
