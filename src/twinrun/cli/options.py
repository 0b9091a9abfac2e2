"""Options that are read here: Invoke ends in a traceback where a number is none."""

from __future__ import annotations

from twinrun.foundation.errors import InputError


def demand_with(name: str, given: bool, **options: object) -> None:
    """Refuse what was typed for `options`, where the option that they belong to is not given."""
    typed = [option for option, value in options.items() if value]
    if typed and not given:
        found = ", ".join(f"--{option}" for option in typed)
        raise InputError(f"only with {name}", place=found, found=f"no {name}", hint=f"add {name}")


def demand_without(name: str, given: bool, **options: object) -> None:
    """Refuse what was typed for `options`, by their names, beside an option that does something else."""
    if given and (typed := [option for option, value in options.items() if value]):
        found = ", ".join(f"--{option}" for option in typed)
        raise InputError(
            "two questions at once", place=name, found=found, allowed=f"{name}, or {found}, alone"
        )


def count(text: str, option: str) -> int | None:
    """Return the whole number that was typed for `option`, None for nothing; raises InputError."""
    if not text:
        return None
    if not text.isdecimal():
        raise InputError("not a whole number", place=option, found=text, allowed="digits alone, such as 3")
    return int(text)
