"""lm-eval as this project runs it: models and tasks of the harness, with what it lacks added as subclasses.

The harness builds prompts, asks the model and picks answers. Ours are one more rule, by which the
log-likelihood of an answer is divided by its tokens, and ranks of torch.distributed in place of accelerate's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.registry import register_metric
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM

from twinrun.foundation.errors import InputError, RunError
from twinrun.protocol.evaluation import ScoreRule
from twinrun.train import device as devices
from twinrun.train import rank

# The metric of a task for each rule; the last is ours.
METRICS: Mapping[ScoreRule, str] = {
    "none": "acc",
    "per-character": "acc_norm",
    "per-byte": "acc_bytes",
    "per-token": "acc_tokens",
}
# Seconds between two lines of progress.
REPORT_SECONDS = 2.0
Report = Callable[[int], None]


@register_metric(
    metric="acc_tokens", higher_is_better=True, output_type=["multiple_choice"], aggregation="mean"
)
def acc_tokens(items: Any) -> Any:
    """Return the items as they are: `RuledTask` computes the metric, as the harness does its own."""
    return items


class RankedModel(HFLM):
    """A model of transformers on each rank, which share the documents of a task."""

    def __init__(self, model: Any, *, tokenizer: Any, batch: int | str, report: Report) -> None:
        super().__init__(
            pretrained=model, tokenizer=tokenizer, batch_size=batch, backend="causal", max_batch_size=512
        )
        self._report, self._asked, self._reported = report, 0, time.monotonic()
        self.forward_seconds = 0.0
        self._encoded: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        if dist.is_initialized():
            self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks one after another."""
        if self.world_size == 1:
            return tensor
        mine = tensor.reshape(-1)
        found = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(found, mine)
        return torch.cat(found)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def restart_count(self, report: Report) -> None:
        """Count sequences and time of the next task from 0; it finds a batch of its own."""
        self._report, self._asked, self.forward_seconds = report, 0, 0.0
        self.batch_sizes: dict[int, int] = {}
        self._encoded.clear()

    @property
    def largest_batch(self) -> int:
        """Sequences of one forward pass; of those that memory decided the largest, 0 where none was asked."""
        fixed = self.batch_size_per_gpu
        return fixed if isinstance(fixed, int) else max(self.batch_sizes.values(), default=0)

    def _loglikelihood_tokens(self, requests: Any, *arguments: Any, **named: Any) -> Any:
        longest = max(len(answer) for _, _, answer in requests)
        if longest > self.max_length:
            # The harness cuts contexts, and ends by an assertion of its own where an answer does not fit.
            raise InputError(
                "an answer is longer than the model takes at once",
                place="tasks",
                found=f"{longest} tokens",
                allowed=f"up to {self.max_length}",
            )
        return super()._loglikelihood_tokens(requests, *arguments, **named)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context and of its answer, which the harness and the rules both ask for."""
        pair = (context, continuation)
        if pair not in self._encoded:
            self._encoded[pair] = super()._encode_pair(context, continuation)
        return self._encoded[pair]

    def _model_call(self, inps: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        rank.beat("scores a batch", step=self._asked)
        devices.synchronise(self.device)
        began = time.perf_counter()
        logits = super()._model_call(inps, *arguments, **named)
        devices.synchronise(self.device)
        self.forward_seconds += time.perf_counter() - began
        self._asked += len(inps)
        if time.monotonic() > self._reported + REPORT_SECONDS:
            self._reported = time.monotonic()
            self._report(self._asked)
        return logits

    def _detect_batch_size(self, *arguments: Any, **named: Any) -> Any:
        asked, seconds = self._asked, self.forward_seconds
        found = super()._detect_batch_size(*arguments, **named)
        # Trials that look for a batch size answer no request.
        self._asked, self.forward_seconds = asked, seconds
        return found


# Returns the tokens of a context and of what follows it.
Encode = Callable[[str, str], tuple[Any, Any]]


class RuledTask(ConfigurableTask):
    """A task of the harness that can also be scored by tokens."""

    def __init__(self, config: dict[str, Any], *, encode: Encode) -> None:
        """Take a configuration as the harness has it.

        Args:
            encode: as the model is asked.
        """
        self._encode = encode
        self._tokens: dict[str, list[int]] = {}
        super().__init__(config=config)

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **named: Any) -> Any:
        """Return the harness's requests, and note how many tokens each answer has."""
        found = super().construct_requests(doc, ctx, **named)
        asked = found if isinstance(found, list) else [found]
        self._tokens[_key(doc)] = [len(self._encode(*one.args)[1]) for one in asked]
        return found

    def process_results(self, doc: dict[str, Any], results: Any) -> Any:
        """Return the harness's metrics and ours; raises RunError where the model gave no number."""
        likelihoods = [float(one[0]) for one in results]
        if any(np.isnan(likelihoods)):
            raise RunError(
                "the model's logits are not numbers",
                place=self.config.task,
                found=f"log-likelihoods {likelihoods}",
                hint="a training that diverged, or a precision that overflows",
            )
        found = super().process_results(doc, results)
        tokens = self._tokens[_key(doc)]
        gold = self.doc_to_text(doc) if self.multiple_input else self.doc_to_target(doc)
        right = largest_per_token(likelihoods, tokens) == self._number(doc, gold)
        return {**found, METRICS["per-token"]: float(right)}

    def _number(self, doc: dict[str, Any], gold: Any) -> Any:
        return self.doc_to_choice(doc).index(gold) if isinstance(gold, str) else gold


def largest_per_token(likelihoods: list[float], tokens: list[int]) -> int:
    """Return which answer has the largest log-likelihood for each of its tokens, the first of equal ones.

    LLM Foundry takes the lowest perplexity, exp(-log-likelihood / tokens), which is the same answer.
    """
    return int(np.argmax(np.array(likelihoods) / np.array(tokens, dtype=float)))


def _key(doc: dict[str, Any]) -> str:
    return json.dumps(doc, sort_keys=True, default=str)
