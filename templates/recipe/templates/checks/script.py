"""Checks of devices, nodes and the allocation: a function passes by returning and fails by raising CheckError."""

from __future__ import annotations

import shutil

from twinrun.protocol.checks import ChecksJob
from twinrun.train import checks
from twinrun.train.checks import CheckError

FREE_GIB = 1


def device_computes(job: ChecksJob) -> None:
    """Hold a product of matrices on this rank's device against the same on the CPU."""
    import torch  # noqa: PLC0415 - only in the check's own process, so that each opens its device anew

    from twinrun.train.device import device_of  # noqa: PLC0415

    a, b = torch.rand(2, 256, 256)
    found = (a.to(device_of(job)) @ b.to(device_of(job))).cpu()
    if not torch.allclose(found, a @ b, rtol=1e-2):
        raise CheckError("a product of matrices is wrong", remedy="take this device out of the allocation")


def disk_is_free(job: ChecksJob) -> None:
    """Demand some space where the run writes."""
    free = shutil.disk_usage(job.out).free / (1 << 30)
    if free < FREE_GIB:
        raise CheckError(f"{free:.2f} GiB are free, {FREE_GIB} needed", remedy="free some space")


def ranks_add_up(job: ChecksJob) -> None:
    """Sum a number of every rank over all of them."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from twinrun.train import rank, ranks  # noqa: PLC0415
    from twinrun.train.device import device_of  # noqa: PLC0415

    device = device_of(job)
    ranks.join(job)
    total = torch.tensor([float(rank.number())], device=device)
    if job.world_size > 1:
        dist.all_reduce(total)
    expected = job.world_size * (job.world_size - 1) / 2
    if total.item() != expected:
        raise CheckError(f"the ranks add up to {total.item():g} instead of {expected:g}")


if __name__ == "__main__":
    checks.main({
        "device-computes": device_computes,
        "disk-is-free": disk_is_free,
        "ranks-add-up": ranks_add_up,
    })
