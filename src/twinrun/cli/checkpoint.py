"""`twinrun checkpoint` and `twinrun sign`: what a place holds, whether it is whole, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from twinrun.checkpoints.conversion import read_folder, write_folder
from twinrun.checkpoints.folder import MANIFEST, SIGNATURE, DamagedError, FolderStore
from twinrun.checkpoints.model_folder import CONFIG
from twinrun.checkpoints.tokenizer import FILE as TOKENIZER
from twinrun.checkpoints.verification import faults_between, read_manifest, signature_at, verify
from twinrun.cli.console import Shown, demand_with, tell, written
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.signatures import SUFFIX, signature_of, signers_of
from twinrun.foundation.text import number
from twinrun.planning.project import Project
from twinrun.results.reading import read_record


def checkpoint(
    action: Literal["verify", "list", "convert"],
    place: Path,
    /,
    *,
    step: int | None = None,
    out: Path | None = None,
    tokenizer: Path | None = None,
) -> Shown:
    """Verify, list or convert the checkpoints of a run; 4 where one is damaged.

    Args:
        action: verify (every byte against its digest), list, or convert (to or from Hugging Face format)
        place: folder with the checkpoints of a run, or a folder of transformers
        step: one checkpoint; all when left out, and the newest to convert
        out: folder that a conversion writes
        tokenizer: tokenizer.json that the model was trained with, to write beside its weights
    """
    demand_with("convert", action == "convert", out=out, tokenizer=tokenizer)
    if action == "convert":
        return written(_converted(place, step, out, tokenizer))
    store, complete, signers = FolderStore(place), action == "verify", signers_of(project_root())
    good, rows = [], dict[int | str, dict[str, Any]]()
    for one in _steps(store, step):
        try:
            manifest = (verify if complete else read_manifest)(store, one)
            facts: dict[str, Any] = {
                "step": one,
                "damage": None,
                "verified": complete,
                "samples": manifest.samples,
            }
            facts |= {"bytes": sum(part.bytes for part in manifest.parts), "tensors": len(manifest.tensors)}
            facts |= {"writer": manifest.token, "layout": manifest.layout, "sha256": manifest.digest()}
            if complete:
                facts["signature"] = signature_at(store, one, manifest.digest(), signers=signers)
            rows[one] = facts
            good.append(manifest)
        except (DamagedError, InputError) as error:
            rows[one] = {"step": one, "damage": str(error)}
    # A damaged checkpoint is named by its files, and not by how it fits to the others.
    for name, fault in faults_between(store, good) if complete and step is None else ():
        rows[name] = {"step": name, "damage": rows.get(name, {}).get("damage") or str(fault)}
    # Steps come first, and then what has a name alone.
    shown = [rows[name] for name in sorted(rows, key=lambda one: (isinstance(one, str), one))]
    damaged = any(row["damage"] for row in shown)
    return Shown("\n".join(map(_line, shown)), shown, DamagedError.exit_code if damaged else 0)


def _line(row: dict[str, Any]) -> str:
    if row["damage"]:
        return f"{'' if isinstance(row['step'], str) else 'step '}{row['step']}: damaged\n{row['damage']}"
    state = "good: every byte is as written" if row["verified"] else "there, not verified"
    size = f"{row['tensors']} tensors, {number(row['bytes'] / 1e6)} MB"
    return "; ".join([f"step {row['step']}: {state}", size, *([row["signature"]] if row["verified"] else [])])


def _steps(store: FolderStore, step: int | None) -> list[int]:
    steps = store.steps()
    if not steps:
        hint, found = "name a folder such as runs/RECIPE/RUN/checkpoints/POINT", "no folder `step-...`"
        raise InputError("no checkpoint here", place=store.place, found=found, hint=hint)
    if step is not None and step not in steps:
        raise InputError("no such checkpoint", place=store.place, found=step, allowed=steps)
    return steps if step is None else [step]


def _converted(place: Path, step: int | None, out: Path | None, tokenizer: Path | None) -> Path:
    """Write what lies at `place` in the other format and return where: which one it has is seen there."""
    if out is None:
        raise InputError("a conversion needs a place to write", place="--out", hint="--out FOLDER")
    if (place / CONFIG).is_file():
        for option, typed in (("--step", step), ("--tokenizer", tokenizer)):
            if typed is not None:
                raise InputError(
                    "not of weights of transformers", place=option, found=typed, hint="leave it out"
                )
        read_folder(place, FolderStore(out))
        return out
    store = FolderStore(place)
    folder = write_folder(store, _steps(store, step)[-1], out, tokenizer=tokenizer)
    if not (folder / TOKENIZER).is_file():
        tell("no tokenizer was written: `--tokenizer FILE` names the tokenizer.json")
    return folder


def sign(what: Path, /, *, key: Path) -> Shown:
    """Sign a record or a checkpoint with an SSH key; the signature is kept beside it.

    Args:
        what: record, run folder, submission.json, or place with checkpoints, whose newest is signed
        key: private key of SSH, for example ~/.ssh/id_ed25519

    Raises:
        InputError: there is nothing to sign, what is there does not hold, or the key does not sign.
    """
    if what.suffix == ".json" or (what / "record.json").is_file():
        file = what / "record.json" if what.is_dir() else what
        digest = read_record(file, Project(project_root())).record.sha256
        signature = file.with_name(f"{file.name}{SUFFIX}")
        write_atomically(signature, signature_of(digest, key=key.expanduser()))
    else:
        store = FolderStore(what)
        if not (steps := store.steps()):
            allowed = "a record, a run folder, a submission, or a place with checkpoints"
            raise InputError("nothing to sign", place=str(what), allowed=allowed)
        manifest = verify(store, steps[-1])
        store.attach(steps[-1], SIGNATURE, signature_of(manifest.digest(), key=key.expanduser()))
        signature = Path(f"{store.file(steps[-1], MANIFEST)}{SUFFIX}")
    return Shown(str(signature), {"signature": signature})
