"""TOML and JSON files read into frozen, typed models; what is wrong is named by file and key."""

from __future__ import annotations

import csv
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from twinrun.foundation.errors import InputError, closest
from twinrun.foundation.files import IrregularFileError, parse_json, read_regular

# Manifests are written by people: the largest of ours is under 10 kB.
MAX_MANIFEST_BYTES = 1_000_000
MAX_KEY_PARTS = 32
_LONG_KEY = re.compile(
    r"""(?<![\w\-"'.])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)"""
    rf"{{{MAX_KEY_PARTS}}}"
)
# Programs write larger files: records of long runs, with their curves, are a few megabytes.
MAX_JSON_BYTES = 256_000_000


class Frozen(BaseModel):
    """Base of every model that is read from a file: immutable, strict, no unknown keys."""

    # Few of the models are met by any one command; the others are never built.
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        defer_build=True,
        # That reads the source of each model, for schemas alone.
        use_attribute_docstrings="TWINRUN_DESCRIBE" in os.environ,
    )


Model = TypeVar("Model", bound=BaseModel)


def load_toml(path: Path, model: type[Model]) -> Model:
    """Read the TOML file at `path` as `model`.

    Raises:
        InputError: missing, not UTF-8, broken TOML (with its line), or not what `model` allows.
    """
    return validate(read_toml(path), model, place=str(path))


def load_json(path: Path, model: type[Model]) -> Model:
    """Read the JSON file at `path` as `model`; raises InputError as `load_toml` does."""
    return validate(read_json(path), model, place=str(path))


def read_json(path: Path) -> Any:
    """Return what the JSON file at `path` says; raises InputError as `load_toml` does."""
    text = read_text(path)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", place=str(path)) from None


def load_rows(path: Path, model: type[Model]) -> tuple[Model, ...]:
    """Read the lines of a CSV file, of which the first names the columns, as `model`.

    Raises:
        InputError: a line that is none, with its number.
    """
    rows: list[Model] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                rows.append(model.model_validate_strings(line))
    except ValidationError as error:
        fault, *_ = error.errors(include_url=False)
        where = f"{path.name}:{len(rows) + 2}:{fault['loc'][0]}"
        raise InputError(fault["msg"], place=where, found=repr(fault["input"])) from None
    return tuple(rows)


def validate(data: Any, model: type[Model], *, place: str, also: Iterable[str] = ()) -> Model:
    """Check plain `data` against `model`; `place` names where it came from.

    Args:
        also: keys that the file may have beside those of `model`, for the message about an unknown one.

    Raises:
        InputError: the first thing wrong, with key, found and allowed.
    """
    try:
        # Strict JSON mode takes lists for tuples, which strict Python mode refuses.
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise _explain(error.errors(include_url=False), data, model, place, set(also)) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"cannot be read: {error}", place=place) from None


def read_text(path: Path) -> str:
    """Return the text of a file that a person or a program has written; raises InputError."""
    try:
        limit = MAX_MANIFEST_BYTES if path.suffix == ".toml" else MAX_JSON_BYTES
        return read_regular(path, limit=limit, links=True).decode("utf-8")
    except IrregularFileError as error:
        raise InputError("no manifest", place=str(path), found=error.strerror, allowed="a file") from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", place=str(path)) from None
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: {error.reason} at byte {error.start}", place=str(path)) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of the TOML file at `path`; raises InputError as `load_toml` does."""
    text = read_text(path)
    if text.startswith("\ufeff"):
        message, allowed = "a byte order mark before the first key", "UTF-8 without one"
        raise InputError(message, place=str(path), allowed=allowed)
    # Each dot of a key is a table in a table, and the parser keeps the whole path for every one: gigabytes.
    if found := _LONG_KEY.search(text):
        line, allowed = text.count("\n", 0, found.start()) + 1, f"at most {MAX_KEY_PARTS}"
        raise InputError("a key of too many parts", place=f"{path}:{line}", allowed=allowed)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, position = str(error).partition(" (at ")
        told = re.match(r"line (\d+)", position)
        place = f"{path}:{told[1] if told else text.count(chr(10)) + 1}"
        hint = "a key may stand only once in its table" if "overwrite" in message else None
        raise InputError(f"broken TOML: {message}", place=place, hint=hint) from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or thousands of brackets.
        raise InputError(f"broken TOML: {error}", place=str(path)) from None


def _explain(
    found: list[ErrorDetails], data: Any, model: type[BaseModel], place: str, also: set[str]
) -> InputError:
    # A misspelt key is unknown, and what it should have been is missing: the first is the cause.
    error = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    location, key = error["loc"], _key(error, data)
    where = f"{place}:{key}" if key else place
    if error["type"] == "extra_forbidden":
        name = str(location[-1])
        allowed = sorted(_keys_at(model, location[:-1]) | (also if len(location) == 1 else set()))
        hint = closest(name, allowed)
        return InputError("unknown key", place=where, found=name, allowed=allowed or None, hint=hint)
    if error["type"] == "missing":
        hint = "docs/guides/add-a-recipe.md explains the keys"
        return InputError("this key is required", place=where, hint=hint)
    if error["type"] == "model_type":
        keys = sorted(_keys_at(model, location))
        return InputError("this key is a table", place=where, found=repr(error["input"]), allowed=keys)
    # The members of a union, each of which takes something else.
    said = dict.fromkeys(one["msg"] for one in found if _key(one, data) == key)
    message = ", or ".join(said).replace(", or Input should be ", ", or ")
    return InputError(message, place=where, found=repr(error["input"]))


def _key(error: ErrorDetails, data: Any) -> str:
    """Return the keys of a location; between them pydantic also names the member of a union that it tried."""
    keys = []
    for part in error["loc"]:
        places = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        if part in places:
            data = data[part]
            keys.append(str(part))
    return ".".join([*keys, str(error["loc"][-1])] if error["type"] == "missing" else keys)


def _keys_at(model: Any, location: tuple[int | str, ...]) -> set[str]:
    """Return the keys allowed at `location` inside `model`, following containers and unions."""
    candidates = [model]
    for part in location:
        fields = [one.model_fields.get(str(part)) for one in _models_in(candidates)]
        candidates = [field.annotation for field in fields if field] or candidates
    return {key for candidate in _models_in(candidates) for key in candidate.model_fields}


def _models_in(annotations: Iterable[Any]) -> Iterator[type[BaseModel]]:
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        else:
            yield from _models_in(get_args(annotation))
