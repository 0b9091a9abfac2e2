"""What training rests on: checkpoints, weights and data that arrive as they were written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from peers import gathered, host, join, unlike
from training import EXCLUDE, STEPS, batch, fresh

from twinrun.protocol.checks import ChecksJob
from twinrun.train.checks import CheckError

SAMPLES_PER_SHARD, SHARDS_PER_RANK = 64, 2


def checkpoint_restart(job: ChecksJob) -> None:
    """Stop training halfway, load what was saved into a fresh model, and go on."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load, save  # noqa: PLC0415

    from twinrun.train.device import device_of  # noqa: PLC0415

    device = device_of(job)
    file = Path(job.out) / f"acceptance-{host()}.safetensors"
    model, optimizer = fresh(device, torch.float32)
    _steps(model, optimizer, range(STEPS // 2))
    file.write_bytes(save(_state(model, optimizer)))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    _steps(model, optimizer, range(STEPS // 2, STEPS))
    again, resumed = fresh(device, torch.float32)
    content = read_file(file)
    if hashlib.sha256(content).hexdigest() != digest:
        raise CheckError("the checkpoint is read other than it was written", remedy="test the file system")
    _restore(again, resumed, load(content))
    _steps(again, resumed, range(STEPS // 2, STEPS))
    file.unlink()
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        if not torch.equal(one, other):
            raise CheckError("after the restart the weights are others", remedy=EXCLUDE)


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    momenta = optimizer.state_dict()["state"].items()
    return model.state_dict() | {f"momentum.{index}": one["momentum_buffer"] for index, one in momenta}


def _restore(model: Any, optimizer: Any, saved: dict[str, Any]) -> None:
    model.load_state_dict({name: saved[name] for name in model.state_dict()})
    state = optimizer.state_dict()
    parameters = range(len(state["param_groups"][0]["params"]))
    state["state"] = {index: {"momentum_buffer": saved[f"momentum.{index}"]} for index in parameters}
    optimizer.load_state_dict(state)


def _steps(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        parameter = next(model.parameters())
        x, y = (part.to(parameter.device) for part in batch(step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def model_distribution(job: ChecksJob) -> None:
    """Give every rank the first one's weights and compare their digests."""
    import torch.distributed as dist  # noqa: PLC0415

    device = join(job)
    digest = hashlib.sha256()
    for tensor in weights(device):
        dist.broadcast(tensor, 0)
        digest.update(received(tensor).cpu().numpy().tobytes())
    answers = gathered([host(), digest.hexdigest()], device)
    odd = unlike({f"{rank}": found for rank, (_, found) in enumerate(answers)})
    if odd:
        nodes = list(dict.fromkeys(answers[int(rank)][0] for rank in odd))
        raise CheckError(f"other weights at rank {', '.join(odd)}", remedy=EXCLUDE, nodes=nodes)


def weights(device: Any) -> list[Any]:
    """Return tensors that differ from rank to rank."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(size, generator=generator).to(device) for size in (1, 1000, 1 << 18)]


def received(tensor: Any) -> Any:
    """Return a tensor as it came."""
    return tensor


def data_partitioning(job: ChecksJob) -> None:
    """Write shards on the first rank, read each on one rank, and count the shards."""
    device, rank = join(job), int(os.environ.get("RANK", "0"))
    ranks = len(gathered("start", device))
    folder, count = Path(job.out) / f"acceptance-shards-{job.attempt}", ranks * SHARDS_PER_RANK
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for shard in range(count):
            (folder / f"{shard}.bin").write_bytes(samples(shard))
    gathered("written", device)
    own = mine(rank, ranks, count)
    spoilt = [shard for shard in own if read_file(folder / f"{shard}.bin") != samples(shard)]
    found = gathered([host(), spoilt, list(own)], device)
    bad = {name: ", ".join(map(str, spoilt)) for name, spoilt, _ in found if spoilt}
    if bad:
        shown = ", ".join(f"{name} shard {shards}" for name, shards in bad.items())
        raise CheckError(
            f"shards are read other than written: {shown}", remedy="test the file system", nodes=list(bad)
        )
    if sorted(shard for _, _, shards in found for shard in shards) != list(range(count)):
        raise CheckError("not every shard is read exactly once", remedy="make ranks and world size agree")


def samples(shard: int) -> bytes:
    """Return the content of a shard: its samples, by number."""
    first = shard * SAMPLES_PER_SHARD
    return b"".join(sample.to_bytes(8, "little") for sample in range(first, first + SAMPLES_PER_SHARD))


def mine(rank: int, ranks: int, count: int) -> range:
    """Return the shards of a rank."""
    return range(rank, count, ranks)


def read_file(file: Path) -> bytes:
    """Return a file's content."""
    return file.read_bytes()
