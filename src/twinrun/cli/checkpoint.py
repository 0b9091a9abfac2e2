"""`invoke checkpoint`: what a place holds, whether it is whole, and its weights in Hugging Face format."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from twinrun.checkpoints import store_at
from twinrun.checkpoints.hugging_face.reading import is_folder_of_weights, read_folder
from twinrun.checkpoints.hugging_face.writing import write_folder
from twinrun.checkpoints.manifest import CheckpointManifest
from twinrun.checkpoints.s3 import is_remote
from twinrun.checkpoints.store import DamagedError, Store
from twinrun.checkpoints.verification import read_manifest, verify
from twinrun.foundation.errors import InputError, TwinrunError, closest
from twinrun.foundation.text import number

ACTIONS = ("verify", "list", "convert")


def checkpoint(action: str, place: str, *, step: int | None, out: str | None, as_json: bool) -> int:
    """Do `action` on the checkpoints of `place` and return the exit code: 4 where one is damaged."""
    if action not in ACTIONS:
        raise InputError("no such action", found=action, allowed=ACTIONS, hint=closest(action, ACTIONS))
    if action == "convert":
        sys.stdout.write(f"{_convert(place, step, out)}\n")
        return 0
    store = store_at(place)
    steps = _steps(store, step)
    rows = [_row(store, one, complete=action == "verify") for one in steps]
    text = json.dumps(rows, indent=1) if as_json else "\n".join(_line(row) for row in rows)
    sys.stdout.write(f"{text}\n")
    return DamagedError.exit_code if any(row["damage"] for row in rows) else 0


def _convert(place: str, step: int | None, out: str | None) -> str:
    """Write what lies at `place` in the other format and return where: which one it has is seen there."""
    if out is None:
        raise InputError("a conversion needs a place to write", place="--out", hint="--out FOLDER")
    if is_folder_of_weights(Path(place)):
        if step is not None:
            raise InputError("weights of transformers have no steps", place="--step", found=step)
        read_folder(Path(place), store_at(out))
        return out
    store = store_at(place)
    newest = _steps(store, step)[-1]
    if is_remote(out):
        raise InputError("transformers reads folders", place="--out", found=out, allowed="a folder")
    return str(write_folder(store, newest, Path(out)))


def _steps(store: Store, step: int | None) -> list[int]:
    steps = store.steps()
    if not steps:
        raise InputError(
            "no checkpoint here",
            place=store.place,
            found="no folder `step-...`",
            hint="name a folder such as runs/RECIPE/RUN/checkpoints/POINT",
        )
    if step is not None and step not in steps:
        raise InputError("no such checkpoint", place=store.place, found=step, allowed=steps)
    return steps if step is None else [step]


def _row(store: Store, step: int, *, complete: bool) -> dict[str, object]:
    try:
        manifest = verify(store, step) if complete else read_manifest(store, step)
    except TwinrunError as error:
        return {"step": step, "damage": str(error)}
    return {"step": step, "damage": None, "verified": complete, **_facts(manifest)}


def _facts(manifest: CheckpointManifest) -> dict[str, object]:
    return {
        "samples": manifest.samples,
        "bytes": sum(file.bytes for file in manifest.files),
        "tensors": len(manifest.tensors),
        "writer": manifest.token,
        "layout": manifest.layout,
        "sha256": manifest.digest(),
    }


def _line(row: dict[str, object]) -> str:
    if row["damage"]:
        return f"step {row['step']}: damaged\n{row['damage']}"
    size = f"{number(float(str(row['bytes'])) / 1e6)} MB"
    state = "good: every byte is as written" if row["verified"] else "there, not verified"
    return f"step {row['step']}: {state}; {row['tensors']} tensors, {size}"
