"""The commands of twinrun: `invoke --list` shows them, `invoke --help run` explains one."""

from __future__ import annotations

from pathlib import Path

from invoke.context import Context
from invoke.exceptions import Exit

from twinrun.cli.console import amount, count, demand_with, demand_without, exit_on_error
from twinrun.cli.program import command, take_over

ROOT = Path(__file__).resolve().parent
take_over()


@command(
    iterable=["set", "checkpoint"],
    help={
        "recipe": "folder of the recipe, for example recipes/mpt7b-scaling",
        "vendor": "folder of images/vendors; what the machine has when left out",
        "stack": "folder of images/stacks; the recipe's current one when left out",
        "engine": "docker, apptainer, venv or host",
        "launcher": "who starts the ranks: torchrun, srun or mpirun",
        "scheduler": "who gives the machines: local or slurm; kubernetes is printed with --dry",
        "cluster": "site of cluster.toml, where the scheduler is",
        "scale": "smoke, node or paper",
        "set": "key=value, a field of the table of the recipe's workload; may be given many times",
        "controls": "control runs of the first point, which sum in other orders: 8 or more for a parity",
        "trace": "write digests by step and layer, for `invoke parity --trace`; nothing is compiled then",
        "checkpoint": "key=value: steps=N between saves, mode=exact or bounded, place and source",
        "leg": "the one leg to run, of a recipe whose run has several",
        "from": "where the leg before it has left its checkpoint: a run folder or s3://...",
        "out": "folder for the run instead of runs/",
        "track": "trackers to write the run for, separated by commas: tensorboard, mlflow, wandb",
        "resume": "go on with the newest unfinished run of the same plan, and with the jobs that it has",
        "require-signature": "go on only from checkpoints whose newest a name in allowed_signers has signed",
        "detach": "submit the jobs of all points and return; the same command with --resume collects them",
        "dry": "print the plan on a page and stop; with --json all of it",
        "yes": "start without a question also what takes long on a processor",
        "json": "print a summary as JSON on stdout and nothing else there",
    },
)
def run(
    context: Context,
    recipe: str,
    vendor: str = "",
    stack: str = "",
    engine: str = "",
    launcher: str = "",
    scheduler: str = "",
    cluster: str = "",
    scale: str = "",
    set: list[str] | None = None,
    controls: str = "",
    trace: bool = False,
    checkpoint: list[str] | None = None,
    leg: str = "",
    from_: str = "",
    out: str = "",
    track: str = "",
    resume: bool = False,
    require_signature: bool = False,
    detach: bool = False,
    dry: bool = False,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Run a published experiment and judge its claims."""
    with exit_on_error():
        from twinrun.cli import run as commands

        names = {"vendor": vendor, "stack": stack, "engine": engine, "launcher": launcher}
        names |= {"scheduler": scheduler, "cluster": cluster, "scale": scale}
        chosen = {key: name or None for key, name in names.items()}
        more = [] if (repeats := count(controls, "--controls")) is None else [f"controls={repeats}"]
        more += ["trace=true", "compile=false"] if trace else []
        request = commands.Request(
            recipe=recipe,
            settings=(*(set or ()), *more),
            checkpoint=tuple(checkpoint or ()),
            leg=count(leg, "--leg"),
            source=from_ or None,
            dry=dry,
            signed=require_signature,
            **chosen,
        )
        folder = Path(out) if out else None
        code = commands.run(
            ROOT, request, out=folder, resume=resume, detach=detach, as_json=json, yes=yes, track=track
        )
    raise Exit(code=code)


@command(
    help={
        "stack": "folder of images/stacks",
        "vendor": "folder of images/vendors; alone it means the stack that the recipes use there",
        "dry": "print the plan and stop; with --json all of it",
        "pull": "repository@sha256:DIGEST of a registry to take the image from instead",
        "push": "repository of a registry to push the image to; oras attaches SBOM and provenance",
        "sign": "cosign's key that signs what is pushed",
        "save": "FILE.tar to write the image to, or a folder for it and all that a build needs",
        "base": "tar of the locked root file system, where mmdebstrap cannot make it",
        "wheelhouse": "folder with all packages; nothing is downloaded then",
        "index": "URL of the framework's own package index; $TWINRUN_INDEX when left out",
        "allow-unverified": "accept pins that nobody could verify",
        "json": "print a summary as JSON on stdout and nothing else there",
    },
)
def build(
    context: Context,
    stack: str = "",
    vendor: str = "",
    dry: bool = False,
    pull: str = "",
    push: str = "",
    sign: str = "",
    save: str = "",
    base: str = "",
    wheelhouse: str = "",
    index: str = "",
    allow_unverified: bool = False,
    json: bool = False,
) -> None:
    """Build the image of a stack from its locks."""
    with exit_on_error():
        from twinrun.cli import stacks

        texts = {"vendor": vendor, "stack": stack, "pull": pull, "push": push, "sign": sign}
        paths = {"save": save, "base": base, "wheelhouse": wheelhouse}
        texts["index"] = index
        options: dict[str, object] = {name: text or None for name, text in texts.items()}
        options |= {name: Path(path).absolute() if path else None for name, path in paths.items()}
        stacks.build(ROOT, options | {"allow_unverified": allow_unverified}, dry=dry, as_json=json)


@command(
    iterable=["set"],
    help={
        "subject": "folder of a recipe that trains, or a model, for example mpt-7b or mpt-7b-4096",
        "gpu": "rows of images/gpus.toml, for example mi300x,h200",
        "nodes": "numbers of nodes, for example 1,8,32",
        "devices-per-node": "devices of a node, not cards",
        "network": "Gbit/s that a node sends, all its adapters together",
        "software": "generation of software that the prediction is for",
        "set": "key=value: global_batch, sequence, microbatch, tensor, pipeline, shards, precision, ...",
        "sweep": "show the cheapest distinct layouts that fit, on any of the GPUs and numbers of nodes",
        "goal": "of a sweep, tokens a second of all devices that a layout must reach",
        "tokens": "a budget of tokens, for which days are shown",
        "days": "of a sweep, how long the budget of tokens may take",
        "price": "of a device for an hour, one for all GPUs or one for each, for which a price is shown",
        "json": "print JSON",
    },
)
def predict(
    context: Context,
    subject: str,
    gpu: str = "",
    nodes: str = "1",
    devices_per_node: str = "",
    network: str = "",
    software: str = "twinrun-2026",
    set: list[str] | None = None,
    sweep: bool = False,
    goal: str = "",
    tokens: str = "",
    days: str = "",
    price: str = "",
    json: bool = False,
) -> None:
    """Predict memory and time of a training, with an interval, on GPUs that nobody has to have."""
    with exit_on_error():
        from twinrun.cli import predict as commands

        request = commands.PredictRequest(
            subject=subject,
            gpus=tuple(gpu.split(",")),
            nodes=tuple(count(one, "--nodes") or 0 for one in nodes.split(",")),
            devices_per_node=count(devices_per_node or "8", "--devices-per-node") or 0,
            chose_devices=bool(devices_per_node),
            network=amount(network, "--network"),
            software=software,
            settings=tuple(set or ()),
            sweep=sweep,
            goal=amount(goal, "--goal"),
            tokens=amount(tokens, "--tokens"),
            days=amount(days, "--days"),
            prices=tuple(amount(one, "--price") or 0.0 for one in price.split(",")) if price else (),
        )
        code = commands.predict(ROOT, request, as_json=json)
    raise Exit(code=code)


@command(
    iterable=["set"],
    help={
        "gpu": "id of a GPU of images/gpus.toml",
        "tokens-per-second": "what somebody says that a device, not a card, trains",
        "model": "member of a model family, a config.json, or a folder with one",
        "sequence": "tokens of a sequence; the model's when left out",
        "fp8": "hold it against the peak of fp8",
        "json": "print JSON",
    },
)
def peak(
    context: Context,
    gpu: str = "",
    tokens_per_second: str = "",
    model: str = "",
    sequence: str = "",
    fp8: bool = False,
    json: bool = False,
) -> None:
    """Say which share of a GPU's peak a training speed would be, and whether it can be true."""
    with exit_on_error():
        from twinrun.cli import predict as commands

        request = commands.PeakRequest(
            gpu=gpu,
            model=model,
            tokens_per_second=amount(tokens_per_second, "--tokens-per-second") or 0.0,
            sequence=count(sequence, "--sequence"),
            fp8=fp8,
        )
        code = commands.peak(ROOT, request, as_json=json)
    raise Exit(code=code)


@command(
    help={
        "a": "record.json or folder; with --scores samples.jsonl or the folder of an evaluation",
        "b": "another",
        "claims": "judge the claims between records instead",
        "scores": "say whether two models score the same instead, document by document",
        "margin": "of scores, the largest difference that counts as none, for example 0.02",
        "claim": "of scores, RECIPE/CLAIM: judge this claim about two models, by its own margin",
        "rerun": "run both sides in turns on this machine instead, A twice; a side may be a stack or a lock",
        "recipe": "of a rerun, the folder of the recipe",
        "metric": "of a rerun, row of metrics.toml, or a measurement by its name",
        "scale": "of a rerun, smoke, node or paper",
        "set": "of a rerun, key=value as `invoke run` takes it; may be given many times",
        "point": "of a rerun, the one point to run; the first when left out",
        "out": "of a rerun, the HTML file",
        "require-signature": "refuse a record without a signature of a name in allowed_signers",
        "json": "print JSON",
    },
)
def compare(
    context: Context,
    a: str,
    b: str,
    claims: bool = False,
    scores: bool = False,
    margin: str = "",
    claim: str = "",
    rerun: bool = False,
    recipe: str = "",
    metric: str = "",
    scale: str = "",
    set: list[str] | None = None,
    point: str = "",
    out: str = "",
    require_signature: bool = False,
    json: bool = False,
) -> None:
    """Explain what differs between two records, or hold their claims or scores against each other."""
    with exit_on_error():
        from twinrun.cli import compare as commands

        given = {"recipe": recipe, "metric": metric, "scale": scale, "set": set, "point": point, "out": out}
        signed = {"require-signature": require_signature}
        demand_with("--rerun", rerun, **given)
        if rerun:
            from twinrun.cli import history

            demand_without("--rerun", True, claims=claims, scores=scores, **signed)
            asked = history.asked(recipe, a, b, point=point, metric=metric, scale=scale, set=set, out=out)
            raise Exit(code=history.rerun(ROOT, asked, as_json=json))
        demand_with("--scores", scores, margin=margin, claim=claim)
        demand_without("--claim", bool(claim), margin=margin)
        demand_without("--scores", scores, claims=claims, **signed)
        if scores:
            allowed = amount(margin, "--margin")
            code = commands.scores(ROOT, Path(a), Path(b), margin=allowed, claim=claim, as_json=json)
        else:
            code = commands.compare(
                ROOT, Path(a), Path(b), claims=claims, as_json=json, signed=require_signature
            )
    raise Exit(code=code)


@command(
    iterable=["controls"],
    help={
        "a": "record, run folder or log: lines, CSV, JSON, TensorBoard, W&B; with --trace a trace",
        "b": "another",
        "controls": "logs, records or traces of runs that repeat A and sum in other orders; eight or more",
        "bound": "largest relative difference that counts as rounding, for example 1e-3",
        "series": "name of the loss inside the logs; the usual names when left out",
        "points": "of records, one point of A and one of B; those of one name when left out",
        "trace": "say at which step and layer two traces begin to differ instead",
        "out": "of records, the HTML file",
        "json": "print JSON",
    },
)
def parity(
    context: Context,
    a: str,
    b: str,
    controls: list[str] | None = None,
    bound: str = "",
    series: str = "",
    points: str = "",
    trace: bool = False,
    out: str = "",
    json: bool = False,
) -> None:
    """Say whether two loss curves are one but for rounding: 0 one curve, 1 they differ, 3 cannot say."""
    with exit_on_error():
        from twinrun.cli import parity as commands

        demand_without("--trace", trace, bound=bound, series=series, points=points, out=out)
        paths = [Path(one) for one in (a, b, *(controls or ()))]
        if trace:
            code = commands.traces(*paths[:2], controls=paths[2:], as_json=json)
        else:
            asked = commands.ParityRequest(
                bound=amount(bound, "--bound"), series=series, points=points, out=Path(out) if out else None
            )
            code = commands.parity(ROOT, *paths[:2], controls=paths[2:], asked=asked, as_json=json)
    raise Exit(code=code)


@command(
    help={
        "recipe": "folder of the recipe",
        "point": "one point of the records; all when left out",
        "metric": "row of metrics.toml; those that stand for the workload when left out",
        "out": "the HTML file",
        "json": "print JSON",
    }
)
def history(
    context: Context, recipe: str, point: str = "", metric: str = "", out: str = "", json: bool = False
) -> None:
    """Show a recipe's figures over software stacks: what changed by more than the noise, and what differs."""
    with exit_on_error():
        from twinrun.cli import history as commands

        page = Path(out) if out else None
        code = commands.history(ROOT, recipe, point=point, metric=metric, out=page, as_json=json)
    raise Exit(code=code)


@command(
    iterable=["set"],
    help={
        "recipe": "folder of the recipe",
        "good": "the end before the change: a stack, a file requirements.lock, or a record",
        "bad": "the end after it",
        "point": "the point that is measured, where the recipe has several",
        "metric": "row of metrics.toml, or a measurement by its name; the first that stands for the workload",
        "fails": "ask instead which change makes runs fail, also if only some of them do",
        "parity": "ask instead which change takes the loss out of the bound of its claim",
        "vendor": "folder of images/vendors; what the machine has when left out",
        "scale": "smoke, node or paper",
        "set": "key=value as `invoke run` takes it; may be given many times",
        "out": "folder for the bisection instead of runs/",
        "dry": "print the path and the cost and stop",
        "yes": "start without a question",
        "json": "print JSON",
    },
)
def bisect(
    context: Context,
    recipe: str,
    good: str = "",
    bad: str = "",
    point: str = "",
    metric: str = "",
    fails: bool = False,
    parity: bool = False,
    vendor: str = "",
    scale: str = "",
    set: list[str] | None = None,
    out: str = "",
    dry: bool = False,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Find which change of the software made a figure worse, runs fail, or the loss another."""
    with exit_on_error():
        from twinrun.cli import history as commands

        demand_without("--fails", fails, parity=parity, metric=metric)
        demand_without("--parity", parity, metric=metric)
        options = {"point": point, "metric": metric, "vendor": vendor, "scale": scale, "out": out}
        kind = commands.kind_of(fails=fails, parity=parity)
        asked = commands.asked(recipe, good, bad, kind=kind, set=set, dry=dry, yes=yes, **options)
        code = commands.bisect(ROOT, asked, as_json=json)
    raise Exit(code=code)


@command(
    help={
        "what": "folder of a recipe or of a run, or a record; with --hardware a model, all if left out",
        "out": "file to write instead of report.html, submission.json with --form, or the folder of --crate",
        "form": "write the file with which a run is sent in, without names of hosts and folders",
        "add": "a file that was sent in: check it and add its record to the recipe's results",
        "crate": "write a folder with the run as a Workflow Run RO-Crate, MLPerf's log lines included",
        "require-signature": "refuse a record without a signature of a name in allowed_signers",
        "why": "a claim of a record: print the conditions of its verdict, and what was seen of each",
        "hardware": "write which hardware to choose: published, measured and predicted, by model",
        "price": "of a device for an hour with --hardware, for example h200=3.1,mi300x=2",
    },
)
def report(
    context: Context,
    what: str,
    out: str = "",
    form: bool = False,
    add: str = "",
    crate: bool = False,
    require_signature: bool = False,
    why: str = "",
    hardware: bool = False,
    price: str = "",
) -> None:
    """Write the report of a run, or of a recipe's committed records; send a record in, or take one."""
    with exit_on_error():
        from twinrun.cli import report as commands

        paths = {"out": Path(out) if out else None, "add": Path(add) if add else None}
        demand_with("--hardware", hardware, price=price)
        if hardware:
            signed = {"require-signature": require_signature}
            demand_without("--hardware", hardware, form=form, add=add, crate=crate, why=why, **signed)
            commands.hardware_report(ROOT, what, out=paths["out"], price=price)
            return
        if why:
            demand_without("--why", True, form=form, add=add, crate=crate, out=out)
            commands.why(ROOT, what, why, signed=require_signature)
            return
        commands.report(ROOT, what, form=form, crate=crate, signed=require_signature, **paths)


@command(
    help={
        "stack": "run the checks of this stack instead, inside its image or environment",
        "engine": "where the stack's checks run: docker, venv or host; docker when its image is there",
        "cluster": "check this site of cluster.toml instead",
        "proof": "of a site: run one all-reduce on two nodes, and say how fast what carried it",
        "json": "print JSON",
    }
)
def doctor(
    context: Context,
    stack: str = "",
    engine: str = "",
    cluster: str = "",
    proof: bool = False,
    json: bool = False,
) -> None:
    """Check what this machine offers: GPUs, engines, disk, permissions; or that a stack works on it."""
    with exit_on_error():
        from twinrun.cli import stacks

        names = {"stack": stack, "engine": engine, "cluster": cluster}
        chosen = {key: name or None for key, name in names.items()}
        code = stacks.doctor(ROOT, as_json=json, proof=proof, **chosen)
    raise Exit(code=code)


@command(
    iterable=["only"],
    help={
        "stack": "one stack; all when left out",
        "index": "URL of the framework's own package index; $TWINRUN_INDEX when left out",
        "upgrade": "let packages move that nothing pins",
        "only": "python or system; may be given many times",
        "check": "write nothing; exit 1 when a pin is stale or gone from its origin",
    },
)
def lock(
    context: Context,
    stack: str = "",
    index: str = "",
    upgrade: bool = False,
    only: list[str] | None = None,
    check: bool = False,
) -> None:
    """Resolve every pin of stacks: packages to hashes, the root file system made of them to a digest."""
    with exit_on_error():
        from twinrun.cli import stacks

        code = stacks.lock(ROOT, stack, index=index or None, upgrade=upgrade, only=only or (), check=check)
    raise Exit(code=code)


@command(
    help={
        "name": "a data set of the recipe, for example c4, or a model as OWNER/NAME@COMMIT",
        "recipe": "folder of the recipe",
        "engine": "where it is tokenised: venv, docker or host",
        "files": "how many files of the data set to take; all when left out",
        "endpoint": "server to fetch from instead of the public hub",
    }
)
def data(
    context: Context,
    name: str,
    recipe: str = "recipes/mpt7b-scaling",
    engine: str = "venv",
    files: str = "",
    endpoint: str = "",
) -> None:
    """Fetch, verify and tokenise a data set, or fetch a model; goes on where it was stopped."""
    with exit_on_error():
        from twinrun.cli import run

        run.data(
            ROOT, name, recipe=recipe, engine=engine, files=count(files, "--files"), endpoint=endpoint or None
        )


@command(help={"json": "print JSON, with what each scale runs"})
def recipes(context: Context, json: bool = False) -> None:
    """List the recipes, what each asks, and what it would do on this machine."""
    with exit_on_error():
        from twinrun.cli import recipes as commands

        commands.recipes(ROOT, as_json=json)


@command()
def schemas(context: Context) -> None:
    """Write the JSON Schemas of the manifests that editors complete and check with."""
    with exit_on_error():
        from twinrun.cli import stacks

        stacks.schemas(ROOT)


@command(
    help={
        "action": "verify (every byte against its digest), list, or convert (to or from Hugging Face format)",
        "place": "folder or s3://bucket/prefix with the checkpoints of a run, or a folder of transformers",
        "step": "one checkpoint; all when left out, and the newest to convert",
        "out": "where a conversion writes: a folder, or s3://bucket/prefix for a checkpoint",
        "tokenizer": "tokenizer.json that the model was trained with, to write beside its weights",
        "json": "print JSON",
    }
)
def checkpoint(
    context: Context,
    action: str,
    place: str,
    step: str = "",
    out: str = "",
    tokenizer: str = "",
    json: bool = False,
) -> None:
    """Verify, list or convert the checkpoints of a run."""
    with exit_on_error():
        # A command pays only for what it imports.
        from twinrun.cli import checkpoint as commands

        demand_with("convert", action == "convert", tokenizer=tokenizer)
        steps, texts = count(step, "--step"), {"out": out or None, "tokenizer": tokenizer or None}
        code = commands.checkpoint(action, place, step=steps, **texts, as_json=json, root=ROOT)
    raise Exit(code=code)


@command(
    help={
        "what": "record, run folder, submission.json, or place with checkpoints, whose newest is signed",
        "key": "private key of SSH, for example ~/.ssh/id_ed25519",
    }
)
def sign(context: Context, what: str, key: str = "") -> None:
    """Sign a record or a checkpoint with an SSH key; the signature is kept beside it."""
    with exit_on_error():
        from twinrun.cli import signing

        signing.sign(ROOT, what, key=key)


@command(
    iterable=["mount"],
    help={
        "what": "up, status or down; describe writes a first cluster.toml from what Slurm says here",
        "nodes": "workers",
        "mount": "folder that nodes see beside checkout, interpreter and cache; may be given many times",
        "partition": "of describe: the partition; the default one when left out",
        "cluster": "of describe: a site whose `client` leads to Slurm, where this machine has no commands",
    },
)
def cluster(
    context: Context,
    what: str,
    nodes: str = "3",
    mount: list[str] | None = None,
    partition: str = "",
    cluster: str = "",
) -> None:
    """Start, list or remove a Slurm cluster of containers on this machine; or describe another one."""
    with exit_on_error():
        from twinrun.cli import sites

        demand_with("describe", what == "describe", partition=partition, cluster=cluster)
        if what == "describe":
            sites.describe(ROOT, site=cluster or None, partition=partition or None)
            return
        sites.cluster(
            ROOT,
            what,
            nodes=count(nodes, "--nodes") or 0,
            mounts=tuple(Path(one).resolve() for one in mount or ()),
        )


@command(
    help={
        "cluster": "site of cluster.toml, whose jobs are listed; what waits to be collected when left out",
        "out": "folder of the runs instead of runs/",
        "follow": "number of a job whose output is shown until it ends",
        "cancel": "number of a job to end",
    }
)
def jobs(context: Context, cluster: str = "", out: str = "", follow: str = "", cancel: str = "") -> None:
    """List what detached runs wait for, or the jobs of twinrun at a site; follow one or end one."""
    with exit_on_error():
        from twinrun.cli import jobs as commands

        folder = Path(out) if out else None
        commands.jobs(ROOT, cluster or None, out=folder, follow=follow or None, cancel=cancel or None)


@command(help={"arch": "gfx90a, gfx942 or sm90", "json": "print JSON"})
def kernels(context: Context, arch: str = "", json: bool = False) -> None:
    """Predict the time of each kernel of the recipes on a GPU that nobody has to have, and what bounds it."""
    with exit_on_error():
        from twinrun.cli import kernels as commands

        commands.kernels(arch, as_json=json)
