"""Training of a small model: on one device, on each node, and on all."""

from __future__ import annotations

from typing import Any

from peers import gathered, host, join

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import Failed, Unknown

STEPS, BATCH, WIDTH = 6, 48, 16
TOLERANCE = 1e-3
EXCLUDE = "exclude the node, then test its memory"


def train_one_gpu(job: ChecksJob) -> None:
    """Hold the losses of this device against those of float64 on the processor."""
    import torch  # noqa: PLC0415 - only in the check's own process

    from twinrun.train.device import device_of  # noqa: PLC0415

    found = losses(device_of(job), torch.float32)
    demand_close(found, losses(torch.device("cpu"), torch.float64))


def train_one_node(job: ChecksJob) -> None:
    """Hold the losses of the ranks of each node together against those of one."""
    import torch.distributed as dist  # noqa: PLC0415

    device = join(job)
    hosts = gathered(host(), device)
    groups = {
        name: dist.new_group([rank for rank, one in enumerate(hosts) if one == name])
        for name in dict.fromkeys(hosts)
    }
    _train_together(device, groups[host()])


def train_many_nodes(job: ChecksJob) -> None:
    """Hold the losses of all ranks together against those of one."""
    device = join(job)
    if len(set(gathered(host(), device))) < 2:
        raise Unknown("one node is allocated", remedy="run it on two nodes or more")
    _train_together(device, None)


def _train_together(device: Any, group: Any) -> None:
    import torch  # noqa: PLC0415

    found, expected = losses(device, torch.float32, group=group, joined=True), losses(device, torch.float32)
    far = [abs(one - other) > TOLERANCE * abs(other) for one, other in zip(found, expected, strict=True)]
    told = gathered([host(), any(far)], device)
    nodes = list(dict.fromkeys(name for name, bad in told if bad))
    if nodes:
        raise Failed(
            f"the losses of many ranks are not those of one on {', '.join(nodes)}",
            remedy=EXCLUDE,
            nodes=nodes,
        )


def losses(device: Any, dtype: Any, *, group: Any = None, joined: bool = False) -> list[float]:
    """Train a small model and return its losses; with other ranks, on a part of each batch."""
    import torch.distributed as dist  # noqa: PLC0415

    model, optimizer = fresh(device, dtype)
    place, ranks = (dist.get_rank(group), dist.get_world_size(group)) if joined else (0, 1)
    found = []
    for step in range(STEPS):
        x, y = (part.tensor_split(ranks)[place].to(device, dtype) for part in batch(step))
        loss = (model(x) - y).square().sum() / BATCH
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        for tensor in (*(one.grad for one in model.parameters()), total) if joined else ():
            dist.all_reduce(tensor, group=group)
        optimizer.step()
        found.append(float(total))
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


def demand_close(found: list[float], expected: list[float]) -> None:
    """Raise Failed where losses are apart."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True), 1):
        if not abs(one - other) <= TOLERANCE * abs(other):
            raise Failed(f"the loss of step {step} is {one:.6g} instead of {other:.6g}", remedy=EXCLUDE)
