"""Checkpoints of our models as transformers loads them, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.train.checkpoint_jobs import saving
from tests.train.small import SHAPE as MPT_SHAPE
from tests.train.small import MakeJob
from twinrun.checkpoints.conversion import TensorReader
from twinrun.checkpoints.folder import FolderStore
from twinrun.checkpoints.verification import verify
from twinrun.cli.records import checkpoint
from twinrun.foundation.errors import InputError
from twinrun.protocol.models.llama import LlamaShape
from twinrun.protocol.models.mamba import MambaShape
from twinrun.protocol.training import TrainingJob
from twinrun.train.checkpoint.session import NoCheckpoints, checkpoints_of
from twinrun.train.checkpoint.state import InPlaceState
from twinrun.train.corpus import Corpus
from twinrun.train.metrics import Meter
from twinrun.train.models import build_of

MAMBA_SHAPE = MambaShape(width=32, layers=2, vocabulary=64, sequence=16, states=4, convolution=3, rank=5)
# As Llama 3.2 has it, and as Llama 3.1: one matrix for embedding and head, and two.
LLAMA = LlamaShape(
    width=32, heads=4, groups=2, layers=2, hidden=48, tied=True, rope_factor=32, vocabulary=64, sequence=16
)
SHAPES = {
    "mpt": MPT_SHAPE,
    "mamba": MAMBA_SHAPE,
    "llama": LLAMA,
    "llama-untied": LLAMA.model_copy(update={"tied": False, "rope_factor": 1}),
}
# What each family asks of a training.
SETTINGS = {"mamba": {"kernels": "reference", "layout": "token-major"}}
TOLERANCE = 1e-5


def built(job: TrainingJob) -> Any:
    """Return a model with no two tensors alike, norms and biases included."""
    model: Any = build_of(job.shape)(job.shape, training=job.training)
    model.initialise(3)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model


def session(job: TrainingJob, model: Any, corpus: Corpus) -> NoCheckpoints:
    """Return the checkpoints of a run of one rank whose first step was taken."""
    optimizer = torch.optim.AdamW(model.parameters())
    assert job.checkpointing
    if not job.checkpointing.source:
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
    meter = Meter(job, torch.device("cpu"))
    return checkpoints_of(job, corpus=corpus, parts=lambda: InPlaceState(model, optimizer), meter=meter)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=list(SHAPES))
def saved(
    request: pytest.FixtureRequest,
    make_job: MakeJob,
    corpus: Corpus,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, TrainingJob]:
    """A model and the job that saved it."""
    shape = request.param
    job = make_job(shape=shape, steps=2, warmup_steps=1, **SETTINGS.get(shape.family, {}))
    job = saving(job, tmp_path_factory.mktemp("saved") / "place")
    model = built(job)
    saves = session(job, model, corpus)
    saves.after_step(2)
    saves.wait()
    return model, job


def place_of(job: TrainingJob) -> str:
    assert job.checkpointing
    return job.checkpointing.place


def convert(place: Path | str, out: Path) -> Path:
    assert checkpoint("convert", Path(place), out=out).code == 0
    return out


@pytest.fixture
def converted(saved: tuple[Any, TrainingJob], tmp_path: Path) -> Path:
    """The model as a folder of transformers."""
    return convert(place_of(saved[1]), tmp_path / "converted")


def weights(place: Path | str, step: int) -> dict[str, bytes]:
    """Return the bytes of every tensor of the model."""
    store = FolderStore(Path(place))
    manifest = verify(store, step)
    names = [name for name in manifest.tensors if name.startswith("model.")]
    reader = TensorReader(store, manifest)
    return {name: reader.read(name).tobytes() for name in names}


def test_transformers_computes_the_same_logits(saved: tuple[Any, TrainingJob], converted: Path) -> None:
    loaded, notes = transformers.AutoModelForCausalLM.from_pretrained(
        converted, torch_dtype="auto", output_loading_info=True
    )
    assert not any(notes.values()), notes
    assert type(loaded).__name__ == json.loads((converted / "config.json").read_text())["architectures"][0]
    tokens_BS = torch.randint(64, (3, 16), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        ours, theirs = saved[0](tokens_BS), loaded.eval()(tokens_BS).logits
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_weights_come_back_bit_for_bit(
    saved: tuple[Any, TrainingJob], converted: Path, tmp_path: Path
) -> None:
    before = weights(place_of(saved[1]), 2)
    assert weights(convert(converted, tmp_path / "back"), 0) == before
    # What transformers writes itself, in several files and without our digests.
    model = transformers.AutoModelForCausalLM.from_pretrained(converted)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    assert weights(convert(tmp_path / "theirs", tmp_path / "again"), 0) == before


def test_a_run_begins_from_converted_weights(
    saved: tuple[Any, TrainingJob], converted: Path, corpus: Corpus, tmp_path: Path
) -> None:
    model, job = saved
    source = convert(converted, tmp_path / "back")
    own = saving(job, tmp_path / "own", source=str(source))
    fresh = built(job)
    assert session(own, fresh, corpus).resume() == 0
    for name, parameter in fresh.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    other = job.model_copy(update={"shape": job.shape.model_copy(update={"layers": 1})})
    with pytest.raises(InputError, match=r"shape\.layers: the weights are of another model"):
        session(saving(other, tmp_path / "other", source=str(source)), fresh, corpus).resume()


CHANGES = {
    "mpt": ("activation_function", "gelu_new"),
    "gpt2": ("activation_function", "gelu_new"),
    "mamba": ("tie_word_embeddings", True),
    "llama": ("rope_scaling", {"rope_type": "yarn", "factor": 8.0}),
}


def test_what_our_models_cannot_hold_is_refused(converted: Path, tmp_path: Path) -> None:
    file = converted / "config.json"
    config = json.loads(file.read_text())
    key, value = CHANGES[config["model_type"]]
    for changed, said in (
        ({key: value}, "rope_type is yarn" if key == "rope_scaling" else f"{key}: our "),
        ({"model_type": "bert"}, "model_type: no family of ours is such a model"),
        ({"vocab_size": 65}, "has other tensors"),
        ({"vocab_size": None}, "not the sizes of a"),
    ):
        file.write_text(json.dumps(config | changed))
        with pytest.raises(InputError, match=said):
            convert(converted, tmp_path / "back")
    file.write_text(json.dumps(config))
    tensors = load_file(converted / "model.safetensors")
    save_file(tensors | {"adapter": torch.zeros(2)}, converted / "model.safetensors")
    with pytest.raises(InputError, match=r"adapter: our .* has other tensors"):
        convert(converted, tmp_path / "back")
    (converted / "model.safetensors").rename(converted / "pytorch_model.bin")
    with pytest.raises(InputError, match="no weights that can be read without executing them"):
        convert(converted, tmp_path / "back")
    assert not (tmp_path / "back").exists()
