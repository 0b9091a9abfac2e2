"""Options that are read here: Invoke ends in a traceback where a number is none."""

from __future__ import annotations

from twinrun.foundation.errors import InputError


def count(text: str, option: str) -> int | None:
    """Return the whole number that was typed for `option`, None for nothing; raises InputError."""
    if not text:
        return None
    if not text.isdecimal():
        raise InputError("not a whole number", place=option, found=text, allowed="digits alone, such as 3")
    return int(text)
