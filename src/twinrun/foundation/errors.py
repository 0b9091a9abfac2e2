"""Errors a user can cause or meet; each knows its exit code and prints without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

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
        self.message, self.place, self.hint = message, place, hint
        self.found, self.allowed = found, allowed

    def __str__(self) -> str:
        # A key of a manifest, and a name that was typed, may be as long as the file.
        lines = [f"error: {_inline(self.place)}: {self.message}" if self.place else f"error: {self.message}"]
        told = (("found", self.found), ("allowed", self.allowed))
        lines += [f"  {label}: {_inline(value)}" for label, value in told if value is not None]
        lines += [f"hint: {self.hint}"] if self.hint else []
        # Names, settings and lines of logs come from elsewhere: a terminal obeys none of them.
        return visible("\n".join(lines))


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


def require_known(
    name: str, known: Iterable[str], message: str, *, place: str, also: Mapping[str, str] | None = None
) -> None:
    """Raise InputError where `name` is none of `known`; it names all of them and the nearest.

    Args:
        also: what others call some of them, in small letters.
    """
    names = list(known)
    if name not in names:
        hint = closest(name, names, also=also)
        raise InputError(message, place=place, found=name, allowed=names, hint=hint)


def require_equal(
    found: object, allowed: object, message: str, *, error: type[TwinrunError] = InputError, **told: Any
) -> None:
    """Raise an error, an InputError unless told otherwise, where what is found is not what it must be."""
    if found != allowed:
        raise error(message, found=found, allowed=allowed, **told)


# What other programs call a setting.
_ELSEWHERE = {
    other: ours
    for ours, others in {
        "global_batch": ("batch_size", "global_batch_size", "train_batch_size", "gbs"),
        "microbatch": ("micro_batch_size", "per_device_train_batch_size", "mbs"),
        "sequence": ("context_length", "max_seq_len", "seq_len", "seq_length"),
        "steps": ("max_steps", "num_steps", "train_iters"),
        "model": ("model_name",),
        "data": ("dataset",),
        "precision": ("dtype",),
        "activation_checkpointing": ("gradient_checkpointing",),
        "devices": ("gpus", "ngpus", "num_gpus"),
        "nodes": ("nnodes", "num_nodes"),
        "optimizer.learning_rate": ("lr",),
        "optimizer.weight_decay": ("wd",),
    }.items()
    for other in others
}


def elsewhere(word: str) -> str | None:
    """Return our name of a setting that we or another program call `word`; None for another word."""
    low = word.lower()
    return low if low in _ELSEWHERE.values() else _ELSEWHERE.get(low)


def closest(word: str, choices: Iterable[str], *, also: Mapping[str, str] | None = None) -> str | None:
    """Return a hint naming the choice nearest to `word`, whatever its case, if one is near.

    Args:
        also: what others call some of the choices, in small letters.
    """
    names = {name.lower(): name for name in choices}
    low = word.lower()
    # In a table of its own, a setting is known by its last part.
    told = [(also or {}).get(low), elsewhere(low), (elsewhere(low) or "").rpartition(".")[2]]
    near = [name for name in (low, *told) if name and name.lower() in names]
    near = near or [name for name in names if low and re.match(rf"{re.escape(low)}[-_.]", name)]
    near = near or difflib.get_close_matches(low, names, n=1)
    return f"did you mean `{names[near[0].lower()]}`?" if near else None


def _inline(value: object) -> str:
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(str(item) for item in value) or "(none)"
    text = str(value)
    # The last lines of a log are shown whole; one endless line is not.
    return text if len(text) <= _LONGEST or "\n" in text else text[: _LONGEST - 3] + "..."
