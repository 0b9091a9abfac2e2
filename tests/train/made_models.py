"""Models that transformers makes, and jobs that score them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import tests.train.planted  # noqa: F401 - adds its tasks
from tests.train.small import LOADED
from twinrun.checkpoints.tokenizer import BYTES, tokenizer_files
from twinrun.protocol.evaluation import EvaluationJob, NamedTask, Sample

VOCABULARY, SEQUENCE = 320, 192
# What ranks of an evaluation import, the parts that transformers and the harness import late among it.
MODULES = (
    "twinrun.train.evaluation",
    "tests.train.planted",
    *LOADED,
    "lm_eval.evaluator",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "gpt_neox", "llama", "mpt")),
)
# Models of three families and sizes, as transformers makes them.
SIZES = {
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3
    ),
    "gpt-neox": transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        initializer_range=0.3,
    ),
    "llama": transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    ),
}


def model_at(folder: Path, family: str = "gpt2") -> Path:
    """Write a model of transformers with byte tokens and drawn weights, and return its folder."""
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(SIZES[family]).save_pretrained(folder)
    files = tokenizer_files(
        {"tokenizer": BYTES}, vocabulary=VOCABULARY, sequence=SEQUENCE, file=None, place="test"
    )
    assert files is not None
    for name, content in files.content.items():
        (folder / name).write_bytes(content)
    return folder


def job_at(
    folder: Path, *, names: tuple[str, ...], ranks: int = 1, family: str = "gpt2", **settings: Any
) -> EvaluationJob:
    """Return the job of a model that lies in the job's folder."""
    content = {
        "recipe": "mpt-chinchilla",
        "point": f"devices={ranks}",
        "world_size": ranks,
        "accelerator": False,
        "out": str(folder),
        "metrics": str(folder / "metrics.jsonl"),
        "attempt": "1",
        "shots": 0,
        "batch": 8,
        "precision": "fp32",
        "limit": 12,
        "kept": str(folder / "kept"),
        "model": {"folder": str(model_at(folder / "model", family))},
        "tasks": tuple(NamedTask(name=name, rule="per-token", kind="fixture") for name in names),
    }
    return EvaluationJob.model_validate(content | settings)


def samples_of(folder: Path) -> list[Sample]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return [Sample.model_validate_json(line) for line in lines]
