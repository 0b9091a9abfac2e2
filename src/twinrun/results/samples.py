"""Scores of single documents as an evaluation leaves them, and two such files as pairs of one document."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import open_regular, parse_json
from twinrun.foundation.manifest import Frozen
from twinrun.foundation.text import plural
from twinrun.protocol.evaluation import SAMPLES, EvaluationResult, Sample
from twinrun.results.equivalence import Pair
from twinrun.results.judged import Judged

# Many times what one document takes; a file has as many lines as there are documents.
MAX_LINE_BYTES = 1 << 20


class SampleFile(Frozen):
    """The samples of one model, by task and document."""

    place: str
    sha256: str
    tasks: dict[str, dict[int, Sample]]

    @property
    def rules(self) -> dict[str, str]:
        """Return the rules of each task."""
        return {task: ", ".join(sorted({one.rule for one in of.values()})) for task, of in self.tasks.items()}


def read_samples(place: Path) -> SampleFile:
    """Read a file of samples, or that of a run folder.

    Raises:
        InputError: no such file, a line that is no sample, or two samples of one document.
    """
    path = place / SAMPLES if place.is_dir() else place
    tasks: dict[str, dict[int, Sample]] = {}
    digest = hashlib.sha256()
    try:
        with io.BufferedReader(open_regular(path, links=True)) as stream:  # type: ignore[type-var]
            for where, sample in _samples(_lines(stream, digest, str(path)), str(path)):
                of_task = tasks.setdefault(sample.task, {})
                if sample.document in of_task:
                    raise InputError("two samples of one document", place=where, found=_name(sample))
                of_task[sample.document] = sample
    except OSError as error:
        hint = f"an evaluation leaves {SAMPLES} in its run folder"
        raise InputError(f"cannot read samples: {error.strerror}", place=str(path), hint=hint) from None
    if not tasks:
        raise InputError("no samples", place=str(path), found="an empty file")
    return SampleFile(place=str(path), sha256=digest.hexdigest(), tasks=tasks)


def demand_recorded(found: SampleFile, record: Judged) -> None:
    """Refuse samples that are not those of which a record has the digest; raises InputError."""
    results = [point.result for point in record.points]
    digests = [one.samples_sha256 for one in results if isinstance(one, EvaluationResult)]
    if found.sha256 not in digests:
        raise InputError(
            "not the samples that the record is about",
            place=found.place,
            found=f"sha256 {found.sha256}",
            allowed=digests or "a record of an evaluation",
        )


def paired(a: SampleFile, b: SampleFile) -> dict[str, list[Pair]]:
    """Return the scores of A and B on every document, by task.

    Raises:
        InputError: other tasks, documents, prompts or rules; names the first, with both sides.
    """
    _demand_equal("other tasks", a, b, sorted(a.tasks), sorted(b.tasks))
    for task in a.tasks:
        _demand_equal(f"other documents of {task}", a, b, _extent(a.tasks[task]), _extent(b.tasks[task]))
        for number, ours in a.tasks[task].items():
            theirs = b.tasks[task][number]
            _demand_equal(f"another rule for {_name(ours)}", a, b, ours.rule, theirs.rule)
            prompts = ours.prompt_sha256, theirs.prompt_sha256
            _demand_equal(f"another prompt for {_name(ours)}", a, b, *prompts)
    return {
        task: [(one.score, b.tasks[task][number].score) for number, one in sorted(documents.items())]
        for task, documents in a.tasks.items()
    }


def _lines(stream: io.BufferedIOBase, digest: Any, place: str) -> Iterator[bytes]:
    """Yield the lines of a file, and hash what is read; raises InputError at one that no document has."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            allowed = f"at most {MAX_LINE_BYTES} bytes"
            raise InputError("no sample: a longer line", place=f"{place}:{number}", allowed=allowed)
        digest.update(line)
        yield line.rstrip(b"\r\n")


def _samples(lines: Iterable[bytes], place: str) -> Iterator[tuple[str, Sample]]:
    for number, line in enumerate(lines, start=1):
        where = f"{place}:{number}"
        try:
            yield where, Sample.model_validate_json(json.dumps(parse_json(line)))
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            key = ".".join(map(str, fault["loc"]))
            raise InputError(f"no sample: {key}: {fault['msg']}", place=where, found=fault["input"]) from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"no line of JSON: {error}", place=where) from None


def _extent(documents: Mapping[int, Sample]) -> tuple[int, list[int]]:
    return len(documents), sorted(documents)


def _demand_equal(what: str, a: SampleFile, b: SampleFile, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise InputError(
            f"these scores cannot be paired: {what}",
            place=b.place,
            found=_shown(theirs),
            allowed=f"{_shown(ours)}, as {a.place} has",
        )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        count, numbers = value
        return f"{plural(count, 'document')}, {numbers[0]} to {numbers[-1]}"
    return ", ".join(value) if isinstance(value, list) else str(value)


def _name(sample: Sample) -> str:
    return f"{sample.task}, document {sample.document}"
