"""Logs of other programs: which series is read, from where, and what a log may have wrong."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest

from twinrun.foundation.errors import InputError
from twinrun.parity.logs import LoggedCurve, formats
from twinrun.parity.readers import log_entries, read_log

SAMPLES = Path(__file__).parent / "samples"
FIRST = [8.0009, 7.1835, 6.46]


def written(folder: Path, text: str, name: str = "run.log") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("form", formats().format, ids=lambda one: one.name)
def test_a_sample_is_read_in_its_own_format(form: object) -> None:
    found = read_log(SAMPLES / form.sample)  # type: ignore[attr-defined]
    assert found.format == f"lines ({form.name})"  # type: ignore[attr-defined]
    assert len(found.steps) == 12
    assert list(found.values[:3]) == pytest.approx(FIRST, abs=1e-4)


def test_every_sample_has_a_format() -> None:
    named = {one.sample for one in formats().format} | {"trainer_state.json", "offline.wandb"}
    assert {path.name for path in SAMPLES.iterdir()} == named


def test_the_state_of_a_trainer_has_its_losses_without_those_of_evaluations() -> None:
    found = read_log(SAMPLES / "trainer_state.json")
    assert (found.series, found.steps, found.unit) == ("loss", tuple(range(1, 13)), 1e-4)


@pytest.mark.parametrize(
    ("text", "values", "said"),
    [
        ("step,loss\n1,3.0\n2,2.5\n", (3.0, 2.5), ""),
        ("step;loss\n1;3,25\n2;2,5\n", (3.25, 2.5), "commas are read as decimal signs"),
        ('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": NaN}\n', (3.0, math.nan), "1 value not finite"),
        ('{"step": 1, "loss": 3.0}\n{"step": 2, "los', (3.0,), "1 row not read"),
        ("1 3.0\n2 2.5\n2 2.4\n", (3.0, 2.4), "1 step logged more than once, the last one is taken"),
        ("1 3.0\n3 2.0\n2 2.5\n", (3.0, 2.5, 2.0), "1 step out of order, sorted"),
        (
            "step 1 loss 3.0\nstep 2 loss none\nstep 3 loss 2.0\n",
            (3.0, 2.0),
            "1 line whose loss is no number",
        ),
        ("Step,run - train/loss,run - eval/loss\n1,3.0,\n2,2.5,2.6\n", (3.0, 2.5), ""),
        ("Step,run - train/loss,run - train/loss__MIN\n1,3.0,1.0\n2,2.5,1.0\n", (3.0, 2.5), ""),
        ("\ufeffstep,loss\n1,3.0\n2,2.5\n", (3.0, 2.5), "steps 1 to 2"),
        ('{"log_history": [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]}', (3.0, 2.5), ""),
        ("step 999 loss 3.0\nstep 1,000 loss 2.5\n", (3.0, 2.5), "steps 999 to 1000"),
    ],
)
def test_what_a_log_has_is_taken_and_said(
    tmp_path: Path, text: str, values: tuple[float, ...], said: str
) -> None:
    found = read_log(written(tmp_path, text))
    assert found.values == pytest.approx(values, nan_ok=True)
    assert said in found.in_words()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no step with a loss in it"),
        ("epoch 1 accuracy 0.5\n", "no step with a loss in it"),
        ("step,accuracy\n1,0.5\n", "no such series|no step|known to be the loss"),
        ("step,loss\n1,3,0\n", "more fields than the header"),
        ('{"step": 1, "accuracy": 0.5}\n', "known to be the loss"),
        ('{"samples": 1, "loss": 3.0}\n', "no key here is known to be the step"),
        (
            '{"point": "a", "step": 1, "loss": 3.0}\n{"point": "b", "step": 1, "loss": 2.0}\n',
            "several points",
        ),
        ("\0\0\0", "neither text nor a log"),
        ("[" * 100_000, "not a log|no step"),
    ],
)
def test_a_log_without_a_loss_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_log(written(tmp_path, text))


def test_a_pipe_and_an_absent_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "absent"):
        with pytest.raises(InputError, match="not a log"):
            read_log(tmp_path / name)


def test_another_series_is_taken_by_its_name(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3.0, "head/loss": 2.0} for step in range(3)]
    path = written(tmp_path, "".join(json.dumps(one) + "\n" for one in rows))
    assert read_log(path, series="head/loss").values == (2.0, 2.0, 2.0)
    with pytest.raises(InputError, match="no such series"):
        read_log(path, series="tail/loss")


@pytest.mark.parametrize(
    "size", [1 << 24, pytest.param(1 << 31, marks=pytest.mark.trials)], ids=["16 MiB", "2 GiB"]
)
def test_a_long_log_streams(tmp_path: Path, size: int) -> None:
    """Memory grows with the losses alone; what lies between them here is one line without an end."""
    path = tmp_path / "long.log"
    with path.open("w", encoding="utf-8") as file:
        for step in range(100):
            file.write(f"step {step} loss {8 - step / 100}\n")
        filler = "x" * (1 << 20)
        while file.tell() < size:
            file.write(filler)
        file.write("\nstep 100 loss 7.0\n")
    tracemalloc.start()
    found = read_log(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.steps == tuple(range(101))
    assert peak < 1 << 24


@pytest.mark.needs("tensorboard")
def test_event_files_of_a_resumed_run_are_one_curve(tmp_path: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
    from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

    for start, suffix in ((1, ".a"), (4, ".b")):
        writer = EventFileWriter(str(tmp_path), filename_suffix=suffix)
        for step in range(start, start + 5):
            value = Summary.Value(tag="train/loss", simple_value=8 - step / 10)
            writer.add_event(Event(wall_time=step, step=step, summary=Summary(value=[value])))
        writer.close()
    found = read_log(tmp_path)
    assert (found.series, found.steps) == ("train/loss", tuple(range(1, 9)))
    assert "2 steps logged more than once" in found.in_words()


@pytest.mark.needs("wandb")
def test_the_offline_run_of_wandb_is_read() -> None:
    """The sample was written by wandb 0.31.0; nothing of it has to start for this."""
    found = read_log(SAMPLES / "offline.wandb")
    assert (found.series, found.steps, found.unit) == ("train/loss", tuple(range(1, 13)), 0)
    assert list(found.values[:3]) == pytest.approx(FIRST, abs=1e-4)


@pytest.mark.needs("wandb")
def test_a_run_of_wandb_without_its_end_is_said_and_damage_is_refused(tmp_path: Path) -> None:
    whole = (SAMPLES / "offline.wandb").read_bytes()
    path = tmp_path / "run.wandb"
    path.write_bytes(whole[:-100])
    assert "the file has no end of the run" in read_log(path).in_words()
    path.write_bytes(whole[:500] + b"?" + whole[501:])
    with pytest.raises(InputError, match="a part of the file is damaged"):
        read_log(path)


@pytest.mark.parametrize("left", range(10))
def test_an_entry_crosses_blocks_wherever_the_one_before_it_ends(left: int) -> None:
    """A block of 32 KiB has 7 bytes of W&B ahead; fewer than 7 at its end are zeros."""
    first, second, data = b"a" * (32768 - 14 - left), b"b" * 70_000, b":W&B" + bytes(3)
    for entry in (first, second):
        rest, kind = entry, 0
        while rest or not kind:
            if (room := 32768 - len(data) % 32768) < 7:
                data, room = data + bytes(room), 32768
            part, rest = rest[: room - 7], rest[room - 7 :]
            kind = (3 if rest else 4) if kind else (2 if rest else 1)
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
    assert list(log_entries(io.BytesIO(data), source="a file")) == [first, second]


@pytest.mark.trials
@pytest.mark.needs("wandb")
def test_what_wandb_writes_now_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb  # noqa: PLC0415

    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    quiet = wandb.Settings(console="off", silent=True, x_disable_meta=True, x_service_wait=300)
    with wandb.init(project="p", mode="offline", dir=str(tmp_path), settings=quiet) as run:
        for step in range(1, 6):
            run.log({"train/loss": 8 - step / 10}, step=step)
    found = read_log(tmp_path)
    assert (found.steps, found.values[0]) == ((1, 2, 3, 4, 5), 7.9)


def test_a_log_says_how_finely_it_can_tell() -> None:
    coarse, fine = (read_log(SAMPLES / name) for name in ("plain.log", "torchtitan-losses.txt"))
    assert isinstance(coarse, LoggedCurve)
    assert coarse.resolution == pytest.approx(1e-4 / min(coarse.values))
    assert fine.resolution == 0
