"""The library: read a record, judge, hold curves together, fingerprint, predict, verify and sign checkpoints.

Examples are run as tests from a checkout. `ROOT` is the project whose recipes, GPUs and metrics are used: the
checkout that this package is imported from, or what an installed wheel ships.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twinrun.checkpoints import verification
from twinrun.checkpoints.conversion import read_folder, write_folder
from twinrun.checkpoints.folder import MANIFEST, SIGNATURE, DamagedError, FolderStore
from twinrun.checkpoints.model_folder import CONFIG
from twinrun.checkpoints.tokenizer import FILE as TOKENIZER
from twinrun.execution.engine import log_folder
from twinrun.execution.ranks import FOLDER, all_pending
from twinrun.execution.schedulers import client_of
from twinrun.foundation.errors import InputError, TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import read_text
from twinrun.foundation.signatures import SUFFIX, signature_of, signers_of
from twinrun.foundation.terminal import say
from twinrun.manifests.cluster import load_site
from twinrun.manifests.recipe import summary
from twinrun.planning.project import Project
from twinrun.predict import prediction
from twinrun.predict.calibration import SOFTWARE, calibration
from twinrun.predict.parallel_layout import Machines
from twinrun.predict.request import LayoutSettings
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

__all__ = ["ROOT", "checkpoints", "convert", "fingerprint"]
__all__ += ["judge", "parity", "predict", "read", "recipes", "sign", "waiting", "would_run"]

_SHIPPED = Path(__file__).with_name("checkout")
ROOT = _SHIPPED if _SHIPPED.is_dir() else Path(__file__).resolve().parents[2]
_FEW, _QUESTION = 50, re.compile(r'^question *= *"(.+)" *$', re.MULTILINE)
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
    return dict(selection.plan.description.marks(selection.recipe.published.fingerprint))


def predict(
    model: str,
    gpu: str,
    *,
    nodes: int = 1,
    devices_per_node: int = 8,
    global_batch: int = 512,
    software: str = SOFTWARE,
    root: Path = ROOT,
) -> prediction.Prediction:
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
    settings = LayoutSettings(global_batch=global_batch)
    machines = Machines.of(
        Project(root).gpus[gpu], nodes=nodes, devices_per_node=devices_per_node, network=None
    )
    shape, known = member(model, place="model"), calibration().of(software)
    return prediction.predict(settings.subject(shape, machines, known))


def checkpoints(
    place: Path, *, step: int | None = None, verify: bool = True, root: Path = ROOT
) -> list[dict[str, Any]]:
    """Return what each checkpoint of a place holds, by step; `damage` says what is wrong with it.

    Args:
        step: one of them.
        verify: hold every byte against its digest, and the checkpoints against each other.

    Raises:
        InputError: there is no checkpoint, or none after this step.

    >>> checkpoints(Path("nowhere"))
    Traceback (most recent call last):
    twinrun.foundation.errors.InputError: error: nowhere: no checkpoint here
    ...
    """
    store, signers = FolderStore(place), signers_of(root)
    read_one = verification.verify if verify else verification.read_manifest
    good, rows = [], dict[int | str, dict[str, Any]]()
    for one in _steps(store, step):
        try:
            manifest = read_one(store, one)
            facts: dict[str, Any] = {"step": one, "damage": None, "verified": verify}
            facts |= {"samples": manifest.samples, "bytes": sum(part.bytes for part in manifest.parts)}
            facts |= {"tensors": len(manifest.tensors), "writer": manifest.token, "layout": manifest.layout}
            facts["sha256"] = manifest.digest()
            if verify:
                facts["signature"] = verification.signature_at(store, one, facts["sha256"], signers=signers)
            rows[one] = facts
            good.append(manifest)
        except (DamagedError, InputError) as error:
            rows[one] = {"step": one, "damage": str(error)}
    # A damaged checkpoint is named by its files, and not by how it fits to the others.
    for name, fault in verification.faults_between(store, good) if verify and step is None else ():
        rows[name] = {"step": name, "damage": rows.get(name, {}).get("damage") or str(fault)}
    # Steps come first, and then what has a name alone.
    return [rows[name] for name in sorted(rows, key=lambda one: (isinstance(one, str), one))]


def _steps(store: FolderStore, step: int | None) -> list[int]:
    steps = store.steps()
    if not steps:
        hint, found = "name a folder such as runs/RECIPE/RUN/checkpoints/POINT", "no folder `step-...`"
        raise InputError("no checkpoint here", place=store.place, found=found, hint=hint)
    if step is not None and step not in steps:
        raise InputError("no such checkpoint", place=store.place, found=step, allowed=steps)
    return steps if step is None else [step]


def convert(place: Path, out: Path, *, step: int | None = None, tokenizer: Path | None = None) -> Path:
    """Write weights of transformers as a checkpoint of ours, or a checkpoint as transformers has it.

    Args:
        place: which of the two lies here is seen.
        step: of checkpoints, the one to write; the newest when left out.
        tokenizer: of checkpoints, the tokenizer.json that the model was trained with.

    Raises:
        InputError: nothing is there, what is there does not convert, or `out` is no place to write.
        DamagedError: what is there is not what was written.

    >>> convert(Path("nowhere"), Path("out"))
    Traceback (most recent call last):
    twinrun.foundation.errors.InputError: error: nowhere: no checkpoint here
    ...
    """
    if (place / CONFIG).is_file():
        for option, given in (("--step", step), ("--tokenizer", tokenizer)):
            if given is not None:
                raise InputError("weights of transformers have none", place=option, found=given)
        read_folder(place, FolderStore(out))
        return out
    store = FolderStore(place)
    folder = write_folder(store, _steps(store, step)[-1], out, tokenizer=tokenizer)
    if not (folder / TOKENIZER).is_file():
        say("no tokenizer was written: `--tokenizer FILE` names the tokenizer.json", file=sys.stderr)
    return folder


def sign(what: Path, *, key: Path, root: Path = ROOT) -> Path:
    """Sign a record or the newest checkpoint of a place with an SSH key, and return where the signature is.

    Raises:
        InputError: there is nothing to sign, what is there does not hold, or the key does not sign.

    >>> sign(Path("nowhere"), key=Path("key"))
    Traceback (most recent call last):
    twinrun.foundation.errors.InputError: error: nowhere: nothing to sign
    ...
    """
    if what.suffix == ".json" or (what / "record.json").is_file():
        file = what / "record.json" if what.is_dir() else what
        signature = file.with_name(f"{file.name}{SUFFIX}")
        write_atomically(signature, signature_of(read(file, root=root).record.sha256, key=key))
        return signature
    store = FolderStore(what)
    if not (steps := store.steps()):
        allowed = "a record, a run folder, a submission, or a place with checkpoints"
        raise InputError("nothing to sign", place=str(what), allowed=allowed)
    manifest = verification.verify(store, steps[-1])
    store.attach(steps[-1], SIGNATURE, signature_of(manifest.digest(), key=key))
    return Path(f"{store.file(steps[-1], MANIFEST)}{SUFFIX}")


def waiting(runs: Path, *, root: Path = ROOT) -> list[dict[str, Any]]:
    """Return each job that a detached run below a folder has submitted and not collected, and its state.

    >>> waiting(Path("nowhere"))
    []
    """
    rows = []
    for run in sorted({file.parent.parent for file in runs.glob(f"*/*/{FOLDER}/*.json")}):
        for one in all_pending(run):
            try:
                scheduler = client_of(load_site(root, one.site))
                submission = scheduler.adopt(one.handle, point=one.point, logs=log_folder(run, one.point))
                ended, nodes = submission.poll() is not None, submission.nodes
                state = f"runs on {nodes[0]}" if nodes else "waits for nodes"
                state = "ended, --resume collects it" if ended else state
            except TwinrunError as error:
                state = error.message
            rows.append({"run": run, "state": state, **dict(one)})
    return rows


def recipes(*, root: Path = ROOT) -> tuple[list[dict[str, object]], list[TwinrunError]]:
    """Return what each recipe asks and would do here, and what is wrong with those that cannot be read.

    Where there are more than 50, only their questions are read.

    >>> recipes()[0][-1]["question"]
    "Is one Triton kernel of RMSNorm near the memory's rate on both vendors?"
    """
    project, rows, faults = Project(root), list[dict[str, object]](), list[TwinrunError]()
    for name in project.recipe_names:
        try:
            if len(project.recipe_names) <= _FEW:
                rows.append(summary(project.recipe(name)) | {"here": would_run(name, root=root)})
            else:
                found = _QUESTION.search(read_text(project.root / "recipes" / name / "recipe.toml"))
                question = found[1] if found else project.recipe(name).recipe.question
                rows.append({"recipe": f"recipes/{name}", "question": question})
        except TwinrunError as error:
            faults.append(error)
    return rows, faults


def would_run(recipe: str, *, root: Path = ROOT) -> str:
    """Return in words what a run of a recipe would be on this machine, and how long; or why it cannot be.

    >>> would_run("nowhere")
    'cannot run: unknown recipe'
    """
    try:
        selection = select(Project(root), Request(recipe=recipe))
    except TwinrunError as error:
        return f"cannot run: {error.message}"
    chosen = {"time": "time not estimated"} | {choice.name: choice.value for choice in selection.choices}
    return ", ".join(chosen[name] for name in ("scale", "model", "time") if name in chosen)
