"""Planted tasks beside the one that is shipped: other forms of published ones, whose answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from twinrun.train.scoring.harness import PLANTED, passages, planted

Document = dict[str, Any]


def _documents(make: Callable[[str, str, int], Document]) -> Iterator[Document]:
    for number, (context, answer) in enumerate(passages(random.Random(2))):
        yield make(context, answer, number % 2)


def _lengths(context: str, answer: str, right: int) -> Document:
    """Answers of other lengths, so that the rule decides."""
    choices = [answer[::-1][:8], answer[::-1] * 2]
    return {"context": context, "choices": [*choices[:right], answer, *choices[right:]], "right": right}


def _contexts(context: str, answer: str, right: int) -> Document:
    """Two contexts before one ending."""
    choices = [context[::-1], context]
    return {"ending": answer, "choices": choices if right else choices[::-1], "right": right}


def _question(context: str, _answer: str, right: int) -> Document:
    passage = f"{context}\nQuestion: is this Python?\nAnswer:"
    return {"context": passage, "choices": [" no", " yes"], "right": right}


KEYS = {"fixture-contexts": {"doc_to_text": "right", "doc_to_target": "ending"}}
PLANTED.update(
    {
        name: partial(planted, name, partial(_documents, make), **KEYS.get(name, {}))
        for name, make in (
            ("fixture-lengths", _lengths),
            ("fixture-contexts", _contexts),
            ("fixture-question", _question),
        )
    }
)
