"""How often curves of one experiment are taken for two, and what is found that is another experiment.

`python tools/measure_parity.py OUT.csv [--seeds 1 2 3 4] [--precision fp32] [--steps 200]` trains the
smoke model of mpt1b-convergence on this processor, in this process. Each seed has a run; control runs, as a
recipe makes them; honest runs, which sum in yet other orders (microbatch, formula of attention, features,
samples); and runs with one thing altered. A line of OUT.csv is a run: its largest relative difference from
the run of its seed at the first step, over the first steps and over all. `docs/concepts/parity.csv` has such
lines, which tests judge as parity does.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from twinrun.foundation.files import write_atomically
from twinrun.protocol.models import member
from twinrun.protocol.training import Optimizer, Training, TrainingJob
from twinrun.train.corpus import sample_hash
from twinrun.train.data import collate
from twinrun.train.data_parallel import WholeModel, fused_loss
from twinrun.train.optimizer import learning_rate
from twinrun.train.worker import build_model
from twinrun.workloads.curve_distance import FIRST, largest_difference

MODEL = "mpt-smoke"
GLOBAL_BATCH, CONTROLS, HONEST = 8, 12, 10
SAMPLES = 4096
COLUMNS = (
    "precision",
    "seed",
    "kind",
    "name",
    "at_first_step",
    f"over_first_{FIRST}_steps",
    "over_all_steps",
)
Samples = list[dict[str, Any]]


class MeasuredRun(NamedTuple):
    """One training: what is altered, and in which order it sums."""

    kind: str
    name: str
    control: int = 0
    microbatch: int = 4
    attention: str = "sdpa"
    optimizer: tuple[tuple[str, Any], ...] = ()
    alter_model: Callable[[nn.Module], object] = id
    alter_order: Callable[[list[int]], list[int]] = list
    data_seed: int = 0


def main() -> int:
    """Read the command line, train, and write a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    samples = _samples(member(MODEL, place=MODEL).sequence)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for seed in given.seeds:
        settings = {"seed": seed, "steps": given.steps, "precision": given.precision}
        first = trained(MeasuredRun("run", "run"), samples, settings)
        for run in _runs():
            curve = trained(run, samples, settings)
            apart = [largest_difference([first[:size], curve[:size]])[0] for size in (1, FIRST, given.steps)]
            writer.writerow((given.precision, seed, run.kind, run.name, *(f"{one:.4g}" for one in apart)))
            print(seed, run.kind, run.name, *(f"{one:.3g}" for one in apart), file=sys.stderr, flush=True)
    write_atomically(given.out, text.getvalue())
    return 0


def _runs() -> Iterator[MeasuredRun]:
    yield from (
        MeasuredRun("control", f"control {number}", control=number) for number in range(1, CONTROLS + 1)
    )
    ways = itertools.cycle(itertools.product((1, 2, 4, 8), ("sdpa", "math")))
    for number, (microbatch, attention) in zip(range(HONEST), ways, strict=False):
        name = f"microbatch {microbatch}, {attention}, order {number}"
        yield MeasuredRun("honest", name, control=100 + number, microbatch=microbatch, attention=attention)
    for number, run in enumerate(ALTERED):
        yield run._replace(control=200 + number)


def _without_bias(model: nn.Module) -> None:
    bias = model.get_parameter("blocks.0.norm_1.bias")
    bias.requires_grad_(False)


def _swapped(order: list[int]) -> list[int]:
    """Return the order with the global batches of steps 101 and 102 in each other's place."""
    begin, middle, end = (step * GLOBAL_BATCH for step in (100, 101, 102))
    return [*order[:begin], *order[middle:end], *order[begin:middle], *order[end:]]


ALTERED = (
    MeasuredRun("altered", "learning rate + 1 %", optimizer=(("learning_rate", 3.03e-3),)),
    MeasuredRun("altered", "learning rate + 0.01 %", optimizer=(("learning_rate", 3.0003e-3),)),
    MeasuredRun("altered", "beta2 0.96", optimizer=(("betas", (0.9, 0.96)),)),
    MeasuredRun("altered", "beta2 0.9501", optimizer=(("betas", (0.9, 0.9501)),)),
    MeasuredRun("altered", "epsilon x 10", optimizer=(("epsilon", 1e-7),)),
    MeasuredRun("altered", "epsilon x 1.1", optimizer=(("epsilon", 1.1e-8),)),
    MeasuredRun("altered", "two batches swapped", alter_order=_swapped),
    MeasuredRun("altered", "a layer norm without bias", alter_model=_without_bias),
    MeasuredRun("altered", "another seed of the data", data_seed=1),
)


def trained(run: MeasuredRun, samples: Samples, settings: dict[str, Any]) -> tuple[float, ...]:
    """Return the losses of a run."""
    job = _job(run, settings)
    model = build_model(job, torch.device("cpu"))
    run.alter_model(model)
    engine = WholeModel(job, model, fused_loss(model))
    drawn = np.random.default_rng([job.training.seed, run.data_seed]).permutation(len(samples))
    order = run.alter_order([int(place) for place in drawn])
    losses = []
    for step in range(job.training.steps):
        places = order[step * GLOBAL_BATCH : (step + 1) * GLOBAL_BATCH]
        batch = collate([samples[place] for place in places], control=run.control)
        rate = learning_rate(step, job.training.optimizer, step_tokens=job.step_tokens)
        losses.append(float(engine.step(batch, rate)))
    return tuple(losses)


def _job(run: MeasuredRun, settings: dict[str, Any]) -> TrainingJob:
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 10, "decay_steps": settings["steps"]}
    training = Training(
        model=MODEL,
        data="standard-library",
        global_batch=GLOBAL_BATCH,
        microbatch=run.microbatch,
        attention="math" if run.attention == "math" else "sdpa",
        sharding="none",
        compile=False,
        trainer="plain",
        warmup_steps=1,
        optimizer=Optimizer.model_validate(optimizer | dict(run.optimizer)),
        **settings,
    )
    return TrainingJob(
        recipe="mpt1b-convergence",
        point="devices=1",
        world_size=1,
        accelerator=False,
        out="",
        metrics="",
        attempt="microbatch",
        shape=member(MODEL, place=MODEL),
        training=training,
        microbatch=run.microbatch,
        sharding="none",
        data="",
        control=run.control,
    )


def _samples(sequence: int) -> Samples:
    """Return sequences of bytes of the interpreter's sources, each with its hash."""
    wanted, content = SAMPLES * sequence, bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        content += path.read_bytes()
        if len(content) >= wanted:
            break
    content_bytes: npt.NDArray[np.uint8] = np.frombuffer(bytes(content[:wanted]), np.uint8)
    tokens: npt.NDArray[np.int64] = content_bytes.astype(np.int64).reshape(-1, sequence)
    return [{"tokens": one, "hash": sample_hash(one)} for one in tokens]


if __name__ == "__main__":
    sys.exit(main())
