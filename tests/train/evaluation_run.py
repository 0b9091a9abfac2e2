"""An evaluation whose rank dies before the forward pass that KILL_CALL counts to."""

from __future__ import annotations

import os
import signal
from typing import Any

from twinrun.protocol.evaluation import EvaluationJob
from twinrun.train import rank
from twinrun.train.evaluation import evaluate
from twinrun.train.scoring.harness import RankedModel

_forward = RankedModel._model_call
_left = int(os.environ.get("KILL_CALL", "-1"))


def die_or_ask(model: RankedModel, *arguments: Any, **named: Any) -> Any:
    """Ask the model as ever, or die at the call that was named."""
    global _left  # noqa: PLW0603 - counts the calls of a process
    _left -= 1
    if _left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return _forward(model, *arguments, **named)


if __name__ == "__main__":
    RankedModel._model_call = die_or_ask  # type: ignore[method-assign, assignment]
    rank.run(evaluate, EvaluationJob)
