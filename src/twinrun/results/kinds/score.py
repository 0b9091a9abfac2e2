"""Claims of what a model gets on a task, which belongs to weights, whatever computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinrun.results.kinds import absolute
from twinrun.results.kinds.comparison import ValueComparison, held_to_reference
from twinrun.results.question import Question, QuestionValue
from twinrun.workloads.workload import PointRecord


def points(question: Question) -> tuple[PointRecord, ...]:
    """Return every point that has the score."""
    return tuple(point for point in question.record.points if question.measured(point))


def lacking(question: Question, found: Sequence[PointRecord]) -> str:
    """Return that no point has the score, empty where one has."""
    return "" if found else f"this run has no {question.metric.id} of {question.asked.measurement}"


def values(question: Question, found: Sequence[PointRecord]) -> Iterator[QuestionValue]:
    """Yield the score of each point; raises NotAskedError."""
    yield from absolute.values(question, found)


def compare(question: Question, found: Sequence[QuestionValue]) -> ValueComparison:
    """Hold the score that is worst for the claim against the published one."""
    return held_to_reference(question, found)
