"""`invoke sign`: a signature by an SSH key beside a record, a submission or a checkpoint."""

from __future__ import annotations

from pathlib import Path

from twinrun.checkpoints import store_at
from twinrun.checkpoints.store import MANIFEST, SIGNATURE
from twinrun.checkpoints.verification import verify
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.signatures import SUFFIX, signature_of
from twinrun.foundation.terminal import say
from twinrun.planning.project import Project
from twinrun.results.reading import read_record
from twinrun.results.submission import FILE, read_submission


def sign(root: Path, what: str, *, key: str) -> None:
    """Sign what lies at `what`, and print where the signature is; raises InputError as `signature_for`."""
    if not key:
        raise InputError("no key to sign with", place="--key", hint="for example --key ~/.ssh/id_ed25519")
    say(signature_for(root, what, key=Path(key).expanduser()))


def signature_for(root: Path, what: str, *, key: Path) -> str:
    """Sign what lies at `what` once it is found good, and return where the signature is.

    Raises:
        InputError: there is nothing to sign, what is there does not hold, or the key does not sign.
    """
    path, project = Path(what), Project(root)
    if path.name == FILE and path.is_file():
        return _sign_file(path, read_submission(path, project).sha256, key)
    if path.suffix == ".json" or (path / "record.json").is_file():
        file = path / "record.json" if path.is_dir() else path
        return _sign_file(file, read_record(file, project).sha256, key)
    store = store_at(what)
    if not (steps := store.steps()):
        allowed = "a record, a run folder, a submission, or a place with checkpoints"
        raise InputError("nothing to sign", place=what, allowed=allowed)
    manifest = verify(store, steps[-1])
    store.attach(steps[-1], manifest.token, SIGNATURE, signature_of(manifest.digest(), key=key))
    return f"{store.file(steps[-1], MANIFEST)}{SUFFIX}"


def _sign_file(file: Path, digest: str, key: Path) -> str:
    signature = file.with_name(f"{file.name}{SUFFIX}")
    write_atomically(signature, signature_of(digest, key=key))
    return str(signature)
