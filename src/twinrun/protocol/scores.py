"""Samples of evaluations, and whether two models score the same on them, document by document.

That no difference is significant shows no equivalence: with few documents nothing is. So two one-sided tests
are made (Schuirmann 1987, doi:10.1007/BF01068419): scores are equivalent where the whole interval of their
difference lies inside the margin, and different where it lies outside. Intervals of paired proportions are
those of Agresti and Min (2005, doi:10.1002/sim.1781), which keep a width where no document differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated, Literal

from pydantic import Field

from twinrun.foundation.errors import InputError
from twinrun.foundation.files import parse_json, read_regular, sha256_of_bytes
from twinrun.foundation.manifest import Frozen, validate
from twinrun.protocol.evaluation import MEAN, SAMPLES, Sample

# Many times what the documents of every task take.
MAX_BYTES = 1 << 30
Pair = tuple[float, float]
Equivalence = Literal["equivalent", "different", "undecided"]
# Of calling scores equivalent that are a margin apart, or different that are a margin apart or less.
ERROR_RATE = 0.05
# Agresti and Min add half a document to each of four outcomes: both right, both wrong, A alone, B alone.
ADDED_DOCUMENTS, ADDED_SQUARES = 2, 1


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
    try:
        content = read_regular(path, limit=MAX_BYTES, links=True)
    except OSError as error:
        hint = f"an evaluation leaves {SAMPLES} in its run folder"
        raise InputError(f"cannot read samples: {error.strerror}", place=str(path), hint=hint) from None
    for number, line in enumerate(content.splitlines(), start=1):
        where = f"{path}:{number}"
        try:
            sample = validate(parse_json(line), Sample, place=where)
        except (ValueError, RecursionError) as error:
            raise InputError(f"no line of JSON: {error}", place=where) from None
        if sample.document in tasks.setdefault(sample.task, {}):
            raise InputError("two samples of one document", place=where, found=_name(sample))
        tasks[sample.task][sample.document] = sample
    if not tasks:
        raise InputError("no samples", place=str(path), found="an empty file")
    return SampleFile(place=str(path), sha256=sha256_of_bytes(content), tasks=tasks)


def paired(a: SampleFile, b: SampleFile) -> dict[str, list[Pair]]:
    """Return the scores of A and B on every document, by task.

    Raises:
        InputError: other tasks, documents, prompts or rules; names the first, with both sides.
    """

    def demand_equal(what: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            allowed = f"{ours}, as {a.place} has"
            what = f"these scores cannot be paired: {what}"
            raise InputError(what, place=b.place, found=theirs, allowed=allowed)

    demand_equal("other tasks", sorted(a.tasks), sorted(b.tasks))
    found = {}
    for task, documents in a.tasks.items():
        theirs = b.tasks[task]
        if documents.keys() != theirs.keys():
            apart = sorted(documents.keys() ^ theirs.keys())
            demand_equal(f"other documents of {task}", len(documents), f"{len(theirs)}, not both {apart[:3]}")
        pairs = [(one, theirs[number]) for number, one in sorted(documents.items())]
        for ours, other in pairs:
            demand_equal(f"another rule for {_name(ours)}", ours.rule, other.rule)
            demand_equal(f"another prompt for {_name(ours)}", ours.prompt_sha256, other.prompt_sha256)
        found[task] = [(ours.score, other.score) for ours, other in pairs]
    return found


def _name(sample: Sample) -> str:
    return f"{sample.task}, document {sample.document}"


class ScoreDifference(Frozen):
    """How far the scores of two models are apart, on one task or in the mean of all."""

    task: str
    documents: Annotated[int, Field(gt=0)]
    a: float
    """Mean score of A."""
    b: float
    a_better: int
    """Documents on which A scores higher."""
    b_better: int
    low: float
    """Lower end of the interval of B - A."""
    high: float
    outcome: Equivalence

    @property
    def difference(self) -> float:
        """Return B - A."""
        return self.b - self.a

    @property
    def least_margin(self) -> float:
        """Return the smallest margin inside which the whole interval lies."""
        return max(abs(self.low), abs(self.high))


class ScoreComparison(Frozen):
    """Two models on the same documents of the same tasks."""

    margin: float
    """Largest difference of scores that counts as none."""
    error_rate: float = ERROR_RATE
    """Error rate of the mean, and of all tasks together."""
    tasks: Annotated[tuple[ScoreDifference, ...], Field(min_length=1)]
    mean: ScoreDifference
    """Over tasks, each with the same weight."""

    @property
    def outcome(self) -> Equivalence:
        """Return that of the mean, but for a task on which the models differ."""
        apart = any(one.outcome == "different" for one in self.tasks)
        return "different" if apart else self.mean.outcome


def compare_scores(pairs: Mapping[str, Sequence[Pair]], *, margin: float) -> ScoreComparison:
    """Return how far A and B are apart, from the scores of both on each document of each task.

    A task alone is called by an interval that holds together with those of the others (Bonferroni).

    Args:
        pairs: scores from 0 to 1 by task, at least one of each.
        margin: largest difference that counts as none, above 0.
    """
    together, alone = (NormalDist().inv_cdf(1 - ERROR_RATE / count) for count in (1, len(pairs)))
    spread = {task: _spread(found) for task, found in pairs.items()}

    tasks = tuple(
        _difference(task, found, spread[task][0], alone * spread[task][1], margin)
        for task, found in sorted(pairs.items())
    )
    centre = fmean(one for one, _ in spread.values())
    half = together * math.hypot(*(error for _, error in spread.values())) / len(pairs)
    every = [pair for found in pairs.values() for pair in found]
    means = {"a": fmean(one.a for one in tasks), "b": fmean(one.b for one in tasks)}
    mean = _difference(MEAN, every, centre, half, margin).model_copy(update=means)
    return ScoreComparison(margin=margin, tasks=tasks, mean=mean)


def _difference(
    task: str, pairs: Sequence[Pair], centre: float, half: float, margin: float
) -> ScoreDifference:
    low, high = centre - half, centre + half
    outcome: Equivalence = "different" if low > margin or high < -margin else "undecided"
    return ScoreDifference(
        task=task,
        documents=len(pairs),
        a=fmean(a for a, _ in pairs),
        b=fmean(b for _, b in pairs),
        a_better=sum(a > b for a, b in pairs),
        b_better=sum(b > a for a, b in pairs),
        low=low,
        high=high,
        outcome="equivalent" if -margin < low and high < margin else outcome,
    )


def _spread(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the centre of the interval of B - A, and its standard error."""
    apart = [b - a for a, b in pairs]
    documents = len(pairs) + ADDED_DOCUMENTS
    centre = math.fsum(apart) / documents
    squares = math.fsum(one * one for one in apart) + ADDED_SQUARES
    return centre, math.sqrt((squares / documents - centre * centre) / documents)
