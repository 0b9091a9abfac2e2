"""Matrix products of a model's blocks in fp8, by a recipe of torchao's own.

Embedding, norms, attention and the head stay in bf16, and parameters in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from torch import nn

from twinrun.foundation.errors import MachineError
from twinrun.protocol.training import TrainingJob

PACKAGE = "torchao.float8"


def convert(blocks: nn.Module, job: TrainingJob) -> None:
    """Let every linear layer of `blocks` multiply in fp8; a processor computes the rounded factors in fp32.

    Raises:
        MachineError: the interpreter of the ranks has no torchao.
    """
    try:
        package: Any = import_module(PACKAGE)
    except ImportError as error:
        raise MachineError(
            f"cannot import {PACKAGE}: {error}",
            place="--set precision",
            found="fp8",
            allowed="bf16, fp32, or an environment with torchao",
            hint="--engine venv installs the lock of a stack that has it",
        ) from None
    recipe = package.Float8LinearConfig.from_recipe_name(job.training.fp8_recipe)
    package.convert_to_float8_training(blocks, config=replace(recipe, emulate=not job.accelerator))


def described(job: TrainingJob) -> str:
    """Return which recipe computes the products of `job`, empty where they are in another type."""
    if job.training.precision != "fp8":
        return ""
    where = "on the device" if job.accelerator else "emulated: rounded to fp8, multiplied in fp32"
    return f"torchao {job.training.fp8_recipe}, {where}"
