"""`invoke data`: a published data set from its repository to shards that the ranks read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinrun.execution.download import Repository, fetch
from twinrun.execution.engine import Engine, Workspace
from twinrun.execution.engines import load_engine
from twinrun.execution.environment import inspect
from twinrun.execution.preparation import INDEX, data_folder, prepare, prepared_data
from twinrun.foundation.cache import cache_root
from twinrun.foundation.errors import InputError, closest
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.planning.project import Project
from twinrun.protocol.training import DataSource
from twinrun.workloads import load_workload
from twinrun.workloads.workload import DataRequest

TOKENIZER = "tokenizer.json"


def acquire(
    project: Project,
    name: str,
    *,
    recipe: str,
    engine: str,
    files: int | None,
    endpoint: str | None,
    say: Callable[[str], None],
) -> Path:
    """Return the folder with the shards of data set `name`, fetching and tokenising what is missing.

    Args:
        files: take only this many files, the first by name; None takes all.

    Raises:
        InputError: the recipe has no such data set.
        MachineError: the server, the disk or the engine failed; what is fetched stays.
        RunError: the data could not be tokenised.
    """
    loaded = project.recipe(recipe)
    request = _request(loaded, name)
    source, sequence = request.source, request.sequence
    downloads = cache_root() / "downloads"
    workspace = Workspace(root=project.root, run=downloads, data=cache_root() / "data")
    for folder in (workspace.run, workspace.data):
        folder.mkdir(parents=True, exist_ok=True)
    opened = _open(project, loaded, engine, workspace, say)
    python = inspect(opened).python
    log = downloads / f"{name}.log"
    if source.kind == "standard-library":
        return prepared_data(
            source=source,
            name=name,
            sequence=sequence,
            python=python,
            engine=opened,
            workspace=workspace,
            log=log,
            say=say,
        )
    folder = data_folder(data=workspace.data, source=source, name=name, sequence=sequence, python=python)
    if (folder / INDEX).is_file():
        return folder
    texts, tokenizer = _fetch(source, downloads, files=files, endpoint=endpoint, say=say)
    say(f"tokenising {len(texts)} file(s): {folder}")
    inside = opened.inside
    options = ("--source", source.kind, "--sequence", str(sequence), "--out", inside(folder))
    prepare(
        (*options, "--tokenizer", inside(tokenizer), "--files", *(inside(text) for text in texts)),
        engine=opened,
        log=log,
    )
    return folder


def _request(loaded: LoadedRecipe, name: str) -> DataRequest:
    known = load_workload(loaded.workload).data_sets(loaded.tables)
    if name not in known:
        raise InputError(
            "no such data set",
            place=f"{loaded.manifest}:data",
            found=name,
            allowed=list(known),
            hint=closest(name, known),
        )
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
) -> tuple[list[Path], Path]:
    """Return the local files of the data set and its tokenizer, verified by digest."""
    tokenizer = Repository(source.tokenizer or "", source.tokenizer_revision or "", "model", endpoint)
    texts = Repository(source.repository or "", source.revision or "", endpoint=endpoint)
    fetched: list[list[Path]] = []
    for repository, pattern, limit in ((tokenizer, TOKENIZER, None), (texts, source.files or "", files)):
        folder = downloads / repository.name / repository.revision
        say(f"fetching {repository.name} at {repository.revision[:12]}: {folder}")
        fetched.append(fetch(repository, pattern, folder=folder, limit=limit, say=say))
    return fetched[1], fetched[0][0]
