"""Where a model lies that nobody trains: a repository at a commit, or a folder."""

from __future__ import annotations

import re
from typing import Literal

from twinrun.foundation.errors import InputError
from twinrun.foundation.manifest import Frozen

_REPOSITORY = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)@(?P<revision>[0-9a-f]{40})")
_FOLDER = re.compile(r"(?P<path>(?:/|\./|\.\./|~)[^@]*)(?:@(?P<sha256>[0-9a-f]{64}))?")
GRAMMAR = (
    "OWNER/NAME@COMMIT with 40 hexadecimal digits",
    "a folder that begins with /, ./, ../ or ~, with @SHA256 or without",
)


class RepositoryModel(Frozen):
    """A repository of the hub at a commit; a branch would be other weights tomorrow."""

    kind: Literal["repository"] = "repository"
    repository: str
    revision: str


class FolderModel(Frozen):
    """A folder as transformers reads it."""

    kind: Literal["folder"] = "folder"
    path: str
    """Folder as it was typed; `~` is the home of who runs."""
    sha256: str | None
    """Digest that its configuration, weights and tokenizer must have; null takes what is there."""


ModelSource = RepositoryModel | FolderModel


def model_source(text: str, *, place: str) -> ModelSource:
    """Return the model that `text` names; raises InputError, which names `place`."""
    if found := _REPOSITORY.fullmatch(text):
        return RepositoryModel(repository=found["repository"], revision=found["revision"])
    if (found := _FOLDER.fullmatch(text)) and not re.search(r"/step-[0-9]+/?$", found["path"]):
        return FolderModel(path=found["path"], sha256=found["sha256"])
    raise InputError("no model", place=place, found=text, allowed=GRAMMAR, hint=_hint(text))


def in_words(source: ModelSource) -> str:
    """Return the name of a model, without the folders in which it lies."""
    match source:
        case RepositoryModel(repository=repository, revision=revision):
            return f"{repository}@{revision[:12]}"
        case FolderModel(path=path, sha256=sha256):
            return f"{path.rstrip('/').rpartition('/')[2]}{f'@{sha256[:12]}' if sha256 else ''}"


def _hint(text: str) -> str:
    if re.search(r"(^|/)step-[0-9]+", text):
        return "`invoke checkpoint convert` writes a checkpoint as a folder that can be scored"
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@.*)?", text):
        return "a repository needs the commit, which its page lists under `History`; a folder begins with ./"
    return "docs/guides/score-a-model.md has an example of each"
