"""One buffer size: each all-reduce checked against the exact sum, its bytes counted, then timed."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from algorithms import expected_bytes
from links import Links
from numbers_to_sum import DTYPES, error, fill
from reducers import Reducer, chosen
from torch import Tensor

from twinrun.foundation.errors import InputError
from twinrun.protocol.bench import BenchJob, BenchResult, Traffic
from twinrun.train import rank
from twinrun.train.bench import CheckedCall, Session, bus_bytes_of_all_reduce
from twinrun.train.device import collectives

# Relative distance from the exact sum. Each of the ring's N - 1 sums of a chunk rounds, or is compressed.
ALLOWED_ERRORS = {"fp32": 1e-5, "bf16": 3e-2, "int32": 1e-12, "int64": 1e-12}
ALLOWED_LOSSES = {"bf16": 3e-2, "fp8": 2e-1, "int8": 5e-2, "int8-feedback": 2e-2}
# With feedback the error is that of the mean of so many sums of the same numbers.
SUMS_WITH_FEEDBACK = 8


def bench(job: BenchJob) -> BenchResult:
    """Measure every algorithm and compression of a case in every dtype."""
    if job.world_size < 2:
        raise InputError("an all-reduce needs two ranks", place="--set devices", found=1, allowed="2 or more")
    session, links = Session(job), Links()
    settings: dict[str, Any] = job.settings
    reducers = chosen(settings, links)
    for dtype in settings["dtypes"]:
        kind = DTYPES[dtype]
        buffer = torch.empty(settings["bytes"] // kind.itemsize, dtype=kind, device=session.device)
        library = checked(session, buffer, Reducer.of_library())
        for reducer in reducers:
            # Integers are summed, not compressed.
            if reducer.compression == "none" or dtype == "fp32":
                measure(session, links, buffer, reducer=reducer, dtype=dtype, library=library)
        del buffer, library
    return session.result()


def measure(
    session: Session, links: Links, buffer: Tensor, *, reducer: Reducer, dtype: str, library: CheckedCall
) -> None:
    """Check, count and time one call beside the library's."""
    links.reset()
    ours = checked(session, buffer, reducer)
    traffic = None
    if reducer.compression == "none":
        expected, formula = expected_bytes(reducer.algorithm, buffer.nbytes, links.size)
        counted = links.busiest_bytes(session.device)
        traffic = Traffic(counted=counted, expected=expected, formula=formula)
    # Sums of sums would overflow while they are timed; zeros stay as they are and take as long.
    buffer.zero_()
    session.measure(
        labels={"algorithm": reducer.algorithm, "dtype": dtype, "compression": reducer.compression},
        title=f"all-reduce of {buffer.nbytes:,} bytes, {reducer.algorithm}",
        allowed_error=ALLOWED_LOSSES.get(reducer.compression, ALLOWED_ERRORS[dtype]),
        ours=ours,
        baselines=[library],
        bus_bytes=bus_bytes_of_all_reduce(buffer.nbytes, links.size),
        traffic=traffic,
        refuse=False,
    )
    reducer.forget()


def checked(session: Session, buffer: Tensor, reducer: Reducer) -> CheckedCall:
    """Return a call with how far its sum is from the exact one."""
    sums = SUMS_WITH_FEEDBACK if reducer.compression.endswith("feedback") else 1
    total = torch.zeros_like(buffer) if sums > 1 else buffer
    for _ in range(sums):
        fill(buffer, rank=rank.number(), seed=session.seed)
        reducer(buffer)
        if sums > 1:
            total += buffer / sums
    return CheckedCall(
        implementation=reducer.name,
        version=collectives(session.device) if reducer.name == "library" else str(torch.__version__),
        call=functools.partial(reducer, buffer),
        errors={"sum": error(total, ranks=dist.get_world_size(), seed=session.seed)},
    )


if __name__ == "__main__":
    rank.run(bench, BenchJob)
