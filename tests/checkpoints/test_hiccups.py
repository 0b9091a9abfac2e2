"""An error of the file system is no damage: it is tried again, then the run stops, and nothing is moved."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints.writing import CALLS, ERRORS, VALUES, failing, place_of, write
from tests.trials import HICCUPS
from twinrun.checkpoints.conversion import TensorReader
from twinrun.checkpoints.folder import FolderStore, UnreachableError
from twinrun.checkpoints.parts import Box, parts_for
from twinrun.checkpoints.verification import read_manifest, retire, verify
from twinrun.cli.records import checkpoint


def save(store: FolderStore) -> None:
    try:
        write(store, step=6, token=store.claim("again"))
    except BaseException:
        store.abandon(6, 2)
        raise
    retire(store)


def load(store: FolderStore) -> None:
    assert store.steps() == [2, 4]
    assert store.latest() == (4, read_manifest(store, 4).digest())
    assert parts_for(store, read_manifest(store, 4), {"model.weight": [Box.at((0, 0), (2, 3))]})
    assert TensorReader(store, read_manifest(store, 4)).read("model.weight").tobytes() == VALUES


def look(store: FolderStore) -> None:
    assert checkpoint("verify", Path(store.place)).code == 0


def ended(work: Callable[[FolderStore], None], store: FolderStore) -> str:
    try:
        work(store)
    except UnreachableError as stopped:
        return f"exit {stopped.exit_code}, {stopped.hint}"
    return "done"


def trial(whole: Path, place: Path, draw: random.Random) -> str:
    """Let an operation meet errors; return how it ended. What was good stays good and where it is."""
    shutil.copytree(whole, place)
    work = draw.choice([save, load, look])
    error, calls = draw.choice(ERRORS), tuple(draw.sample(CALLS, draw.randrange(1, len(CALLS))))
    times = draw.choice([1, 2, 1 << 30])
    how = f"{work.__name__} {error} {calls} {times}"
    with failing(place, error, calls=calls, first=draw.randrange(1, 30), times=times):
        end = ended(work, FolderStore(place))
    store = FolderStore(place)
    assert not (place / "quarantine").exists(), how
    kept = [step for step in (2, 4, 6) if step in store.steps()]
    assert kept in ([2, 4], [4, 6], [2, 4, 6]), how
    assert all(verify(store, step).step == step for step in kept), how
    if work is save and end == "done":
        assert 6 in kept, how
    shutil.rmtree(place)
    return end


@pytest.mark.parametrize(
    ("count", "seed"),
    [(HICCUPS.change, 27), pytest.param(HICCUPS.nightly, 28, marks=pytest.mark.trials)],
    ids=["day", "night"],
)
def test_no_hiccup_is_damage(tmp_path: Path, count: int, seed: int) -> None:
    place_of(tmp_path / "whole", steps=(2, 4))
    draw = random.Random(seed)
    ends = [trial(tmp_path / "whole", tmp_path / "place", draw) for _ in range(count)]
    stopped = "no checkpoint was changed; mend it, or free some space; then --resume goes on"
    assert set(ends) == {"done", f"exit 5, {stopped}"}
