"""What the disk, a fault or an attacker can do to checkpoints: nothing of it is silent."""

from __future__ import annotations

import contextlib
import errno
import json
import pickle
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.checkpoints.writing import failing
from tests.train.checkpoint_jobs import digests, saving, start
from tests.train.checkpoint_run import train
from tests.train.damage import DATA_PLACES, PROTOCOLS, QUICK_PROTOCOLS, Attack, damage, day_and_night
from tests.train.small import STEPS, MakeJob
from tests.trials import DAMAGED_CHECKPOINT, FULL_DISK, PICKLES
from twinrun.checkpoints.folder import DamagedError, FolderStore, UnreachableError
from twinrun.checkpoints.verification import verify
from twinrun.foundation.errors import RunError
from twinrun.protocol.training import TrainingJob
from twinrun.train.corpus import read_corpus

SEED = DAMAGED_CHECKPOINT.seed or 0
NEWEST, OLDER = f"step-{STEPS:08d}", f"step-{STEPS - 2:08d}"


@pytest.fixture(scope="module")
def saved(make_job: MakeJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingJob, Path]:
    """A run of two ranks with two checkpoints."""
    place = tmp_path_factory.mktemp("saved") / "place"
    job = saving(make_job(world_size=2), place)
    ended = start(job)
    assert ended.statuses == (0, 0), ended.said
    return job, place


def corrupt(place: Path, draw: random.Random) -> str:
    """Damage one file of the newest checkpoint, and return how."""
    file = draw.choice(sorted((place / NEWEST).iterdir()))
    return damage(file, place / OLDER / file.name, draw)


@pytest.mark.parametrize(("count", "seed"), day_and_night(DAMAGED_CHECKPOINT))
def test_no_corruption_is_silent(
    saved: tuple[TrainingJob, Path], tmp_path: Path, count: int, seed: int
) -> None:
    draw, harmless, place = random.Random(seed), 0, tmp_path / "place"
    for _ in range(count):
        shutil.copytree(saved[1], place)
        if how := corrupt(place, draw):
            with pytest.raises(DamagedError) as caught:
                verify(FolderStore(place), STEPS)
            assert NEWEST in str(caught.value.place), how
            assert caught.value.found is not None, how
        harmless += not how
        shutil.rmtree(place)
    assert harmless < count / 20


@pytest.mark.parametrize("number", range(2))
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(
    saved: tuple[TrainingJob, Path], tmp_path: Path, number: int
) -> None:
    place = tmp_path / "place"
    shutil.copytree(saved[1], place)
    whole = digests(place, STEPS)
    draw = random.Random(SEED + number)
    while not (how := corrupt(place, draw)):
        pass
    ended = start(saving(saved[0], place))
    assert ended.statuses == (0, 0), ended.said
    assert "put aside" in ended.said, how
    assert f"going on after step {STEPS - 2}" in ended.said
    assert (place / "quarantine" / NEWEST).is_dir()
    assert digests(place, STEPS) == whole


PLACES = (
    f"{NEWEST}/manifest.json",
    f"{NEWEST}/rank-00000.safetensors",
    "latest.json",
    "writer.json",
    f"{NEWEST}/.metadata",
)


@pytest.fixture(scope="module")
def saved_alone(make_job: MakeJob, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainingJob, Path]:
    """A run of one rank in this process, with its checkpoints."""
    place = tmp_path_factory.mktemp("alone") / "place"
    job = saving(make_job(), place)
    train(job, read_corpus(Path(job.data)))
    return job, place


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", PLACES)
def test_no_pickle_is_executed(
    saved_alone: tuple[TrainingJob, Path], tmp_path: Path, name: str, protocol: int
) -> None:
    mark, place = tmp_path / "executed", tmp_path / "place"
    shutil.copytree(saved_alone[1], place)
    attack = pickle.dumps(Attack(mark), protocol=protocol)
    (place / name).write_bytes(attack)
    job = saving(saved_alone[0], place)
    with contextlib.suppress(RunError):
        train(job, read_corpus(Path(job.data)))
    assert not mark.exists()
    pickle.loads(attack)
    assert mark.exists(), "the attack works where a pickle is read"


assert (len(PLACES) + len(DATA_PLACES)) * len(PROTOCOLS) == PICKLES.nightly
assert (len(PLACES) + len(DATA_PLACES)) * len(QUICK_PROTOCOLS) == PICKLES.change


@pytest.mark.parametrize("times", [1, 1 << 30])
def test_a_file_server_that_is_away_damages_nothing(
    saved_alone: tuple[TrainingJob, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], times: int
) -> None:
    place = tmp_path / "place"
    shutil.copytree(saved_alone[1], place)
    job, before = saving(saved_alone[0], place), digests(place, STEPS)
    with failing(place, errno.ESTALE, calls=("open", "preadv"), first=4, times=times):
        if times == 1:
            train(job, read_corpus(Path(job.data)))
            assert f"going on after step {STEPS}" in capsys.readouterr().err
        else:
            with pytest.raises(UnreachableError, match="Stale file handle"):
                train(job, read_corpus(Path(job.data)))
    assert not (place / "quarantine").exists()
    assert digests(place, STEPS) == before


LIMITS = (100, 1500, 3000, 5000)
assert len(LIMITS) == FULL_DISK.change
OTHER_LIMITS = random.Random(FULL_DISK.seed).sample(range(5000), FULL_DISK.nightly - len(LIMITS))


@pytest.mark.parametrize(
    "limit", [*LIMITS, *(pytest.param(limit, marks=pytest.mark.trials) for limit in OTHER_LIMITS)]
)
def test_a_full_disk_leaves_the_checkpoint_before(
    saved: tuple[TrainingJob, Path], tmp_path: Path, limit: int
) -> None:
    place = tmp_path / "place"
    shutil.copytree(saved[1], place)
    shutil.rmtree(place / NEWEST)
    (place / "latest.json").write_text(json.dumps({"step": STEPS - 2}))
    before = digests(place, STEPS - 2)
    # Lines of metrics go elsewhere than to the full disk.
    job = saved[0].model_copy(update={"metrics": "/dev/null"})
    ended = start(saving(job, place), FILE_BYTES=limit)
    if set(ended.statuses) == {0}:
        assert limit > max(file.stat().st_size for file in (place / NEWEST).iterdir())
    else:
        assert "the file system refused: File too large" in ended.said
        assert 5 in ended.statuses
        assert " bytes are free" in ended.said
    assert digests(place, STEPS - 2) == before
    assert not list(place.glob(".step-*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 18}, "manifest.json:seed: the checkpoint is of another run"),
        ({"global_batch": 32}, "manifest.json:global_batch: the checkpoint is of another run"),
        ({"compile": True}, "manifest.json:compile: the checkpoint was saved with another layout"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    saved: tuple[TrainingJob, Path], tmp_path: Path, change: dict[str, object], said: str
) -> None:
    place = tmp_path / "place"
    shutil.copytree(saved[1], place)
    training = saved[0].training.model_copy(update=change)
    ended = start(saving(saved[0].model_copy(update={"training": training}), place))
    assert ended.statuses == (2, 2)
    assert said in ended.said
    assert digests(place, STEPS) == digests(saved[1], STEPS)
    # Whoever writes here goes on: the refused run has not taken its place.
    assert (place / "writer.json").read_bytes() == (saved[1] / "writer.json").read_bytes()
