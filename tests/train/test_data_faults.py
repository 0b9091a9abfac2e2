"""Prepared data that is damaged before a run opens it, fresh or cached, and while the run reads it."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("streaming")

from tests.train.damage import damage
from tests.train.small import SHAPE, MakeJob
from tests.trials import DAMAGED_DATA
from twinrun.foundation.errors import InputError, RunError
from twinrun.protocol.training import TrainingJob
from twinrun.train import corpus as corpora
from twinrun.train.corpus import TOKEN, Origin, Tokens, read_corpus, write_corpus
from twinrun.train.data import load_batches, load_corpus

# Several shards in a small data set.
SHARD_BYTES = 2048
# What streaming computes with the places of samples in a damaged shard.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")
MOMENTS = ("fresh", "cached", "reading")


def documents(seed: int) -> Iterator[tuple[Tokens, int]]:
    draw = np.random.default_rng(seed)
    for _ in range(40):
        tokens: Tokens = draw.integers(0, 64, size=100).astype(TOKEN)
        yield tokens, len(tokens)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two data sets whose files have the same names."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "SHARD_BYTES", SHARD_BYTES)
        for number in (1, 2):
            folder = tmp_path_factory.mktemp("prepared") / str(number)
            write_corpus(folder, Origin(source="test", sequence=SHAPE.sequence), documents(number))
            found.append(folder)
    return found[0], found[1]


def read(job: TrainingJob, *, between: Callable[[], None] = lambda: None) -> bytes:
    """Read every sample as a run does; `between` is called when the run has opened the data."""
    corpus = load_corpus(job)
    samples = load_batches(job, corpus).dataset
    between()
    return b"".join(samples.get_item(number)["tokens"].tobytes() for number in range(corpus.samples))


def as_prepared(found: bytes, folder: Path) -> bool:
    """Say whether what was read is what was written."""
    tokens = np.frombuffer(found, np.int64).astype(TOKEN)
    return hashlib.sha256(tokens.tobytes()).hexdigest() == read_corpus(folder).sha256


def one_trial(
    prepared: tuple[Path, Path], job: TrainingJob, folder: Path, moment: str, draw: random.Random
) -> str:
    """Damage a copy at a moment of its use; return how, or nothing where it is as it was."""
    shutil.copytree(prepared[0], folder)
    job = job.model_copy(update={"data": str(folder)})
    # After it was opened only samples are read.
    files = sorted(folder.glob("shard.*" if moment == "reading" else "*"))
    file = draw.choice(files)
    others = [*(one for one in files if one.name[:5] == file.name[:5] and one != file)]
    other = draw.choice([*others, prepared[1] / file.name])
    if moment == "cached":
        load_corpus(job)
    how: list[str] = []

    def strike() -> None:
        how.append(damage(file, other, draw))

    if moment != "reading":
        strike()
    try:
        found = read(job, between=strike) if moment == "reading" else read(job)
    except (InputError, RunError) as error:
        # One index in place of another is refused by name, or names the shard that it does not fit.
        known = str(folder) in str(error.place)
        return f"{moment} {how[0]}" if known else f"unnamed: {error}"
    # Not every byte of a shard is one of a sample.
    assert as_prepared(found, prepared[0]), f"{moment}: {how[0]} was silent"
    assert moment == "reading" or not how[0], f"{moment}: {how[0]} was silent"
    return ""


def trials(prepared: tuple[Path, Path], job: TrainingJob, place: Path, count: int, seed: int) -> None:
    draw, found = random.Random(seed), Counter[str]()
    for number in range(count):
        folder = place / str(number)
        found[one_trial(prepared, job, folder, MOMENTS[number % 3], draw).partition(" ")[0]] += 1
        shutil.rmtree(folder)
    assert found.keys() <= {"", *MOMENTS}
    assert found[""] < count / 6


def test_no_damage_is_trained_on(prepared: tuple[Path, Path], make_job: MakeJob, tmp_path: Path) -> None:
    trials(prepared, make_job(), tmp_path, DAMAGED_DATA.change, DAMAGED_DATA.seed or 0)


@pytest.mark.trials
def test_no_damage_is_ever_trained_on(prepared: tuple[Path, Path], make_job: MakeJob, tmp_path: Path) -> None:
    trials(prepared, make_job(), tmp_path, DAMAGED_DATA.nightly, (DAMAGED_DATA.seed or 0) + 1)
