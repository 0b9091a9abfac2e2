"""Prepared data that is damaged before a run opens it, fresh or cached, and while the run reads it."""

from __future__ import annotations

import hashlib
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("streaming")

from streaming.base.format.mds.writer import MDSWriter

from tests.train.damage import DATA_PLACES, KINDS, PROTOCOLS, Attack, damage, day_and_night
from tests.train.small import SHAPE, MakeJob
from tests.trials import DAMAGED_DATA
from twinrun.foundation.errors import InputError, RunError
from twinrun.foundation.files import sha256_of_file
from twinrun.protocol.training import TrainingJob
from twinrun.train import corpus as corpora
from twinrun.train.corpus import (
    COLUMN,
    CORPUS,
    HASHES,
    INDEX,
    TOKEN,
    Origin,
    Tokens,
    read_corpus,
    write_corpus,
)
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


def as_prepared(found: bytes, folder: Path) -> bool:
    """Say whether what was read is what was written."""
    tokens: Any = np.frombuffer(found, np.int64).astype(TOKEN)
    return hashlib.sha256(tokens.tobytes()).hexdigest() == read_corpus(folder).sha256


def strike(
    folder: Path, other: Path, draw: random.Random, pattern: str = "*", kinds: tuple[str, ...] = KINDS
) -> str:
    """Damage a file of a data set, perhaps by one of its kind; return how, or nothing if it is as it was."""
    files = sorted(folder.glob(pattern))
    file = draw.choice(files)
    others = [one for one in files if one.name[:5] == file.name[:5] and one != file]
    return damage(file, draw.choice([*others, other / file.name]), draw, kinds)


def before_a_run(folder: Path, other: Path, job: TrainingJob, draw: random.Random, *, cached: bool) -> str:
    """Damage data that no run has opened, or one has; return how, or nothing where it is as it was."""
    if cached:
        load_corpus(job)
    if not (how := strike(folder, other, draw)):
        return ""
    with pytest.raises(InputError) as caught:
        load_batches(job, load_corpus(job))
    assert str(folder) in str(caught.value.place), how
    return how


def beside_a_run(folder: Path, other: Path, samples: Any, count: int, draw: random.Random) -> str:
    """Damage data that a run has opened: only samples are read from then on.

    No shard is removed: streaming waits for one that it cannot fetch again, where the run would end.
    """
    how = strike(folder, other, draw, "shard.*", KINDS[:-1])
    try:
        found = b"".join(samples[number]["tokens"].tobytes() for number in range(count))
    except RunError as error:
        return how if f"{folder}:sample" in str(error.place) else ""
    # Not every byte of a shard is one of a sample.
    assert as_prepared(found, folder), f"{how} was silent"
    return ""


@pytest.mark.parametrize(("count", "seed"), day_and_night(DAMAGED_DATA))
def test_no_damage_is_trained_on(
    prepared: tuple[Path, Path], make_job: MakeJob, tmp_path: Path, count: int, seed: int
) -> None:
    draw, found, folder = random.Random(seed), Counter[str](), tmp_path / "data"
    shutil.copytree(prepared[0], folder)
    job = make_job().model_copy(update={"data": str(folder)})
    corpus = load_corpus(job)
    samples = load_batches(job, corpus).dataset
    for number in range(count):
        moment = MOMENTS[number % len(MOMENTS)]
        if moment == "reading":
            how = beside_a_run(folder, prepared[1], samples, corpus.samples, draw)
        else:
            how = before_a_run(folder, prepared[1], job, draw, cached=moment == "cached")
        found[moment if how else "harmless"] += 1
        shutil.copytree(prepared[0], folder, dirs_exist_ok=True)
    assert found["harmless"] < count / 6, found


def encoded_as_pickle(folder: Path, attack: bytes) -> None:
    """Let the shards of a data set be `attack`, and every digest be right: who forges data computes them."""
    corpus = read_corpus(folder)
    for file in folder.iterdir():
        file.unlink()
    with MDSWriter(out=str(folder), columns={COLUMN: "bytes"}, hashes=["sha256"]) as writer:
        for _ in range(corpus.samples):
            writer.write({COLUMN: attack})
    index = folder / INDEX
    index.write_text(index.read_text().replace('"bytes"]', '"pkl"]'))
    assert '"pkl"' in index.read_text()
    (folder / HASHES).write_bytes(bytes(8 * corpus.samples))
    digests = {"index_sha256": sha256_of_file(index), "hashes_sha256": sha256_of_file(folder / HASHES)}
    (folder / CORPUS).write_text(corpus.model_copy(update=digests).text())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", DATA_PLACES)
def test_no_pickle_in_data_is_executed(
    prepared: tuple[Path, Path], make_job: MakeJob, tmp_path: Path, name: str, protocol: int
) -> None:
    mark, folder = tmp_path / "executed", tmp_path / "data"
    shutil.copytree(prepared[0], folder)
    attack = pickle.dumps(Attack(mark), protocol=protocol)
    if name == "encoding":
        encoded_as_pickle(folder, attack)
    else:
        (folder / name).write_bytes(attack)
    job = make_job().model_copy(update={"data": str(folder)})
    with pytest.raises(InputError, match="missing or damaged"):
        load_batches(job, load_corpus(job)).dataset[0]
    assert not mark.exists()
    pickle.loads(attack)
    assert mark.exists(), "the attack works where a pickle is read"
