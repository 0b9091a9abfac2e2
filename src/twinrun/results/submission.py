"""A record that is sent in: without names of hosts and paths, and its way into the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import leaves, write_atomically, write_together
from twinrun.foundation.redaction import HiddenNames, demand_clean
from twinrun.foundation.signatures import signature_in
from twinrun.planning.project import Project
from twinrun.protocol.model_source import RepositoryModel, in_words
from twinrun.results.judged import Judged, file_name
from twinrun.results.reading import read_record, signature_file, signer_in
from twinrun.results.record import SENT_IN, content_digest

FILE = "submission.json"
# Tables of a record that name its hosts; the rest follows from the recipe.
_PRIVATE = ("allocation", "environment", "points")


def write_submission(path: Path, found: Judged, file: Path) -> None:
    """Write the record in `file` as it is sent in, with a digest of its own.

    Raises:
        InputError: no results folder takes the record.
    """
    _demand_takeable(found, str(file))
    of_points = (host for one in found.points for host in one.sent.hosts)
    hide = HiddenNames(dict.fromkeys([*found.record.allocation.nodes, *of_points]))
    # The file is sent as the run wrote it: its digest does not cover keys that records have gained since.
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    content |= {name: hide.value(content[name]) for name in _PRIVATE}
    for report in content["allocation"]["reports"].values():
        for interface in report["interfaces"]:
            interface["address"] = "removed"
    content["evidence"] = SENT_IN
    content["sha256"] = content_digest(content)
    for key, value in leaves(content):
        demand_clean(str(value), f"{file}:{key}")
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def add_submission(file: Path, recipe: str, project: Project) -> tuple[Path, Judged]:
    """Check a submission for `recipe` and add its record to the results; return file and record.

    Raises:
        InputError: not a submission, of another recipe, not whole, or there already.
    """
    record, loaded = read_record(file, project), project.recipe(recipe)
    plan, stacks = record.plan, loaded.recipe.stacks
    results = [(one, read_record(one, project, own=True)) for one in project.results(loaded)]
    numbers = [point.result for point in record.points]
    runs = [one.name for one, known in results if known.run == record.run]
    same = [one.name for one, known in results if [point.result for point in known.points] == numbers]
    known_stacks = [*stacks.current.values(), *stacks.also, *stacks.published]
    whole = [one.words for one in record.refusals]
    version, names = loaded.recipe.version, [loaded.recipe.name]
    asked: tuple[tuple[str, str, object, list[Any]], ...] = (
        ("plan.recipe", "a record of another recipe", plan.recipe, names),
        ("plan.recipe_version", "a record of another version of the recipe", plan.recipe_version, [version]),
        ("evidence", "a record that was not sent in", record.record.evidence, [SENT_IN]),
        ("plan.stack", "no stack of the recipe", plan.stack, known_stacks),
        ("points", "the record is not whole", whole, [[]]),
        ("run", "the results have this run", runs, [[]]),
        ("points", "the results have these numbers", same, [[]]),
    )
    for key, message, found, allowed in asked:
        if found not in allowed:
            raise InputError(message, place=f"{file}:{key}", found=found, allowed=allowed)
    _demand_takeable(record, str(file))
    path = _free(project.root / loaded.folder / "results" / file_name(record))
    texts = {path: file.read_text(encoding="utf-8")}
    if (signature := signature_file(file)).is_file():
        # What is written is what is held against the record.
        texts[signature_file(path)] = text = signature_in(signature)
        signer_in(text, record.record, project, place=str(signature))
    write_together(texts)
    return path, record


def _demand_takeable(found: Judged, place: str) -> None:
    """Raise InputError for a record that no results folder takes."""
    model, revision = found.description.model, found.record.revision
    allowed, hint = "a repository at a commit, which others can score too", None
    if model and not isinstance(model, RepositoryModel):
        message, seen = "the model lies on one machine", in_words(model)
    elif not found.devices:
        message, seen, allowed = "no GPU ran", found.node.cpu, "a record of a GPU"
    elif found.plan.scale == "smoke":
        message, seen, allowed = "a smoke run says nothing of the hardware", "smoke", "node or paper"
    elif changed := ", ".join(found.environment.changed_files):
        message, seen, allowed = "files of its environment were changed", changed, "none"
        hint = "install the environment again, and run again"
    elif not revision.is_clean:
        message, allowed = "not the run of a clean commit", "a commit without changes"
        seen = "changes that no commit has" if revision.commit else "no commit"
        hint = "commit, run again and send that in"
    else:
        return
    raise InputError(message, place=place, found=seen, allowed=allowed, hint=hint)


def _free(path: Path) -> Path:
    """Return `path`, numbered where there is such a file."""
    names = (path.with_stem(f"{path.stem}-{number}") if number > 1 else path for number in range(1, 1000))
    return next(one for one in names if not one.exists())
