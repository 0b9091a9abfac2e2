"""One case of RMSNorm: the kernel checked against float64, then timed in turns with PyTorch's own."""

from __future__ import annotations

from functools import partial

import torch
from kernel import backend, reference, rms_norm
from torch import Tensor
from torch.nn import functional

from twinrun.foundation.errors import InputError
from twinrun.protocol.bench import COPY, BenchJob, BenchResult, Work
from twinrun.train import rank
from twinrun.train.bench import CheckedCall, Session
from twinrun.train.measure import Function, copy_rate, distance

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
ALLOWED_ERRORS = {"fp16": 1e-3, "bf16": 5e-3}
EPSILON = 1e-6


def bench(job: BenchJob) -> BenchResult:
    """Measure the case in every dtype that it names."""
    session = Session(job)
    for dtype in job.settings["dtypes"]:
        if dtype not in DTYPES:
            raise InputError("unknown", place="--set options.dtypes", found=dtype, allowed=list(DTYPES))
        measure(session, dtype)
    on_gpu = session.device.type != "cpu"
    return session.result([copy_rate(session.device)] if on_gpu and session.timed else [])


def measure(session: Session, dtype: str) -> None:
    """Check and time the kernel beside `torch.nn.functional.rms_norm`."""
    rows, columns = session.job.settings["rows"], session.job.settings["columns"]
    made = {"device": session.device, "generator": session.generator}
    x_RC = torch.randn(rows, columns, **made).to(DTYPES[dtype])
    weight_C = torch.randn(columns, **made).to(DTYPES[dtype])
    exact_RC = reference(x_RC.double(), weight_C.double(), EPSILON)
    kind, own = backend(session.device), functional.rms_norm
    ours = reference if kind == "reference" else rms_norm
    session.measure(
        labels={"operation": "norm", "dtype": dtype, "backend": kind},
        title=f"RMSNorm forward, {rows} x {columns}",
        work=Work(formula="read-once-write-once", amounts={COPY: 2 * x_RC.nbytes}),
        allowed_error=ALLOWED_ERRORS[dtype],
        ours=checked("ours", lambda: ours(x_RC, weight_C, EPSILON), exact_RC),
        baselines=[checked("torch", partial(own, x_RC, (columns,), weight_C, EPSILON), exact_RC)],
    )


def checked(name: str, call: Function, exact_RC: Tensor) -> CheckedCall:
    """Return `call` with how far its result is from the reference."""
    return CheckedCall(
        implementation=name,
        version=str(torch.__version__),
        call=call,
        errors={"output": distance(call(), exact_RC)},
    )


if __name__ == "__main__":
    rank.run(bench, BenchJob)
