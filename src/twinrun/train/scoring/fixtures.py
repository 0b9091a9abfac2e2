"""Tasks of ours, named `fixture-...`, made of the running interpreter's standard library.

They need no data, so that an evaluation runs on any machine; they say nothing of a model that was trained on
other text. Each has the form of a published one: answers after a context, contexts before one ending, or yes
and no.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from datasets import Dataset

from twinrun.train.prepare import standard_library

PREFIX = "fixture-"
DOCUMENTS = 48
# Characters of a context and of an answer.
CONTEXT, ANSWER = 96, 32
FixtureDocument = dict[str, Any]
Maker = Callable[[str, str, random.Random], list[str]]


SIGNS = string.ascii_letters + string.punctuation


def _mixed(text: str, draw: random.Random) -> str:
    return "".join(draw.sample(text, len(text)))


# The answers beside the right one, by the task's name after PREFIX.
MAKERS: dict[str, Maker] = {
    "shuffled": lambda answer, _other, draw: [_mixed(answer, draw)],
    "reversed": lambda answer, _other, _draw: [answer[::-1]],
    "letters": lambda answer, _other, draw: ["".join(draw.choices(SIGNS, k=len(answer))) for _ in range(3)],
    "elsewhere": lambda _answer, other, _draw: [other],
    # Of other lengths, so that the rule decides.
    "lengths": lambda answer, _other, draw: [(mixed := _mixed(answer, draw))[:8], mixed + mixed[::-1]],
}
CONTEXTS, QUESTION = "contexts", "question"
NAMES = (*(f"{PREFIX}{name}" for name in MAKERS), f"{PREFIX}{CONTEXTS}", f"{PREFIX}{QUESTION}")


def configuration(name: str) -> dict[str, Any]:
    """Return the configuration of a task as lm-eval takes it."""
    kind = name.removeprefix(PREFIX)
    shared = {
        "task": name,
        "output_type": "multiple_choice",
        "test_split": "test",
        "target_delimiter": "",
        "custom_dataset": lambda **_options: {"test": Dataset.from_list(documents(name))},
        "metadata": {"version": 1.0},
    }
    if kind == CONTEXTS:
        return {**shared, "doc_to_text": "right", "doc_to_choice": "choices", "doc_to_target": "ending"}
    return {**shared, "doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "right"}


def documents(name: str) -> list[FixtureDocument]:
    """Return the documents of a task, the same for every interpreter of one version."""
    kind = name.removeprefix(PREFIX)
    draw = random.Random(zlib.crc32(name.encode()))  # noqa: S311
    return [_document(kind, number, passages, draw) for number, passages in enumerate(_passages(draw))]


def _document(kind: str, number: int, passages: tuple[str, str, str], draw: random.Random) -> FixtureDocument:
    context, answer, other = passages
    right = number % 2
    if kind == QUESTION:
        passage = f"{context}\nQuestion: is this Python?\nAnswer:"
        return {"context": passage, "choices": [" no", " yes"], "right": right}
    if kind == CONTEXTS:
        choices = [other, context]
        return {"ending": answer, "choices": choices if right else choices[::-1], "right": right}
    choices = MAKERS[kind](answer, other, draw)
    right = number % (len(choices) + 1)
    return {"context": context, "choices": [*choices[:right], answer, *choices[right:]], "right": right}


def _passages(draw: random.Random) -> Iterator[tuple[str, str, str]]:
    """Yield a context, what follows it, and a passage of another file that is as long as the answer."""
    texts = [text for path in standard_library() if len(text := path.read_text("utf-8", "replace")) > 4000]
    for _ in range(DOCUMENTS):
        first, second = draw.sample(texts, 2)
        begin = draw.randrange(len(first) - CONTEXT - ANSWER)
        answer = first[begin + CONTEXT : begin + CONTEXT + ANSWER]
        place = draw.randrange(len(second) - ANSWER)
        yield first[begin : begin + CONTEXT], answer, second[place : place + ANSWER]
