"""GPT-2 as llm.c and nanoGPT build it: an MPT with the approximate GELU and GPT-2's initial weights."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor
from torch.nn.functional import gelu

from twinrun.protocol.models.mpt import MptShape
from twinrun.protocol.training import Training
from twinrun.train import training as trainers
from twinrun.train.models import DTYPES
from twinrun.train.models.mpt import MPT

DEVIATION = 0.02
RESIDUAL = ("attn.out_proj.weight", "ffn.down_proj.weight")


class Gpt2(MPT):
    """The decoder of GPT-2; projections onto the residual stream start smaller, by the depth."""

    gelu = staticmethod(partial(gelu, approximate="tanh"))
    compiled_gelu = gelu

    def deviation(self, name: str, parameter: Tensor) -> float:
        """Return the standard deviation of the initial values of a matrix."""
        return DEVIATION / math.sqrt(2 * len(self.blocks)) if name.endswith(RESIDUAL) else DEVIATION


def build(shape: MptShape, *, training: Training) -> Gpt2:
    """Return the model that every trainer trains, see `twinrun.train.training.main`."""
    return Gpt2(
        shape,
        dtype=DTYPES[training.precision],
        attention=training.attention,
        checkpointing=training.activation_checkpointing,
    )


if __name__ == "__main__":
    trainers.main(model=build)
