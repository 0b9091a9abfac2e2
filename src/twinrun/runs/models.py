"""Models that are there: fetched or converted once, and looked at before time is spent on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinrun.checkpoints.conversion import write_folder
from twinrun.checkpoints.folder import MANIFEST, STEP, FolderStore
from twinrun.checkpoints.model_folder import PATTERNS, digest_of_folder, lacking, model_files
from twinrun.checkpoints.tokenizer import IDENTITY, is_known
from twinrun.checkpoints.verification import read_manifest
from twinrun.foundation.cache import cache_root, locked
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.files import real, write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.protocol.model_source import (
    CheckpointModel,
    FolderModel,
    ModelSource,
    RepositoryModel,
    model_source,
)
from twinrun.runs.data import INDEX

OPTION = "--set model"


class FetchedModel(Frozen):
    """What says that a model is here whole; written last."""

    repository: str
    revision: str
    sha256: str
    """Digest of the folder."""
    endpoint: str | None = None
    """Server that it came from; null where it was fetched before that was kept."""


def model_folder(source: ModelSource) -> Path:
    """Return the folder from which ranks load a model."""
    kept = cache_root() / "data" / "models"
    match source:
        case RepositoryModel(repository=repository, revision=revision):
            return kept / repository / revision
        case CheckpointModel(sha256=sha256):
            return kept / f"checkpoint-{sha256}"
        case FolderModel(path=path):
            return real(Path(path).expanduser())


def fetch_model(text: str, *, endpoint: str | None, say: Callable[[str], None]) -> Path:
    """Return the folder of the repository that `text` names, fetching what is missing.

    Raises:
        InputError: it names no commit, or the commit has no configuration, safetensors or tokenizer.
        MachineError: the server or the disk failed; whole files that have come stay.
    """
    # The library takes half a second to import, and most commands need none of it.
    from twinrun.runs.download import RepositoryCommit, fetch, listed

    source = model_source(text, place="NAME")
    if not isinstance(source, RepositoryModel):
        raise InputError(
            "it lies on this machine already", place="NAME", found=text, allowed="OWNER/NAME@COMMIT"
        )
    folder = model_folder(source)
    if (folder / INDEX).is_file():
        return folder
    repository = RepositoryCommit(source.repository, source.revision, "model", endpoint)
    say(f"fetching {source.repository} at {source.revision[:12]}: {folder}")
    if lack := lacking({file.path for file in listed(repository, PATTERNS, folder=folder)}):
        message = "nothing here that can be scored"
        raise InputError(message, place=text, found=lack[0], hint=lack[1])
    fetch(repository, PATTERNS, folder=folder, say=say)
    whole = FetchedModel(
        repository=source.repository,
        revision=source.revision,
        sha256=digest_of_folder(folder),
        endpoint=repository.server,
    )
    write_atomically(folder / INDEX, whole.model_dump_json(indent=1) + "\n")
    return folder


def demand_model(source: ModelSource, folder: Path, *, container: bool) -> None:
    """Look at a model before time is spent on it.

    Args:
        container: whether ranks see nothing outside the model's folder.

    Raises:
        InputError: it is not there, not whole, or another one than its digest says.
        MachineError: it must be fetched first.
    """
    match source:
        case RepositoryModel():
            _demand_fetched(source, folder)
        case FolderModel():
            _demand_folder(source, folder, container=container)
        case CheckpointModel():
            _demand_checkpoint(source, folder)


def prepared_model(source: ModelSource, *, folder: Path, say: Callable[[str], None]) -> None:
    """See that ranks find a model in its folder: a checkpoint is converted once.

    Raises:
        DamagedError: the checkpoint is not what was written.
        InputError: it is another one, or transformers has no class for it.
    """
    if not isinstance(source, CheckpointModel):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock")):
        if not folder.is_dir():
            _demand_checkpoint(source, folder)
            say(f"converting step {source.step}, once: {folder}")
            write_folder(FolderStore(_place(source)), source.step, folder)


def _demand_fetched(source: RepositoryModel, folder: Path) -> None:
    if not (folder / INDEX).is_file():
        raise MachineError(
            "this model is not on this machine",
            place=str(folder),
            found=f"{source.repository}@{source.revision}",
            hint=f"fetch it with `invoke data {source.repository}@{source.revision}`",
        )
    digest_of_folder(folder, allowed=load_json(folder / INDEX, FetchedModel).sha256)


def _demand_folder(source: FolderModel, folder: Path, *, container: bool) -> None:
    files = model_files(folder)
    if source.sha256 is not None:
        digest_of_folder(folder, allowed=source.sha256)
    outside = [one.name for one in files if not real(one).is_relative_to(real(folder))]
    if container and outside:
        raise InputError(
            "links lead out of the folder, where a container does not see",
            place=str(folder),
            found=outside,
            hint="copy the files, or fetch the repository with `invoke data OWNER/NAME@COMMIT`",
        )


def _demand_checkpoint(source: CheckpointModel, folder: Path) -> None:
    if folder.is_dir():
        # Named by its digest, and whole.
        return
    place = _place(source)
    if not place.is_dir():
        raise InputError("no such folder of checkpoints", place=OPTION, found=source.place)
    store = FolderStore(place)
    if source.step not in (steps := store.steps()):
        found = STEP.format(source.step)
        raise InputError("no such checkpoint", place=str(place), found=found, allowed=steps or "none is here")
    manifest = read_manifest(store, source.step)
    file = store.file(source.step, MANIFEST)
    if (found := manifest.digest()) != source.sha256:
        raise InputError("the checkpoint has another digest", place=file, found=found, allowed=source.sha256)
    if not is_known(manifest.identity):
        raise InputError(
            "the tokenizer of this checkpoint is not on this machine",
            place=file,
            found=manifest.identity.get(IDENTITY, "no tokenizer"),
            hint="fetch the data that it was trained on with `invoke data`, or convert it with"
            " `invoke checkpoint convert --tokenizer FILE` and name the folder",
        )


def _place(source: CheckpointModel) -> Path:
    return Path(source.place).expanduser().absolute()
