"""Whether, where and how often a run saves: `--checkpoint key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinrun.checkpoints.places import is_remote
from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import validate
from twinrun.protocol.job import Checkpointing
from twinrun.workloads import load_workload

OPTION = "--checkpoint"


def checkpointing_of(texts: Sequence[str], *, workload: str, engine: str) -> Checkpointing | None:
    """Return what `--checkpoint` asks for, or None where it is not given.

    Raises:
        InputError: it is no `key=value` of Checkpointing, or this workload or engine cannot do it.
    """
    if not texts:
        return None
    if not load_workload(workload).saves:
        raise InputError("a run of this kind is not saved", place=OPTION, found=f"[{workload}]")
    values: dict[str, object] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or key in values:
            raise InputError("not one key=value each", place=OPTION, found=text, hint="for example steps=20")
        values[key] = int(value) if value.isdecimal() else value
    found = validate(values, Checkpointing, place=OPTION)
    if found.place and not is_remote(found.place):
        raise InputError(
            "a folder is always that of the run",
            place=f"{OPTION} place",
            found=found.place,
            allowed="s3://...",
        )
    if found.source and not is_remote(found.source):
        # A container sees the folders of its own run alone.
        if engine == "docker":
            raise InputError(
                "a container does not see this folder",
                place=f"{OPTION} source",
                found=found.source,
                hint="use s3://..., or --engine venv",
            )
        return found.model_copy(update={"source": str(Path(found.source).absolute())})
    return found


def place_of(settings: Checkpointing | None, *, folder: str, point: str) -> Checkpointing | None:
    """Return `settings` with the place of one point, `folder` where none was asked for."""
    if settings is None:
        return None
    place = f"{settings.place.rstrip('/')}/{point}" if settings.place else folder
    return settings.model_copy(update={"place": place})
