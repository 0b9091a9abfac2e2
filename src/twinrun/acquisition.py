"""`invoke data`: a published data set from its repository to shards that the ranks read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinrun import engines
from twinrun.cache import cache_root
from twinrun.discovery import load_part
from twinrun.download import fetch
from twinrun.engine import Engine, Site
from twinrun.environment import inspect
from twinrun.errors import InputError, closest
from twinrun.preparation import INDEX, data_folder, prepare, prepared_data
from twinrun.recipe import LoadedRecipe, load_recipe
from twinrun.repository import Repository
from twinrun.stack import load_stack
from twinrun.training import DataSource
from twinrun.vendor import load_vendors

TOKENIZER = "tokenizer.json"


def acquire(
    root: Path,
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
    loaded = load_recipe(root, recipe)
    source = _source(loaded, name)
    downloads = cache_root() / "downloads"
    site = Site(root=root, run=downloads, data=cache_root() / "data")
    for folder in (site.run, site.data):
        folder.mkdir(parents=True, exist_ok=True)
    opened = _open(root, loaded, engine, site, say)
    sequence = loaded.recipe.models[loaded.recipe.training.model].sequence
    python = inspect(opened).python
    log = downloads / f"{name}.log"
    if source.kind == "standard-library":
        return prepared_data(
            source=source,
            name=name,
            sequence=sequence,
            python=python,
            engine=opened,
            site=site,
            log=log,
            say=say,
        )
    folder = data_folder(data=site.data, source=source, name=name, sequence=sequence, python=python)
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


def _source(loaded: LoadedRecipe, name: str) -> DataSource:
    known = loaded.recipe.data
    if name not in known:
        raise InputError(
            "no such data set",
            place=f"{loaded.folder}/recipe.toml:data",
            found=name,
            allowed=list(known),
            hint=closest(name, known),
        )
    return known[name]


def _open(root: Path, loaded: LoadedRecipe, engine: str, site: Site, say: Callable[[str], None]) -> Engine:
    """Provision the stack of the machine without GPUs: tokenising needs none."""
    vendors = load_vendors(root)
    plain = next(name for name, vendor in vendors.items() if not vendor.probe)
    stack = load_stack(root, loaded.recipe.stacks.current[plain])
    opened: Engine = load_part(engines, engine).open_engine(
        stack=stack, vendor=vendors[plain], site=site, say=say
    )
    return opened


def _fetch(
    source: DataSource,
    downloads: Path,
    *,
    files: int | None,
    endpoint: str | None,
    say: Callable[[str], None],
) -> tuple[list[Path], Path]:
    """Return the local files of the data set and its tokenizer, verified by digest."""
    tokenizer = Repository(
        name=source.tokenizer or "", revision=source.tokenizer_revision or "", kind="models"
    )
    texts = Repository(name=source.repository or "", revision=source.revision or "")
    fetched: list[list[Path]] = []
    for repository, pattern, limit in ((tokenizer, TOKENIZER, None), (texts, source.files or "", files)):
        folder = downloads / repository.name / repository.revision
        say(f"fetching {repository.name} at {repository.revision[:12]}: {folder}")
        fetched.append(fetch(repository, pattern, folder=folder, limit=limit, endpoint=endpoint))
    return fetched[1], fetched[0][0]
