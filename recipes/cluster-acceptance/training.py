"""Training of a small model: on one device, on each node, and on all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from peers import gathered, host, join

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import CheckError, UndecidedError

STEPS, BATCH, WIDTH = 6, 48, 16
TOLERANCE = 1e-3
EXCLUDE = "exclude the node, then test its memory"


def train_one_gpu(job: ChecksJob) -> None:
    """Hold the gradients of this device against those of float64 on the processor."""
    import torch  # noqa: PLC0415 - only in the check's own process

    from twinrun.train.device import device_of  # noqa: PLC0415

    found = gradients(device_of(job))
    exact = gradients(torch.device("cpu"), torch.float64)
    for step, ((one,), (other,)) in enumerate(zip(found, exact, strict=True), 1):
        if not abs(one - other) <= TOLERANCE * other:
            raise CheckError(
                f"the gradient of step {step} is {one:.6g} instead of {other:.6g}", remedy=EXCLUDE
            )


def train_one_node(job: ChecksJob) -> None:
    """Hold the gradients of the ranks of each node against those of one."""
    import torch.distributed as dist  # noqa: PLC0415

    device = join(job)
    hosts = gathered(host(), device)
    groups = {
        name: dist.new_group([rank for rank, one in enumerate(hosts) if one == name])
        for name in dict.fromkeys(hosts)
    }
    _train_together(device, groups[host()])


def train_many_nodes(job: ChecksJob) -> None:
    """Hold the gradients of all ranks against those of one."""
    import torch.distributed as dist  # noqa: PLC0415

    device = join(job)
    if len(set(gathered(host(), device))) < 2:
        raise UndecidedError("one node is allocated", remedy="run it on two nodes or more")
    _train_together(device, dist.group.WORLD)


def _train_together(device: Any, group: Any) -> None:
    """Hold each rank's gradients, before they are summed, against what most compute of its part."""
    import torch.distributed as dist  # noqa: PLC0415

    members = dist.get_process_group_ranks(group)
    place = members.index(dist.get_rank())
    own = [norms[0] for norms in gradients(device, parts=len(members), places=[place], group=group)]
    alone = gradients(device, parts=len(members), places=range(len(members)))
    everyone = gathered([host(), own, alone], device)
    answers = [everyone[rank] for rank in members]
    for step in range(STEPS):
        # After the first wrong sum the weights of all are wrong, so that step alone says whose part it is.
        nodes = [
            name
            for part, (name, found, _) in enumerate(answers)
            if _is_far(found[step], [alone[step][part] for _, _, alone in answers])
        ]
        if nodes:
            raise CheckError(
                f"gradients of step {step + 1} are not what one rank computes, on {', '.join(nodes)}",
                remedy=EXCLUDE,
                nodes=nodes,
            )


def _is_far(found: float, expected: Sequence[float]) -> bool:
    usual = statistics.median(expected)
    return abs(found - usual) > TOLERANCE * abs(usual)


def gradients(
    device: Any, dtype: Any = None, *, parts: int = 1, places: Sequence[int] = (0,), group: Any = None
) -> list[list[float]]:
    """Train on some of the parts of each batch and return the norm of each part's gradient at each step.

    Args:
        dtype: float32 if left out.
        group: sums gradients over its ranks, which have the other parts; None where all parts are here.
    """
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    model, optimizer = fresh(device, dtype)
    parameters = list(model.parameters())
    found = []
    for step in range(STEPS):
        norms, total = [], [torch.zeros_like(one) for one in parameters]
        for place in places:
            x, y = (part.tensor_split(parts)[place].to(device, dtype) for part in batch(step))
            each = torch.autograd.grad((model(x) - y).square().sum() / BATCH, parameters)
            norms.append(float(sum(one.square().sum() for one in each).sqrt()))
            total = [one + more for one, more in zip(total, each, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=True):
            if group is not None:
                dist.all_reduce(gradient, group=group)
            parameter.grad = gradient
        optimizer.step()
        found.append(norms)
    return found


def fresh(device: Any, dtype: Any) -> Any:
    """Return a model and its optimizer, the same at every call."""
    import torch  # noqa: PLC0415

    torch.manual_seed(1)
    layers = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(2 * WIDTH, 1)
    model = torch.nn.Sequential(*layers).to(device, dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> Any:
    """Return inputs and targets of a step."""
    import torch  # noqa: PLC0415

    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True).sin()
