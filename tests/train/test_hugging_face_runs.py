"""Checkpoints of real runs, whoever trained them, as transformers loads them with their tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the packages of a stack")
pytest.importorskip("transformers", reason="needs the packages of a stack")

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tests.train.checkpoint_jobs import saving
from tests.train.small import LAYOUTS, LOADED, WITH_DEEPSPEED, MakeJob, launch
from twinrun.checkpoints.conversion import TensorReader
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.tokenizer import BYTES, END_OF_TEXT, SEPARATOR, tokenizer_files
from twinrun.checkpoints.verification import verify
from twinrun.cli.records import checkpoint
from twinrun.foundation.errors import InputError
from twinrun.foundation.files import sha256_of_bytes
from twinrun.protocol.layout import Layout
from twinrun.protocol.models.llama import LlamaShape
from twinrun.protocol.models.mamba import MambaShape
from twinrun.protocol.models.mpt import MptShape
from twinrun.train.corpus import TOKEN, Origin, Tokens, write_corpus
from twinrun.train.models import family_of

TRAINING = "twinrun.train.training"
SIZES: dict[str, Any] = {"width": 32, "layers": 2, "vocabulary": 320, "sequence": 16}
SHAPES: dict[str, Any] = {
    "mpt": MptShape(heads=2, **SIZES),
    "mamba": MambaShape(states=4, convolution=3, rank=5, **SIZES),
    "llama": LlamaShape(heads=4, groups=2, hidden=48, tied=True, rope_factor=32, **SIZES),
}
STEPS = 2
TOLERANCE = 1e-5
RUNS = {
    "composer": (1, {"trainer": "composer"}, {}),
    "plain, two ranks that share": (2, {"trainer": "plain"}, {}),
    "deepspeed, ZeRO-3": (2, {"trainer": "deepspeed"}, {"sharding": "none"}),
}


def documents() -> Iterator[tuple[Tokens, int]]:
    draw = np.random.default_rng(3)
    for _ in range(12):
        text: Tokens = draw.integers(32, 127, size=60).astype(TOKEN)
        yield np.append(text, TOKEN.type(SEPARATOR)), len(text)


@pytest.fixture(scope="module")
def bytes_of_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "bytes"
    write_corpus(folder, Origin(source=BYTES, sequence=SIZES["sequence"]), documents())
    return folder


def convert(place: Path, out: Path, tokenizer: Path | None = None) -> Path:
    assert checkpoint("convert", place, out=out, tokenizer=tokenizer).code == 0
    return out


def trained(place: Path, shape: Any, training: Any) -> Any:
    """Return our model with the weights of the last checkpoint."""
    store = FolderStore(place)
    manifest = verify(store, STEPS)
    model = family_of(shape).build(shape, training=training)
    reader = TensorReader(store, manifest)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = torch.from_numpy(reader.read(f"model.{name}").view("f4"))
            parameter.copy_(found.view(parameter.shape))
    return model.eval()


@pytest.mark.needs("deepspeed")
@pytest.mark.parametrize(("family", "run"), list(zip(SHAPES, RUNS, strict=True)))
def test_a_run_becomes_a_model_of_transformers_with_its_tokenizer(
    make_job: MakeJob, bytes_of_text: Path, tmp_path: Path, family: str, run: str
) -> None:
    ranks, trainer, options = RUNS[run]
    kernels = {"kernels": "reference", "layout": "token-major"} if family == "mamba" else {}
    shape = SHAPES[family]
    job = make_job(
        shape=shape, steps=STEPS, warmup_steps=1, world_size=ranks, **trainer, **kernels, **options
    )
    job = job.model_copy(update={"data": str(bytes_of_text)})
    if trainer["trainer"] == "deepspeed":
        job = job.model_copy(update={"layout": Layout(framework="deepspeed", zero=3)})
    script, modules = (LAYOUTS, WITH_DEEPSPEED) if job.layout else (TRAINING, LOADED)
    done = launch(script, saving(job, tmp_path / "place"), modules=modules)
    assert done.returncode == 0, done.stderr[-4000:]

    folder = convert(tmp_path / "place", tmp_path / "out")
    loaded, notes = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(notes.values()), notes
    read = transformers.AutoTokenizer.from_pretrained(folder)
    text = "Grüße, 世界!\n\t x"
    tokens = read(text)["input_ids"]
    assert tokens == list(text.encode())
    assert read.decode(tokens) == text
    assert read.eos_token_id == loaded.config.eos_token_id == SEPARATOR
    assert read(f"a{END_OF_TEXT}")["input_ids"] == [ord("a"), SEPARATOR]

    tokens_BS = torch.tensor([tokens[: SIZES["sequence"]]])
    with torch.no_grad():
        ours = trained(tmp_path / "place", shape, job.training)(tokens_BS)
        theirs = loaded.eval()(tokens_BS).logits
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def tokenizer_at(path: Path, *, end: str = END_OF_TEXT) -> str:
    """Write a tokenizer of its own and return its digest."""
    made = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    made.add_special_tokens([end])
    made.save(str(path))
    return sha256_of_bytes(path.read_bytes())


def test_the_tokenizer_of_the_data_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path))
    fetched = tmp_path / "downloads" / "owner" / "name" / "revision" / "tokenizer.json"
    fetched.parent.mkdir(parents=True)
    known = {"tokenizer": tokenizer_at(fetched)}

    def files(identity: dict[str, str], file: Path | None = None, vocabulary: int = 4) -> Any:
        return tokenizer_files(identity, vocabulary=vocabulary, sequence=16, file=file, place="checkpoint")

    found = files(known)
    assert (found.end, found.content["tokenizer.json"]) == (3, fetched.read_bytes())
    assert json.loads(found.content["tokenizer_config.json"])["model_max_length"] == 16
    assert files({"tokenizer": "0" * 64}) is None
    assert files({}) is None
    assert files({}, fetched).end == 3

    other = tmp_path / "other.json"
    tokenizer_at(other, end="<stop>")
    for identity, file, vocabulary, said in (
        (known, other, 4, "trained with another tokenizer"),
        ({"tokenizer": BYTES}, other, 4, "trained with another tokenizer"),
        ({}, other, 4, "no end of text"),
        (known, None, 3, "tokens that the model has no row for"),
        ({"tokenizer": BYTES}, None, 256, "tokens that the model has no row for"),
    ):
        with pytest.raises(InputError, match=said):
            files(identity, file, vocabulary)
    other.write_text('{"model": []}')
    with pytest.raises(InputError, match=r"not a tokenizer\.json"):
        files({}, other)
