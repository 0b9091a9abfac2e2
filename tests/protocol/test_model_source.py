"""What names a model that is there: a repository at a commit or a folder; all else is refused."""

from __future__ import annotations

import pytest

from twinrun.foundation.errors import InputError
from twinrun.protocol.model_source import (
    FolderModel,
    ModelSource,
    RepositoryModel,
    in_words,
    model_source,
)

COMMIT, DIGEST = "0123456789" * 4, "a1" * 32
NAMED: dict[str, tuple[ModelSource, str]] = {
    f"cerebras/Cerebras-GPT-1.3B@{COMMIT}": (
        RepositoryModel(repository="cerebras/Cerebras-GPT-1.3B", revision=COMMIT),
        "cerebras/Cerebras-GPT-1.3B@012345678901",
    ),
    "./models/small": (FolderModel(path="./models/small", sha256=None), "small"),
    f"/models/small/@{DIGEST}": (FolderModel(path="/models/small/", sha256=DIGEST), "small@a1a1a1a1a1a1"),
    "~/small": (FolderModel(path="~/small", sha256=None), "small"),
    "../small": (FolderModel(path="../small", sha256=None), "small"),
}
# A text that names no model, and what helps.
REFUSED = {
    "cerebras/Cerebras-GPT-1.3B": "a repository needs the commit",
    "cerebras/Cerebras-GPT-1.3B@main": "a repository needs the commit",
    f"cerebras/Cerebras-GPT-1.3B@{COMMIT[:12]}": "a repository needs the commit",
    "runs/a/checkpoints/devices=1/step-00000120": "writes a checkpoint as a folder",
    "./checkpoints/step-00000120": "writes a checkpoint as a folder",
    f"./checkpoints/step-120@{DIGEST}": "writes a checkpoint as a folder",
    f"/models/small@{DIGEST[:10]}": "has an example of each",
    "small": "has an example of each",
    "": "has an example of each",
}


@pytest.mark.parametrize("text", NAMED)
def test_each_form_is_read_and_called_without_its_folders(text: str) -> None:
    source, words = NAMED[text]
    assert model_source(text, place="--set model") == source
    assert in_words(source) == words


@pytest.mark.parametrize("text", [*REFUSED])
def test_another_form_is_refused_with_the_two_that_there_are(text: str) -> None:
    with pytest.raises(InputError) as caught:
        model_source(text, place="--set model")
    assert caught.value.place == "--set model"
    assert caught.value.found == text
    assert len(list(caught.value.allowed)) == 2  # type: ignore[call-overload]
    assert REFUSED[text] in (caught.value.hint or "")
