"""What one of two ranks of the tests of layouts does; run by torchrun, prints nothing when all is right."""

from __future__ import annotations

import copy
from collections.abc import Callable

import stages
import torch
import torch.distributed as dist
from shared_work import TrafficCounter
from torch.nn.parallel import DistributedDataParallel

from tests.train.small import SHAPE
from twinrun.protocol.models.llama import LlamaShape
from twinrun.train import rank as process
from twinrun.train.data import targets_of
from twinrun.train.models import Model
from twinrun.train.models.llama import Llama
from twinrun.train.models.mpt import MPT

RANKS = 2
LLAMA = LlamaShape(
    width=32, heads=4, groups=2, layers=2, hidden=48, tied=True, vocabulary=64, sequence=SHAPE.sequence
)
# Parts of the names of matrices whose rows are cut, and endings of those whose columns are.
COLUMNS = ("up_proj.", "gate_proj.", "q_proj.", "k_proj.", "v_proj.")
INNER = ("out_proj.weight", "down_proj.weight", "o_proj.weight")


def messages_are_counted() -> None:
    """Each collective is what the ring algorithm must send of it; whole numbers are no payload."""
    numbers, half = torch.ones(8), torch.ones(4)
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "allreduce_": (lambda: dist.all_reduce(numbers), 8.0),
        "_allgather_base_": (lambda: dist.all_gather_into_tensor(numbers, half), 4.0),
        "broadcast_": (lambda: dist.broadcast(numbers, src=0), 4.0),
        "reduce_": (lambda: dist.reduce(numbers, dst=0), 4.0),
    }
    for name, (call, expected) in calls.items():
        with (wire := TrafficCounter()):
            call()
            dist.all_reduce(torch.ones(100, dtype=torch.int64))
        assert dict(wire.elements) == {name: expected}, (name, wire.elements)
        assert wire.bytes == 4 * expected


def data_parallelism_sends_its_gradients_once() -> None:
    """The reducer's own messages are seen, though no line of Python sends them."""
    model = torch.nn.Linear(16, 16)
    parallel = DistributedDataParallel(model)
    for _ in range(2):
        with (wire := TrafficCounter()):
            parallel(torch.ones(2, 16)).sum().backward()
    assert wire.sent == 16 * 16 + 16, wire.elements


def cut_matrices_compute_the_same(whole: Model, rank: int) -> None:
    whole.initialise(3)
    parts = copy.deepcopy(whole)
    stages.split_tensors(parts, dist.group.WORLD, rank=rank)
    tokens_BS = torch.arange(2 * SHAPE.sequence).view(2, -1) % 64
    losses = [model(tokens_BS, targets_of(tokens_BS)) for model in (whole, parts)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    ours, theirs = dict(parts.named_parameters()), dict(whole.named_parameters())
    assert sum(one.numel() for one in ours.values()) < sum(one.numel() for one in theirs.values())
    for name, parameter in ours.items():
        expected = theirs[name].grad
        assert expected is not None
        if "Wqkv" in name:
            expected = torch.cat([part.chunk(RANKS)[rank] for part in expected.chunk(3)])
        elif any(part in name for part in COLUMNS):
            expected = expected.chunk(RANKS)[rank]
        elif name.endswith(INNER):
            expected = expected.chunk(RANKS, dim=1)[rank]
        torch.testing.assert_close(parameter.grad, expected, msg=lambda text, name=name: f"{name}: {text}")


def main() -> None:
    dist.init_process_group("gloo")
    messages_are_counted()
    data_parallelism_sends_its_gradients_once()
    for model in (MPT(SHAPE), Llama(LLAMA), Llama(LLAMA.model_copy(update={"tied": False}))):
        cut_matrices_compute_the_same(model, dist.get_rank())
    dist.barrier()
    process.end()


if __name__ == "__main__":
    main()
