"""Logs of other programs: which series is read, from where, and what a log may have wrong."""

from __future__ import annotations

import io
import math
import os
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest

from tests.indexes import serving_folder
from twinrun.foundation.errors import InputError
from twinrun.parity.logs import LineFormat, formats
from twinrun.parity.readers import log_entries, read_log

SAMPLES = Path(__file__).parent / "samples"
FIRST = [8.0009, 7.1835, 6.46]


def written(folder: Path, text: str, name: str = "run.log") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


# Lines as programs print them, with the step and the loss left open; a bar writes over itself.
LINES = {
    "NeMo's bar": "Epoch 0:  4%|4 | {step}/9 [0:09, reduced_train_loss={loss}, global_step={step}.0]\r",
    "NeMo's printer": "Training epoch 0, iteration {step}/99 | lr: 3e-7 | reduced_train_loss: {loss} | x\n",
    "GPT-NeoX": " samples/sec: 9.1 | iteration {step:8}/  320000 | elapsed time per iteration (ms): 9.1 |"
    " lm_loss: {loss} | loss scale: 4096.0 |\n",
    "nanotron": "iteration: {step} / 100 | consumed_tokens: 1.05M | lm_loss: {loss} | lr: 3e-4\n",
    "OLMo": "INFO [step={step}/100,epoch=1]\n    optim/total_grad_norm=1.2\n    train/CE loss={loss}\n",
    "LitGPT": "Epoch 1 | iter {step} step {step} | loss train: {loss}, val: n/a | iter time: 9.10 ms\n",
    "DeepSpeed": "steps: {step} loss: {loss} iter time (s): 0.123 samples/sec: 9.1\n",
    "fairseq": "INFO | train_inner | epoch 001: {step} / 99 loss={loss}, ppl=9.1, num_updates={step}\n",
    "ms-swift and transformers with a step": "{{'loss': {loss}, 'grad_norm': 1.2, 'epoch': 0.1,"
    " 'global_step/max_steps': '{step}/100', 'percentage': '5.00%'}}\n",
    "Lightning's bar": "Epoch 0:  50%|##   | {step}/12 [00:00<00:00, v_num=0, train_loss_step={loss}]\r",
    "a bar of tqdm": "  5%|5    | {step}/100 [00:01<00:20,  4.60it/s, loss={loss}]\r",
    "Keras": "{step}/12 --- 1s 5ms/step - loss: {loss}\n",
    "verl": "step:{step} - global_seqlen/min:100 - train/loss:{loss} - train/lr:0.1\n",
    "MLPerf": ':::MLLOG {{"key": "train_loss", "value": {loss}, "metadata": {{"step_num": {step}}}}}\n',
}


@pytest.mark.parametrize("form", formats().format, ids=lambda one: one.name)
def test_lines_are_read_in_their_own_format(form: LineFormat, tmp_path: Path) -> None:
    path = SAMPLES / form.sample
    if not form.sample:
        losses = [*FIRST, *(6 - step / 10 for step in range(9))]
        text = "".join(
            LINES[form.name].format(step=n, loss=f"{one:.4f}") for n, one in enumerate(losses, start=1)
        )
        path = written(tmp_path, text)
    found = read_log(path)
    assert found.format == f"lines ({form.name})"
    assert len(found.steps) == 12
    assert list(found.values[:3]) == pytest.approx(FIRST, abs=1e-4)


def test_a_bar_of_epochs_counts_on(tmp_path: Path) -> None:
    bar = "Epoch {epoch}:  50%|##   | {step}/4 [00:00<00:00, v_num=0, train_loss_step={loss}]\r"
    text = "".join(bar.format(epoch=n // 4, step=n % 4 + 1, loss=9 - n / 10) for n in range(8))
    assert read_log(written(tmp_path, text)).steps == tuple(range(1, 9))


@pytest.mark.parametrize(
    ("text", "asked", "values"),
    [
        ("it 1 ce=3.0\nit 2 ce=2.5\n", {"pattern": r"it (?P<step>\d+) ce=(?P<loss>[\d.]+)"}, (3.0, 2.5)),
        ("step: 1 lm_loss: 3.0 aux: 1.0\nstep: 2 lm_loss: 2.5 aux: 0.9\n", {"series": "aux"}, (1.0, 0.9)),
        ('{"step": 1, "loss": 3.0, "head/loss": 2.0}\n', {"series": "head/loss"}, (2.0,)),
    ],
)
def test_lines_and_keys_that_are_asked_for_are_taken(
    tmp_path: Path, text: str, asked: dict[str, str], values: tuple[float, ...]
) -> None:
    assert read_log(written(tmp_path, text), **asked).values == values


def test_an_address_is_read(tmp_path: Path) -> None:
    written(tmp_path, "step 1 loss 3.0\nstep 2 loss 2.5\n")
    with serving_folder(tmp_path) as address:
        found = read_log(Path(f"{address}/run.log"))
        with pytest.raises(InputError, match="the address gives no log"):
            read_log(Path(f"{address}/absent.log"))
    assert (found.source, found.values) == (f"{address}/run.log", (3.0, 2.5))


def test_the_state_of_a_trainer_has_its_losses_without_those_of_evaluations() -> None:
    found = read_log(SAMPLES / "trainer_state.json")
    assert (found.series, found.steps, found.unit) == ("loss", tuple(range(1, 13)), 1e-4)
    assert found.resolution == pytest.approx(1e-4 / min(found.values))


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
        ('{"lm loss": {"start_step": 1, "values": {"1": 3.0, "6": 2.5}}}', (3.0, 2.5), "steps 1 to 6"),
        ('{"lm loss": {"start_step": 1, "step_interval": 5, "values": [3, 2]}}', (3, 2), "steps 1 to 6"),
        ('{"current_steps": 5, "loss": 3.0}\n', (3.0,), "steps 5 to 5"),
        ('{"global_step/max_steps": "5/9", "loss": 3.0}\n', (3.0,), "steps 5 to 5"),
    ],
)
def test_what_a_log_has_is_taken_and_said(
    tmp_path: Path, text: str, values: tuple[float, ...], said: str
) -> None:
    found = read_log(written(tmp_path, text))
    assert found.values == pytest.approx(values, nan_ok=True)
    assert said in found.in_words()


ONE_LOSS = "step 1 loss 3.0\n"


@pytest.mark.parametrize(
    ("text", "message", "asked"),
    [
        (ONE_LOSS, "no line says what --series nope asks for", {"series": "nope"}),
        ('{"step": 1, "loss": 3.0}\n', "no such series", {"series": "nope"}),
        (ONE_LOSS, "no regular expression of a loss: missing", {"pattern": "("}),
        (ONE_LOSS, "no regular expression of a loss: no group `loss`", {"pattern": "loss"}),
        ("", "no step with a loss in it", {}),
        ("epoch 1 accuracy 0.5\n", "no step with a loss in it", {}),
        ("step,accuracy\n1,0.5\n", "no step with a loss", {}),
        ("step,loss\n1,3,0\n", "more fields than the header", {}),
        ('{"step": 1, "accuracy": 0.5}\n', "--series NAME takes another loss", {}),
        ('{"samples": 1, "loss": 3.0}\n', "the step is called one of step, _step", {}),
        ('{"point": "a", "step": 1, "loss": 3}\n{"point": "b", "step": 1, "loss": 2}\n', "several", {}),
        ("\0\0\0", "neither text nor a log", {}),
        ("[" * 100_000, "not a log|no step", {}),
    ],
)
def test_a_log_without_a_loss_is_refused(
    tmp_path: Path, text: str, message: str, asked: dict[str, str]
) -> None:
    with pytest.raises(InputError, match=message):
        read_log(written(tmp_path, text), **asked)


def test_a_pipe_and_an_absent_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "absent"):
        with pytest.raises(InputError, match="not a log"):
            read_log(tmp_path / name)


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
    last = max(tmp_path.iterdir())
    last.write_bytes(last.read_bytes()[:-3])
    assert f"{last.name} is damaged or cut at byte" in read_log(tmp_path).in_words()


@pytest.mark.needs("wandb")
def test_an_offline_run_of_wandb_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    """The sample was written by wandb 0.31.0; nothing of it has to start for this."""
    found = read_log(SAMPLES / "offline.wandb")
    assert (found.series, found.steps, found.unit) == ("train/loss", tuple(range(1, 13)), 0)
    assert list(found.values[:3]) == pytest.approx(FIRST, abs=1e-4)
    whole = (SAMPLES / "offline.wandb").read_bytes()
    path = tmp_path / "run.wandb"
    middle = whole.rindex(b"train/loss")
    for content in (whole[:-100], whole[:middle] + b"?" + whole[middle + 1 :]):
        path.write_bytes(content)
        found = read_log(path)
        assert 0 < len(found.steps) <= 12
        assert "the file ends, or is damaged, before the end of the run" in found.in_words()


@pytest.mark.parametrize("left", [0, 3, 6, 7, 9])
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
    assert list(log_entries(io.BytesIO(data))) == [first, second]
