"""`twinrun checkpoint` and `twinrun sign`: what a place holds, whether it is whole, and who says so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from twinrun.checkpoints.conversion import read_folder, write_folder
from twinrun.checkpoints.folder import MANIFEST, SIGNATURE, DamagedError, FolderStore
from twinrun.checkpoints.manifest import CheckpointManifest
from twinrun.checkpoints.model_folder import CONFIG
from twinrun.checkpoints.tokenizer import FILE as TOKENIZER
from twinrun.checkpoints.verification import faults_between, read_manifest, signature_at, verify
from twinrun.cli.console import Shown, demand_with
from twinrun.foundation.cache import project_root
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.signatures import SUFFIX, signature_of, signers_of
from twinrun.foundation.terminal import say
from twinrun.foundation.text import number
from twinrun.planning.project import Project
from twinrun.results.reading import read_record


def checkpoint(
    action: Literal["verify", "list", "convert"],
    place: str,
    /,
    *,
    step: int | None = None,
    out: str | None = None,
    tokenizer: str | None = None,
) -> Shown:
    """Verify, list or convert the checkpoints of a run; 4 where one is damaged.

    Args:
        action: verify (every byte against its digest), list, or convert (to or from Hugging Face format)
        place: folder with the checkpoints of a run, or a folder of transformers
        step: one checkpoint; all when left out, and the newest to convert
        out: folder that a conversion writes
        tokenizer: tokenizer.json that the model was trained with, to write beside its weights
    """
    demand_with("convert", action == "convert", tokenizer=tokenizer)
    if action == "convert":
        written = _convert(place, step, out, tokenizer)
        return Shown(view=lambda: written, data=lambda: {"written": written})
    store, complete = FolderStore(Path(place)), action == "verify"
    good, rows = list[CheckpointManifest](), dict[int | str, dict[str, object]]()
    for one in _steps(store, step):
        try:
            manifest = (verify if complete else read_manifest)(store, one)
            rows[one] = {"step": one, "damage": None, "verified": complete, **_facts(manifest)}
            good.append(manifest)
            if complete:
                digest, signers = manifest.digest(), signers_of(project_root())
                rows[one]["signature"] = signature_at(store, one, digest, signers=signers)
        except (DamagedError, InputError) as error:
            rows[one] = {"step": one, "damage": str(error)}
    # A damaged checkpoint is named by its files, and not by how it fits to the others.
    faults = dict(faults_between(store, good)) if complete and step is None else {}
    damaged = {name for name, row in rows.items() if row["damage"]}
    rows |= {name: {"step": name, "damage": str(faults[name])} for name in faults.keys() - damaged}
    # Steps come first, and then what has a name alone.
    shown = [rows[name] for name in sorted(rows, key=lambda one: (isinstance(one, str), one))]
    code = DamagedError.exit_code if damaged or faults else 0
    return Shown(view=lambda: "\n".join(map(_line, shown)), data=lambda: shown, code=code)


def sign(what: str, /, *, key: Path) -> Shown:
    """Sign a record or a checkpoint with an SSH key; the signature is kept beside it.

    Args:
        what: record, run folder, submission.json, or place with checkpoints, whose newest is signed
        key: private key of SSH, for example ~/.ssh/id_ed25519
    """
    signature = signature_for(project_root(), what, key=key.expanduser())
    return Shown(view=lambda: signature, data=lambda: {"signature": signature})


def signature_for(root: Path, what: str, *, key: Path) -> str:
    """Sign what lies at `what` once it is found good, and return where the signature is.

    Raises:
        InputError: there is nothing to sign, what is there does not hold, or the key does not sign.
    """
    path, project = Path(what), Project(root)
    if path.suffix == ".json" or (path / "record.json").is_file():
        file = path / "record.json" if path.is_dir() else path
        digest = read_record(file, project).record.sha256
        signature = file.with_name(f"{file.name}{SUFFIX}")
        write_atomically(signature, signature_of(digest, key=key))
        return str(signature)
    store = FolderStore(Path(what))
    if not (steps := store.steps()):
        allowed = "a record, a run folder, a submission, or a place with checkpoints"
        raise InputError("nothing to sign", place=what, allowed=allowed)
    manifest = verify(store, steps[-1])
    store.attach(steps[-1], SIGNATURE, signature_of(manifest.digest(), key=key))
    return f"{store.file(steps[-1], MANIFEST)}{SUFFIX}"


def _convert(place: str, step: int | None, out: str | None, tokenizer: str | None) -> str:
    """Write what lies at `place` in the other format and return where: which one it has is seen there."""
    if out is None:
        raise InputError("a conversion needs a place to write", place="--out", hint="--out FOLDER")
    if (Path(place) / CONFIG).is_file():
        if step is not None:
            raise InputError("weights of transformers have no steps", place="--step", found=step)
        if tokenizer is not None:
            raise InputError("checkpoints have no tokenizer", place="--tokenizer", found=tokenizer)
        read_folder(Path(place), FolderStore(Path(out)))
        return out
    store = FolderStore(Path(place))
    newest = _steps(store, step)[-1]
    written = write_folder(store, newest, Path(out), tokenizer=Path(tokenizer) if tokenizer else None)
    if not (written / TOKENIZER).is_file():
        say("no tokenizer was written: `--tokenizer FILE` names the tokenizer.json", file=sys.stderr)
    return str(written)


def _steps(store: FolderStore, step: int | None) -> list[int]:
    steps = store.steps()
    if not steps:
        hint, found = "name a folder such as runs/RECIPE/RUN/checkpoints/POINT", "no folder `step-...`"
        raise InputError("no checkpoint here", place=store.place, found=found, hint=hint)
    if step is not None and step not in steps:
        raise InputError("no such checkpoint", place=store.place, found=step, allowed=steps)
    return steps if step is None else [step]


def _facts(manifest: CheckpointManifest) -> dict[str, object]:
    return {
        "samples": manifest.samples,
        "bytes": sum(part.bytes for part in manifest.parts),
        "tensors": len(manifest.tensors),
        "writer": manifest.token,
        "layout": manifest.layout,
        "sha256": manifest.digest(),
    }


def _line(row: dict[str, object]) -> str:
    if row["damage"]:
        name = f"step {row['step']}" if isinstance(row["step"], int) else row["step"]
        return f"{name}: damaged\n{row['damage']}"
    size = f"{number(float(str(row['bytes'])) / 1e6)} MB"
    state = "good: every byte is as written" if row["verified"] else "there, not verified"
    signature = f"; {row['signature']}" if "signature" in row else ""
    return f"step {row['step']}: {state}; {row['tensors']} tensors, {size}{signature}"
