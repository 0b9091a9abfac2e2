"""The library: read a record, judge it, hold two curves against each other, fingerprint, predict.

Examples are run as tests from a checkout. `ROOT` is the project whose recipes, GPUs and metrics are used: the
checkout that this package is imported from, or what an installed wheel ships.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from twinrun.planning.project import Project
from twinrun.predict.calibration import SOFTWARE, basis
from twinrun.predict.prediction import Prediction
from twinrun.predict.request import LayoutSettings, machines_of, predict_at
from twinrun.protocol.models import member
from twinrun.results.judge import judged
from twinrun.results.judged import Judged
from twinrun.results.reading import read_record
from twinrun.results.record import Record
from twinrun.results.verdicts import Verdict
from twinrun.runs.selection import Request, select
from twinrun.workloads.curve_distance import Parity
from twinrun.workloads.curve_distance import parity as hold_curves
from twinrun.workloads.settings import Value
from twinrun.workloads.workload import ControlledCurve

__all__ = ["ROOT", "fingerprint", "judge", "parity", "predict", "read"]

_SHIPPED = Path(__file__).with_name("checkout")
ROOT = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).resolve().parents[2]
# Two curves differ at their first step by the rounding of bf16 at most: half of its last bit, doubled.
_ROUNDING = 2.0**-8


def read(path: str | os.PathLike[str], *, root: Path = ROOT) -> Judged:
    """Read a record, or the record of a run folder, and judge it by the claims as they stand.

    Raises:
        InputError: it is missing, not a record, or was changed after it was written.

    >>> found = read(ROOT / "tests" / "data" / "records" / "mpt7b-scaling.json")
    >>> found.plan.recipe, found.points[0].measurement("step-time").unit
    ('mpt7b-scaling', 's')
    """
    return read_record(Path(path), Project(root))


def judge(record: Record, *, root: Path = ROOT) -> tuple[Verdict, ...]:
    """Judge a record by its recipe's claims as they stand, in the published order.

    >>> found = read(ROOT / "tests" / "data" / "records" / "mpt7b-scaling.json")
    >>> [verdict.claim for verdict in judge(found.record)][:2]
    ['throughput-1-node', 'throughput-32-nodes']
    """
    return judged(record, Project(root)).verdicts


def parity(a: Sequence[float], b: Sequence[float], *, controls: Sequence[Sequence[float]] = ()) -> Parity:
    """Hold two loss curves of one experiment against each other, inside what control runs of `a` show.

    Args:
        a: losses by step, in nats per token.
        b: losses of the other run, at the same steps.
        controls: curves of repetitions of `a` that sum in other orders; eight or more decide.

    >>> curve = [4.0 * 0.99**step for step in range(200)]
    >>> repeats = [[loss * (1 + 1e-6 * (1 + n / 10)) for loss in curve] for n in range(8)]
    >>> parity(curve, [loss * (1 + 1e-6) for loss in curve], controls=repeats).outcome
    'inside'
    """
    first, second = (
        ControlledCurve(
            name=name,
            values=tuple(values),
            controls=tuple(map(tuple, further)),
            configuration={},
            origins={},
            arithmetic="bf16",
            rounding=_ROUNDING,
        )
        for name, values, further in (("a", a, controls), ("b", b, ()))
    )
    return hold_curves(first, second)


def fingerprint(recipe: str, *, scale: str = "paper", root: Path = ROOT) -> dict[str, Value]:
    """Return every field that decides whether a run of a recipe is the published experiment.

    Args:
        recipe: its name, or its folder wherever it lies.

    Raises:
        InputError: no such recipe, or a manifest that does not hold.

    >>> fingerprint("mpt7b-scaling")["global_batch"]
    1536
    """
    request = Request(recipe=recipe, scale=scale, vendor="cpu", engine="host", dry=True)
    selection = select(Project(root), request)
    return dict(selection.description.marks(selection.recipe.published.fingerprint))


def predict(
    model: str,
    gpu: str,
    *,
    nodes: int = 1,
    devices_per_node: int = 8,
    global_batch: int = 512,
    software: str = SOFTWARE,
    root: Path = ROOT,
) -> Prediction:
    """Predict memory and time of a training step of a member of a model family.

    Args:
        gpu: id of a row of images/gpus.toml.
        global_batch: sequences of an optimizer step over all devices.
        software: generation of software that the time is for.

    Raises:
        InputError: no such model or GPU, or a count that does not divide.

    >>> found = predict("mpt-1b", "h100-80gb", nodes=2)
    >>> round(found.memory.bytes / 2**30) < 80
    True
    """
    settings = LayoutSettings(model=model, global_batch=global_batch)
    machines = machines_of(
        Project(root).gpus[gpu], nodes=nodes, devices_per_node=devices_per_node, network=None
    )
    return predict_at(member(model, place="model"), machines, settings, basis(software))
