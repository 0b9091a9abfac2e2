"""One case of the benchmark: each call checked against float64, then timed in turns with its baseline."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from twinrun.protocol.bench import COPY, BenchJob, BenchResult, Work
from twinrun.train import rank
from twinrun.train.bench import CheckedCall, Session
from twinrun.train.measure import Function, copy_rate, distance

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALLOWED_ERRORS = {"fp32": 1e-5, "bf16": 1e-2}


def bench(job: BenchJob) -> BenchResult:
    """Measure the case in every dtype that it names."""
    session = Session(job)
    for name in job.settings["dtypes"]:
        measure(session, name)
    on_gpu = session.device.type != "cpu"
    return session.result([copy_rate(session.device)] if on_gpu and session.timed else [])


def measure(session: Session, dtype: str) -> None:
    """Check and time one call: layer normalisation, to be replaced by the publication's."""
    rows, columns = session.job.settings["rows"], session.job.settings["columns"]
    x_RC = torch.randn(rows, columns, device=session.device, generator=session.generator).to(DTYPES[dtype])
    reference_RC = written_out(x_RC.double())
    session.measure(
        labels={"operation": "norm", "dtype": dtype},
        title="layer normalisation, forward",
        work=Work(formula="read-once-write-once", amounts={COPY: 2 * x_RC.nbytes}),
        allowed_error=ALLOWED_ERRORS[dtype],
        ours=checked("ours", lambda: written_out(x_RC), reference_RC),
        baselines=[checked("fused", lambda: layer_norm(x_RC, (columns,)), reference_RC)],
    )


def written_out(x_RC: Tensor) -> Tensor:
    """Normalise each row of `x_RC`."""
    centred_RC = x_RC - x_RC.mean(-1, keepdim=True)
    return centred_RC * (centred_RC.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def checked(name: str, call: Function, reference_RC: Tensor) -> CheckedCall:
    """Return `call` with how far its result is from the reference."""
    return CheckedCall(
        implementation=name,
        version=str(torch.__version__),
        call=call,
        errors={"output": distance(call(), reference_RC)},
    )


if __name__ == "__main__":
    rank.run(bench, BenchJob)
