"""Models that nobody trains here: folders and checkpoints are scored as they are, or refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("lm_eval", reason="needs the packages of a stack")

import torch
from safetensors.torch import load_file, save_file

from tests.train.made_models import SEQUENCE, VOCABULARY, job_at, samples_of
from tests.train.small import MakeJob, documents
from twinrun.checkpoints.conversion import write_folder
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.model_folder import digest_of_folder
from twinrun.foundation.errors import InputError, RunError
from twinrun.protocol.evaluation import EvaluationJob, GivenModel, ModelScores
from twinrun.protocol.job import Checkpointing
from twinrun.protocol.models.mpt import MptShape
from twinrun.train.corpus import Origin, write_corpus
from twinrun.train.evaluation import evaluate
from twinrun.train.scoring import subject


def changed_config(folder: Path, file: str, **values: Any) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | values))


def without(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).unlink()


def not_numbers(folder: Path) -> None:
    """Make a row of the last norm what a training that diverged leaves."""
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.ln_f.bias"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def as_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    without(folder, "model.safetensors")


def with_code(folder: Path) -> None:
    """Ask for a class of code that lies beside the weights, which would leave a file."""
    (folder / "modeling_other.py").write_text(f"open({str(folder / 'executed')!r}, 'w').close()\n")
    mapped = {name: f"modeling_other.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    changed_config(folder, "config.json", model_type="other", auto_map=mapped)


def other_weights(folder: Path) -> None:
    """Let config.json lead to weights that no digest covers."""
    (folder / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    changed_config(folder, "config.json", transformers_weights="other.safetensors")


def weights_outside(folder: Path) -> None:
    """Let an index lead to weights of another folder, beside a file here of the same name."""
    name = "model-00001-of-00001.safetensors"
    (folder.parent / "x").mkdir()
    (folder.parent / "x" / name).write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").rename(folder / name)
    mapped = dict.fromkeys(load_file(folder / name), f"../x/{name}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": mapped}))


def moved_tokenizer(folder: Path) -> Path:
    """Put another tokenizer beside the one that is hashed."""
    return Path(shutil.copy(folder / "tokenizer.json", folder / "tokenizer.4.0.0.json"))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no-config": (lambda one: without(one, "config.json"), "no config.json"),
    "no-safetensors": (lambda one: without(one, "model.safetensors"), r"no \*.safetensors"),
    "pickle": (as_a_pickle, "pickles are never loaded"),
    "no-tokenizer": (lambda one: without(one, "tokenizer.json"), "no vocab.json with merges.txt"),
    "end-unset": (lambda one: changed_config(one, "tokenizer_config.json", eos_token=None), "no end token"),
    "end-unknown": (
        lambda one: changed_config(one, "tokenizer_config.json", eos_token="</s>"),
        "eos_token </s>, which is no token",
    ),
    "other-vocabulary": (lambda one: changed_config(one, "config.json", vocab_size=100), "another model's"),
    "missing-tensor": (without_a_tensor, "1 tensor, transformer.h.1.mlp.c_fc.weight first"),
    "other-weights": (other_weights, "config.json:transformers_weights: .* of another place"),
    "weights-outside": (weights_outside, "weight_map: .* of another place"),
    "tokenizer-outside": (
        lambda one: changed_config(one, "tokenizer_config.json", tokenizer_file=str(moved_tokenizer(one))),
        "tokenizer_config.json:tokenizer_file: .* of another place",
    ),
    "tokenizer-of-a-version": (
        lambda one: changed_config(
            one, "tokenizer_config.json", fast_tokenizer_files=[moved_tokenizer(one).name]
        ),
        "tokenizer_config.json:fast_tokenizer_files.0: .* of another place",
    ),
    "code": (with_code, "cannot load the"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_folder_that_is_no_whole_model_is_refused(tmp_path: Path, name: str) -> None:
    job = job_at(tmp_path, names=("fixture-contexts",))
    FAULTS[name][0](tmp_path / "model")
    with pytest.raises(InputError) as caught:
        evaluate(job)
    assert re.search(FAULTS[name][1], str(caught.value))
    assert str(tmp_path / "model") in str(caught.value)
    assert not (tmp_path / "model" / "executed").exists()


def test_a_model_of_another_digest_or_tokenizer_is_refused_with_both(tmp_path: Path) -> None:
    job = job_at(tmp_path, names=("fixture-contexts",), tokenizer="1" * 64)
    with pytest.raises(InputError, match="another tokenizer") as caught:
        evaluate(job)
    assert caught.value.allowed == "1" * 64
    own = str(caught.value.found).removeprefix("sha256 ")
    assert evaluate(job.model_copy(update={"tokenizer": own})).tokenizer_sha256 == own
    assert job.model is not None
    other = job.model.model_copy(update={"sha256": "2" * 64})
    with pytest.raises(InputError, match="the model has another digest") as caught:
        evaluate(job.model_copy(update={"model": other}))
    assert (caught.value.found, caught.value.allowed) == (digest_of_folder(tmp_path / "model"), "2" * 64)


def test_weights_that_are_swapped_while_they_are_loaded_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_at(tmp_path, names=("fixture-contexts",))
    before = evaluate(job).models[0]
    file, load = tmp_path / "model" / "model.safetensors", subject.load_model
    whole = file.read_bytes()

    def swapped(folder: Path, **options: Any) -> Any:
        tensors = load_file(file)
        tensors["transformer.ln_f.bias"] += 1
        save_file(tensors, file, metadata={"format": "pt"})
        loaded = load(folder, **options)
        file.write_bytes(whole)
        return loaded

    monkeypatch.setattr(subject, "load_model", swapped)
    with pytest.raises(InputError, match="changed while it was scored"):
        evaluate(job)
    assert digest_of_folder(tmp_path / "model") == before.sha256


def test_weights_that_are_no_numbers_end_the_run(tmp_path: Path) -> None:
    job = job_at(tmp_path, names=("fixture-contexts",))
    not_numbers(tmp_path / "model")
    with pytest.raises(RunError, match="logits are not numbers"):
        evaluate(job)


def trained_job(folder: Path, make_job: MakeJob) -> EvaluationJob:
    """Return the job of a small MPT of bytes that is scored after 3 steps, and after all 6."""
    data = folder / "data"
    origin = Origin(source="standard-library", sequence=SEQUENCE)
    write_corpus(data, origin, documents(200))
    shape = MptShape(width=16, heads=2, layers=1, vocabulary=VOCABULARY, sequence=SEQUENCE)
    trained = make_job(shape=shape, trainer="plain", global_batch=4, microbatch=2)
    saved = Checkpointing(place=str(folder / "checkpoints"), steps=3)
    training = trained.model_copy(update={"data": str(data), "checkpointing": saved})
    return job_at(folder, names=("fixture-contexts",), model=None, training=training, every=3)


def test_a_checkpoint_scores_as_the_run_that_saved_it(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    run = evaluate(trained_job(tmp_path / "run", make_job))
    for own in run.models:
        assert own.step is not None
        store = FolderStore(tmp_path / "run" / "checkpoints")
        folder = write_folder(store, own.step, tmp_path / f"model-{own.step}")
        given = GivenModel(folder=str(folder))
        again = evaluate(job_at(tmp_path / str(own.step), names=("fixture-contexts",), model=given))
        (found,) = again.models
        named = found.model_copy(update={"step": own.step, "checkpoint_sha256": own.checkpoint_sha256})
        assert times_aside(named) == times_aside(own)
        assert again.training is None
    last = tmp_path / str(run.models[-1].step)
    assert samples_of(last) == samples_of(tmp_path / "run")


def times_aside(scores: ModelScores) -> dict[str, Any]:
    content = scores.model_dump()
    for task in content["tasks"]:
        del task["seconds"], task["forward_seconds"]
    return content
