"""What a user can get wrong: an exit code, one message, no traceback and nothing half-written."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, invoke, invoke_anew, slowness
from tests.records import training_record
from twinrun.machine.inventory import detect
from twinrun.results.record import content_digest

RECIPE = "recipes/mpt7b-scaling"
LAYOUTS = "recipes/deepspeed-pretrain"
# The second line of its manifest.
NAME = 'name = "mpt7b-scaling"\n'
# A port that the system keeps unused: whoever asks there is refused at once.
CLOSED = "http://127.0.0.1:9"


def copied_project(folder: Path) -> Path:
    """Return a copy of what commands read of the project, without records and earlier runs.

    The package keeps its bytecode: Invoke has none written, so every command would compile it again.
    """
    # Another worker may be writing its own.
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.json", "*.pyc.*"))
    return with_manifests(folder)


def with_manifests(folder: Path) -> Path:
    """Return `folder` with a copy of what commands read of the project but the package and the kernels."""
    for part in ("recipes", "images"):
        unwanted = shutil.ignore_patterns("*.json", "__pycache__", "tests", "csrc")
        shutil.copytree(ROOT / part, folder / part, ignore=unwanted)
    shutil.copy(ROOT / "tasks.py", folder)
    return folder


def files_of(root: Path) -> dict[str, int]:
    """Return every file and folder below `root` with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


def error_message(done: subprocess.CompletedProcess[str], code: int) -> str:
    """Return the message of a command that ended with `code`, after checking its form."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    _, start, message = f"\n{done.stderr}".partition("\nerror: ")
    assert start, done.stderr
    assert "\nerror: " not in message
    return re.sub(r"\s+", " ", f"error: {message}")


def refused(root: Path, *arguments: str, code: int = 2) -> str:
    """Run a command that must change no file, and return its message."""
    before = files_of(root)
    message = error_message(invoke(root, *arguments), code)
    assert files_of(root) == before
    return message


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project whose manifests the test changes; the code of a fork is this project's."""
    return with_manifests(tmp_path / "project")


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project for all tests of commands that change no file, which `refused` sees to."""
    return with_manifests(tmp_path_factory.mktemp("untouched") / "project")


# Whatever this machine has: without the choice of an engine a daemon would be asked.
HOST = ("--vendor", "cpu", "--engine", "host")
# Words after `invoke run`, to which `HOST` is added, and parts of the one message.
OPTIONS: list[tuple[list[str], list[str]]] = [
    (["recipes/mpt7b-scalign"], ["unknown recipe", "mpt7b-scalign", "allowed:", "mpt7b-scaling`?"]),
    ([RECIPE, "--vendor", "cudaa"], ["--vendor", "cudaa", "cpu, cuda, rocm", "did you mean `cuda`?"]),
    (
        [RECIPE, "--engine", "vnev"],
        ["--engine: unknown engine", "docker, host, pyxis", "`venv`?"],
    ),
    (
        [RECIPE, "--launcher", "slrm"],
        ["--launcher: unknown launcher", "slrm", "allowed: mpirun, srun, torchrun"],
    ),
    ([RECIPE, "--scale", "smok"], ["--scale: unknown scale", "smok", "node", "paper", "`smoke`?"]),
    ([RECIPE, "--stack", "cpuu"], ["unknown stack", "cpuu", "allowed: cpu,", "did you mean `cpu`?"]),
    ([RECIPE, "--set", "stepz=3"], ["--set stepz: no such field", "allowed:", "`steps`?"]),
    ([RECIPE, "--set", "optimizer=3"], ["--set optimizer: no such field", "optimizer.betas"]),
    ([RECIPE, "--set", "steps=many"], ["--set:steps", "integer", "found: 'many'"]),
    (
        [RECIPE, "--set", "activation_checkpointing=selectiv"],
        ["--set:activation_checkpointing", "a valid boolean, or 'selective'", "found: 'selectiv'"],
    ),
    ([RECIPE, "--set", "steps=-1"], ["--set:steps", "greater than 0", "found: -1"]),
    ([RECIPE, "--set", "steps"], ["--set: expected key=value", "found: steps", "hint:"]),
    ([RECIPE, "--set", "steps=3", "--set", "steps=4"], ["--set steps: given twice", "steps=4"]),
    ([RECIPE, "--set", "model=mpt-2b"], ["--set model", "found: mpt-2b", "allowed: mpt-70b"]),
    ([RECIPE, "--set", "devices=none"], ["--set devices", "found: none", "1,2,4"]),
    ([RECIPE, "--set", "global_batch=33"], ["--set global_batch", "allowed: a multiple of 2"]),
    (
        [LAYOUTS, "--set", "precision=fp16"],
        ["layouts.ddp.precision", "no fp16 on a processor", "found: fp16"],
    ),
    ([LAYOUTS, "--set", "microbatch=3"], ["layouts.ddp.microbatch", "a divisor of 8", "found: 3"]),
    ([RECIPE, "--resume"], ["no unfinished run of this plan", "hint: leave --resume out"]),
    ([RECIPE, "--stack", "cuda12.6-torch2.7"], ["is for cuda", "hint: add --vendor cuda"]),
]


def _further(options: list[str]) -> list[str]:
    """Return what `HOST` adds to options that choose neither vendor nor engine, or one of them."""
    return [*([] if "--vendor" in options else HOST[:2]), *([] if "--engine" in options else HOST[2:])]


# Words after `invoke`, for every command.
LINES: list[tuple[list[str], list[str]]] = [
    (["rnu"], ["invoke: unknown command found: rnu", "did you mean `run`?"]),
    (["run"], ["invoke run: RECIPE is missing", "`invoke run --help`"]),
    (["compare", "a.json"], ["invoke compare: B is missing allowed: invoke compare A B"]),
    (["checkpoint"], ["ACTION and PLACE are missing"]),
    (["report", "--price", "h200=3"], ["invoke report: WHAT is missing"]),
    (["report", "--hardware", "--price", "h200=0"], ["--price h200: expected a price found: 0"]),
    (["run", RECIPE, "report"], ["one word too many found: report"]),
    (["run", RECIPE, "recipes"], ["one word too many found: recipes"]),
    (["run", RECIPE, "more"], ["one word too many found: more"]),
    (
        ["run", RECIPE, "--stepz", "3"],
        ["invoke run: no such option found: --stepz allowed: --checkpoint,"],
    ),
    (["run", "--recipe", RECIPE], ["no such option found: --recipe"]),
    (["run", RECIPE, "--scael", "node"], ["did you mean `--scale`?"]),
    (["run", RECIPE, "-e", "venv"], ["no such option found: -e"]),
    (["run", RECIPE, "--engine"], ["--engine: this option needs a value found: nothing"]),
    (["run", RECIPE, "--engine", "--dry"], ["--engine: this option needs a value found: --dry"]),
    (["run", RECIPE, "--engine="], ["--engine: this option needs a value"]),
    (["run", RECIPE, "--set"], ["--set: this option needs a value", "allowed: key=value"]),
    (["run", RECIPE, "--set", ""], ["--set: this option needs a value"]),
    (["run", RECIPE, "--dry=yes"], ["--dry: this option takes no value found: --dry=yes"]),
    (["run", RECIPE, "--dry", "--dry"], ["--dry: given twice"]),
    (["run", RECIPE, "--scale", "smoke", "--scale=node"], ["--scale: given twice"]),
    (["run", RECIPE, "--dry", "--", "more"], ["no command takes words after `--` found: more"]),
    (["--dry", "run", RECIPE], ["invoke --dry: this option does nothing here", "invoke COMMAND --dry"]),
    (["--echo", "run", RECIPE], ["invoke --echo: this option does nothing here"]),
    (["--help=rnu"], ["invoke --help: unknown command found: rnu"]),
    (["--list=run"], ["invoke --list: all commands are listed found: run"]),
    (["--list", "--list-format=table"], ["--list-format: unknown format"]),
    (
        ["cluster", "up", "--nodes", "three"],
        ["--nodes: not a whole number found: three allowed: a whole number"],
    ),
    (["checkpoint", "verify", "nowhere", "--step", "three"], ["--step: not a whole number found: three"]),
    (
        ["data", "c4", "--files", "three"],
        ["--files: not a whole number found: three allowed: a whole number"],
    ),
    (["compare", "a", "b", "--margin", "1"], ["--margin: only with --scores found: no --scores hint: add"]),
    (["compare", "a", "b", "--scores", "--claims"], ["--scores: options exclude each other found: --claims"]),
    (["parity", "a", "b", "--trace", "--bound", "1"], ["--trace: options exclude each other found: --bound"]),
    (["parity", "a", "b"], ["a: not a log found: No such file or directory allowed: a record, a run folder"]),
    (
        ["parity", "a", "b", "--bound", "2"],
        ["--bound: no share found: 2.0 allowed: more than 0, less than 1"],
    ),
    (["report", RECIPE, "--form", "--add", "x"], ["--form: options exclude each other found: --add"]),
    (["report", RECIPE], [f"{RECIPE}/results: no records to report", "hint: copy a record.json there"]),
    (["report", "recipes/mpt7b-scalign"], ["did you mean"]),
    *((["run", *options, *_further(options)], parts) for options, parts in OPTIONS),
]


@pytest.mark.parametrize(("words", "parts"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_a_line_is_refused(untouched: Path, words: list[str], parts: list[str]) -> None:
    message = refused(untouched, *words)
    for part in parts:
        assert part in message


WIDE = """[models.own]
family = "mpt"
width = "wide"
heads = 1
layers = 1
vocabulary = 8
sequence = 8"""
OFFLOAD = 'zero-3-offload = { zero = 3, offload = "parameters"'
SMALL = 'gpt-smoke = { family = "mpt", width = 64, heads = 4, layers = 4, vocabulary = '
SMOKE = ("--scale", "smoke", "--set")
CLAIM, DATE = "value = 166\n", 'published = "2023-10"\n'
METRIC = 'metric = "model-flops"\nunit = "TFLOP/s"\nper = "card"\nformula = "model-flops/6N+12LDS"\n'
# By file: what is replaced by what, and parts of the message.
Change = tuple[str, dict[str, str], list[str]]
MANIFESTS: dict[str, Change] = {
    "unknown key": (
        "recipe.toml",
        {NAME: f"{NAME}versoin = 2\n"},
        ["recipe.toml:versoin: unknown key", "did you mean `version`?"],
    ),
    "wrong type": (
        "recipe.toml",
        {"[data.c4]": f"{WIDE}\n\n[data.c4]"},
        ["recipe.toml:models.own.width", "integer", "'wide'"],
    ),
    "duplicate": ("recipe.toml", {NAME: f"{NAME}{NAME}"}, ["recipe.toml:3: broken TOML", "only once"]),
    "broken": ("recipe.toml", {NAME: "name = mpt7b\n"}, ["recipe.toml:2: broken TOML"]),
    "missing key": (
        "recipe.toml",
        {'figure = "Figure 5"\n': ""},
        ["recipe.toml:publication.figure: this key is required"],
    ),
    "the 13th month": (
        "recipe.toml",
        {DATE: 'published = "2024-13"\n'},
        ["recipe.toml:publication.published"],
    ),
    "no date": ("recipe.toml", {DATE: 'published = "soon"\n'}, ["recipe.toml:publication.published", "soon"]),
    "1e30": ("published.toml", {CLAIM: "value = 1e30\n"}, ["claim.0.value: no value of a", "found: 1e+30"]),
    "1e308": ("published.toml", {CLAIM: "value = 1e308\n"}, ["claim.0.value: no value of a publication"]),
    "infinity": (
        "published.toml",
        {CLAIM: "value = inf\n"},
        ["claim.0.value: Input should be a finite number"],
    ),
    "not a number": ("published.toml", {CLAIM: "value = nan\n"}, ["claim.0.value: Input should be a finite"]),
    "beyond the peak": (
        "published.toml",
        {CLAIM: "value = 400\n"},
        ["claim.0.value: more than the device can do", "found: 400", "allowed: up to 362 TFLOP/s"],
    ),
    "half a character": (
        "published.toml",
        {"MPT-7B trains": r"\uD800 trains"},
        ["published.toml:", "broken"],
    ),
    "another workload's metric": (
        "published.toml",
        {METRIC: 'metric = "bandwidth"\nunit = "GB/s"\nper = "device"\n'},
        ["published.toml:claim.0", "found: bandwidth"],
    ),
}


@pytest.mark.parametrize(("file", "changes", "parts"), MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_is_named_by_file_and_place(
    root: Path, file: str, changes: dict[str, str], parts: list[str]
) -> None:
    for old, new in changes.items():
        replace(root / RECIPE / file, old, new)
    message = refused(root, "run", RECIPE, *HOST, "--dry")
    for part in parts:
        assert part in message


LAYOUT_CHANGES: dict[str, tuple[str, dict[str, str], int, list[str]]] = {
    "stage with pipeline": (
        "pp2",
        {"pp2 = { pipeline = 2, zero = 1": "pp2 = { pipeline = 2, zero = 2"},
        2,
        ["recipe.toml:layouts.pp2.zero", "ZeRO-2 and 3 split", "found: 2", "allowed: 0 or 1"],
    ),
    "no disk": (
        "zero-3-offload",
        {OFFLOAD: f'{OFFLOAD}, storage = "/absent/disk"'},
        2,
        ["layouts.zero-3-offload.storage", "no folder that can be written", "found: /absent/disk"],
    ),
    # Embeddings that no disk holds.
    "small disk": (
        "zero-3-offload",
        {OFFLOAD: f'{OFFLOAD}, storage = "/tmp"', f"{SMALL}320": f"{SMALL}1000000000000"},
        3,
        ["/tmp: the disk is too small", "GB free", "12 bytes for each parameter"],
    ),
}


@pytest.mark.parametrize(("layout", "changes", "code", "parts"), LAYOUT_CHANGES.values(), ids=LAYOUT_CHANGES)
def test_a_layout_that_cannot_be_trained(
    root: Path, layout: str, changes: dict[str, str], code: int, parts: list[str]
) -> None:
    for old, new in changes.items():
        replace(root / LAYOUTS / "recipe.toml", old, new)
    message = refused(root, "run", LAYOUTS, *HOST, *SMOKE, f"layouts={layout}", code=code)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_a_vendor_whose_gpus_the_machine_lacks(untouched: Path, vendor: str) -> None:
    if detect(ROOT).vendor == vendor:
        pytest.skip(f"this machine has GPUs of {vendor}")
    message = refused(untouched, "run", RECIPE, "--vendor", vendor, code=3)
    assert vendor in message
    assert "hint:" in message


def test_a_manifest_that_is_a_pipe_is_not_read(root: Path) -> None:
    manifest = root / "images" / "stacks" / "cpu" / "stack.toml"
    manifest.unlink()
    os.mkfifo(manifest)
    message = refused(root, "build", "--stack", "cpu", "--dry")
    assert f"{manifest}: not a manifest found: no regular file" in message


def test_a_key_of_any_length_is_cut(root: Path) -> None:
    replace(root / RECIPE / "recipe.toml", NAME, f"{NAME}{'k' * 100_000} = 1\n")
    assert len(refused(root, "run", RECIPE, *HOST, "--dry")) < 3000


def test_a_stack_that_does_not_serve_the_recipe(root: Path) -> None:
    stacks = root / "images" / "stacks"
    shutil.copytree(stacks / "cpu", stacks / "other")
    replace(stacks / "other" / "stack.toml", 'name = "cpu"', 'name = "other"')
    message = refused(root, "run", RECIPE, "--vendor", "cpu", "--stack", "other")
    assert "--stack: the stack does not serve this recipe found: other allowed: cpu," in message


def test_a_lock_that_does_not_belong_to_its_requirements(root: Path) -> None:
    with (root / "images" / "stacks" / "cpu" / "requirements.in").open("a", encoding="utf-8") as stream:
        stream.write("six==1.17.0\n")
    message = refused(root, "run", RECIPE, "--vendor", "cpu", "--engine", "venv")
    assert "images/stacks/cpu/requirements.lock: the lock does not belong to requirements.in" in message
    assert "found:" in message
    assert "hint: run `invoke lock --stack cpu`" in message


def test_an_image_that_no_engine_has(root: Path) -> None:
    message = error_message(invoke(root, "run", RECIPE, "--vendor", "cpu", "--engine", "docker"), 3)
    assert "no.sock: the Docker daemon does not answer" in message
    assert "hint:" in message


def test_no_network_and_no_environment(root: Path, tmp_path: Path) -> None:
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), CLOSED)
    proxies |= {name.lower(): CLOSED for name in proxies} | {"NO_PROXY": "", "no_proxy": ""}
    nothing = {"UV_CACHE_DIR": str(tmp_path / "uv"), "UV_HTTP_RETRIES": "0", "UV_FIND_LINKS": ""}
    options = ("--vendor", "cpu", "--engine", "venv", "--scale", "smoke")
    message = error_message(invoke(root, "run", RECIPE, *options, variables=proxies | nothing), 3)
    assert "uv pip sync: the environment cannot be installed" in message
    assert "hint: check the network" in message
    assert not [path for path in (tmp_path / "cache" / "environments").iterdir() if path.is_dir()]
    (run,) = (root / "runs" / "mpt7b-scaling").iterdir()
    assert {path.name for path in run.iterdir()} == {".lock", "plan.json"}


def test_a_run_folder_that_cannot_be_made(untouched: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    options = ("--vendor", "cpu", "--engine", "host", "--out", str(tmp_path / "file" / "runs"))
    message = refused(untouched, "run", RECIPE, *options, code=3)
    assert f"{tmp_path / 'file'}: cannot write here found: no folder" in message


def test_records_that_cannot_be_compared(untouched: Path, tmp_path: Path) -> None:
    good, tampered, other = (tmp_path / f"{name}.json" for name in ("good", "tampered", "other"))
    shutil.copy(committed(RECIPE), good)
    tampered.write_text(good.read_text(encoding="utf-8").replace('"bf16"', '"fp32"'), encoding="utf-8")
    shutil.copy(committed("recipes/mamba-kernels"), other)

    message = refused(untouched, "compare", str(good), str(tampered))
    assert f"{tampered}: the record was changed after it was written" in message
    assert "hint:" in message
    message = refused(untouched, "compare", str(good), str(other))
    assert "different recipes found: mpt7b-scaling and mamba-kernels" in message
    message = refused(untouched, "compare", str(good), str(tmp_path / "absent.json"))
    assert "absent.json: no such record" in message
    assert "hint: name a run folder" in message
    message = refused(untouched, "compare", str(good), str(tmp_path))
    assert "record.json: no such record" in message
    other.write_text('{"a": 1}', encoding="utf-8")
    message = refused(untouched, "compare", str(good), str(other))
    assert f"{other}: not a record found: a hint: name a run folder" in message


def committed(recipe: str) -> Path:
    """Return a record that the recipe carries."""
    return min((ROOT / recipe / "results").glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [(("--list",), 0.5), (("run", RECIPE, "--vendor", "cpu", "--scale", "smoke", "--dry"), 1.5)],
    ids=["list", "dry run"],
)
def test_what_starts_nothing_is_quick(root: Path, arguments: tuple[str, ...], seconds: float) -> None:
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPROFILEIMPORTTIME": ""}
    assert any(busy_seconds(root, arguments, bytecode) < seconds * slowness() for _ in range(3))
    done = invoke_anew(root, *arguments, variables={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "invoke" in imported
    assert not imported & {"torch", "composer", "streaming", "numpy"}


def busy_seconds(root: Path, arguments: tuple[str, ...], variables: Mapping[str, str]) -> float:
    """Return the processor time of a command, which what else the machine does leaves alone."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = invoke_anew(root, *arguments, variables=variables)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


RECORD: dict[str, Any] = training_record(
    {"devices=1": 400.0}, gpu="h200", scale="node", settings=("model=mpt-1b",)
).model_dump(mode="json")
Content = dict[str, Any]


def median(value: float) -> Callable[[Content], Any]:
    """Return a change of the step time to one value."""
    samples = {"median": value, "low": value, "high": value}
    return lambda content: content["points"][0]["measurements"][0].update(samples)


def losses(*values: float) -> Callable[[Content], Any]:
    """Return a change of the losses."""
    return lambda content: content["points"][0]["series"][0].update(values=list(values))


def twice(content: dict[str, Any]) -> None:
    content["points"].append(copy.deepcopy(content["points"][0]))


TIME, LOSS = "points.0.measurements.0.median", "points.0.series.0.values.1"
RECORDS: dict[str, tuple[Callable[[Content], Any], list[str]]] = {
    "a time that is not a number": (median(float("nan")), [f"{TIME}: Input should be a finite number"]),
    "an infinite time": (median(float("inf")), [f"{TIME}: Input should be a finite number"]),
    "a time of 1e308": (median(1e308), [f"{TIME}: too large a number", "found: 1e+308"]),
    "a time of 1e-308": (median(1e-308), [f"{TIME}: too small a number", "found: 1e-308"]),
    "no time": (median(0.0), ["points.devices=1.measurements.step-time.low: no step time", "more than 0"]),
    "a time below 0": (median(-1.0), ["points.devices=1.measurements.step-time.low: no step time"]),
    "a loss that is not a number": (losses(4.0, float("nan")), [f"{LOSS}: Input should be a finite number"]),
    "a loss of 1e308": (losses(4.0, 1e308), [f"{LOSS}: too large a number"]),
    "an empty series": (losses(), ["points.devices=1.series.loss: a series without a value"]),
    "two points of one name": (twice, ["points.devices=1: two points of one name"]),
    "half a character in a fact": (
        lambda content: content["points"][0]["facts"].update({"device name": "a\ud800"}),
        [r"not a record: points.0.facts.device name: half a character, 'a\ud800'"],
    ),
    "half a character in a name": (
        lambda content: content["environment"]["libraries"].update({"a\udfff": "1"}),
        [r"not a record: environment.libraries.a\udfff: half a character"],
    ),
    "a date that is none": (lambda content: content.update(created="2024-13"), ["created: not a time"]),
}


@pytest.mark.parametrize(("change", "parts"), RECORDS.values(), ids=RECORDS)
def test_a_record(
    untouched: Path, tmp_path: Path, change: Callable[[Content], Any], parts: list[str]
) -> None:
    content = copy.deepcopy(RECORD)
    change(content)
    try:
        content["sha256"] = content_digest(content)
    except UnicodeEncodeError:
        content["sha256"] = "0" * 64
    file = tmp_path / "record.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    message = refused(untouched, "report", str(file))
    assert message.startswith(f"error: {file}")
    for part in parts:
        assert part in message
