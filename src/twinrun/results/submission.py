"""A record that is sent in: one file without names of hosts and paths, and its way into the results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import (
    leaves,
    open_regular,
    parse_json,
    read_regular,
    write_atomically,
    write_together,
)
from twinrun.foundation.manifest import Frozen, validate
from twinrun.foundation.redaction import HiddenNames, demand_clean
from twinrun.planning.project import Project
from twinrun.protocol.model_source import RepositoryModel, in_words
from twinrun.results.judge import judged
from twinrun.results.judged import Judged, file_name
from twinrun.results.reading import read_content, read_record, signature_file, signer_of
from twinrun.results.record import SENT_IN, content_digest
from twinrun.workloads.workload import Finding

FILE = "submission.json"
# Lines of each log: versions, devices and the first warnings stand there.
HEAD_LINES, HEAD_BYTES = 40, 1 << 16
MAX_BYTES = 32 << 20
# Tables of a record that name its hosts, beside its points; the rest follows from the recipe.
_PRIVATE = ("allocation", "environment", "points")


class SubmissionForm(Frozen):
    """submission.json."""

    schema_version: Literal[1] = 1
    run_sha256: str
    """Digest of the record as the run wrote it."""
    record: dict[str, Any]
    """The record without names of hosts and paths, with a digest of its own."""
    logs: dict[str, str]
    """First lines of the logs of the run, by path inside its folder."""
    doctor: dict[str, Any] | None
    """What `invoke doctor` says of the machine; null where that is not the one that ran."""


def write_submission(
    path: Path, found: Judged, file: Path, folder: Path, *, doctor: Mapping[str, Any] | None = None
) -> None:
    """Write the submission of the record in `file`, with the logs of its run folder.

    Raises:
        InputError: no results folder takes the record.
    """
    _demand_takeable(found, str(file))
    hide = HiddenNames(_hosts(found))
    # The file is sent as the run wrote it: its digest does not cover keys that records have gained since.
    content = json.loads(file.read_text(encoding="utf-8"))
    submission = SubmissionForm(
        run_sha256=content["sha256"],
        record=_without_names(content, hide),
        logs={name: hide.log(head) for name, head in _heads(folder)},
        doctor=hide.value(doctor) if doctor else None,
    )
    for key, value in leaves(submission.record):
        demand_clean(str(value), f"{file}:{key}")
    write_atomically(path, submission.model_dump_json(indent=1) + "\n")


def add_submission(file: Path, recipe: str, project: Project) -> tuple[Path, Judged]:
    """Check a submission for `recipe` and add its record to the results; return file and record.

    Raises:
        InputError: not a submission, of another recipe, contradicting itself, or there already.
    """
    # Read once: what is written is what was judged, whatever stands there by then.
    submission, place = _read(file), f"{file}:record"
    record = _judged(submission, file, project)
    loaded = project.recipe(recipe)
    _demand(record.plan.recipe, loaded.recipe.name, "a record of another recipe", f"{place}.plan.recipe")
    _demand(
        record.plan.recipe_version,
        loaded.recipe.version,
        "a record of another version of the recipe",
        f"{place}.plan.recipe_version",
    )
    _demand(record.record.evidence, SENT_IN, "a record that was not sent in", f"{place}.evidence")
    _demand_takeable(record, place)
    stacks = loaded.recipe.stacks
    known_stacks = [*stacks.current.values(), *stacks.also, *stacks.published]
    if record.plan.stack not in known_stacks:
        found = record.plan.stack
        raise InputError(
            "no stack of the recipe", place=f"{place}.plan.stack", found=found, allowed=known_stacks
        )
    _demand_whole(record.refusals, place)
    for one in project.results(loaded):
        known = read_record(one, project, own=True)
        if record.run == known.run:
            raise InputError("the results have this run", place=f"{place}.run", found=one.name)
        if [point.result for point in record.points] == [point.result for point in known.points]:
            raise InputError("the results have these numbers", place=f"{place}.points", found=one.name)
    path = _free(project.root / loaded.folder / "results" / file_name(record))
    texts = {path: json.dumps(submission.record, indent=1) + "\n"}
    if (signature := signature_file(file)).is_file():
        # The digest that was signed is the record's own, so the signature holds in the results too.
        texts[signature_file(path)] = signature.read_text(encoding="utf-8")
    write_together(texts)
    return path, record


def read_submission(file: Path, project: Project) -> Judged:
    """Return the record of a submission, and who signed it; raises InputError where it does not hold."""
    return _judged(_read(file), file, project)


def _judged(submission: SubmissionForm, file: Path, project: Project) -> Judged:
    record = read_content(submission.record, place=f"{file}:record")
    return judged(record, project, signer_of(record, file, project))


def _hosts(found: Judged) -> tuple[str, ...]:
    """Return the hosts that a record names, in the order of its nodes."""
    of_points = (host for one in found.points for host in one.hosts)
    return tuple(dict.fromkeys([*found.record.allocation.nodes, *of_points]))


def _without_names(content: dict[str, Any], hide: HiddenNames) -> dict[str, Any]:
    """Return what a record's file says without names, with the digest of that."""
    content |= {name: hide.value(content[name]) for name in _PRIVATE}
    for report in content["allocation"]["reports"].values():
        for interface in report["interfaces"]:
            interface["address"] = "removed"
    content["evidence"] = SENT_IN
    content["sha256"] = content_digest(content)
    return content


def _heads(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each log of a run folder with its first lines; a single record has none."""
    for file in sorted((folder / "log").rglob("*.log")):
        try:
            with open_regular(file) as stream:
                head = stream.read(HEAD_BYTES).decode("utf-8", errors="replace")
        except OSError:
            # A link may lead to anything of the user's, and a pipe to nobody.
            continue
        head = "".join(head.splitlines(keepends=True)[:HEAD_LINES])
        if head:
            yield file.relative_to(folder).as_posix(), head


def _read(file: Path) -> SubmissionForm:
    try:
        content = parse_json(read_regular(file, limit=MAX_BYTES, links=True).decode())
    except FileNotFoundError:
        hint = "invoke report RUN --form writes one"
        raise InputError("no such submission", place=str(file), hint=hint) from None
    except OSError as error:
        found, allowed = error.strerror, f"a file of at most {MAX_BYTES} bytes"
        raise InputError("not a submission", place=str(file), found=found, allowed=allowed) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a submission: {error}", place=str(file)) from None
    if isinstance(content, dict) and "plan" in content:
        hint = "`invoke report RECORD --form` makes what is sent in of it"
        raise InputError("a record, and not a submission", place=str(file), hint=hint)
    return validate(content, SubmissionForm, place=str(file))


def _demand_takeable(found: Judged, place: str) -> None:
    """Raise InputError for a record that no results folder takes."""
    model, revision = found.description.model, found.record.revision
    if model and not isinstance(model, RepositoryModel):
        raise InputError(
            "the model lies on one machine",
            place=f"{place}.plan.part.evaluation.model",
            found=in_words(model),
            allowed="a repository at a commit, which others can score too",
        )
    if not found.devices:
        raise InputError("no GPU ran", place=place, found=found.node.cpu, allowed="a record of a GPU")
    if found.plan.scale == "smoke":
        raise InputError("a smoke run says nothing of the hardware", place=place, allowed="node or paper")
    if changed := found.environment.changed_files:
        raise InputError(
            "files of its environment were changed",
            place=f"{place}.environment.changed_files",
            found=[f"{name}: {what}" for name, what in changed.items()],
            hint="install the environment again, and run again",
        )
    if revision.commit is None or revision.changes_sha256 is not None:
        raise InputError(
            "not the run of a clean commit",
            place=place,
            found="changes that no commit has" if revision.commit else "no commit",
            allowed="a commit without changes",
            hint="commit, run again and send that in",
        )


def _demand_whole(found: Sequence[Finding], place: str) -> None:
    """Raise InputError for a record that could carry no verdict."""
    if found:
        first, more = found[0], f"; {len(found) - 1} more like it" if len(found) > 1 else ""
        raise InputError(
            "the record is not whole",
            place=f"{place}.points",
            found=first.words,
            allowed=f"none{more}",
            hint="run the recipe again and send that in",
        )


def _demand(found: object, allowed: object, message: str, place: str) -> None:
    if found != allowed:
        raise InputError(message, place=place, found=found, allowed=allowed)


def _free(path: Path) -> Path:
    """Return `path`, numbered where there is such a file."""
    names = (path.with_stem(f"{path.stem}-{number}") if number > 1 else path for number in range(1, 1000))
    return next(one for one in names if not one.exists())
