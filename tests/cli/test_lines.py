"""What a user can get wrong: an exit code, one message, no traceback and nothing half-written."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.cli.bad_lines import lines, places
from tests.cli.refusals import CLOSED, RECIPE, error_message, files_of, refused, replace, with_manifests
from tests.commands import ROOT, environment, invoke, invoke_anew
from twinrun import __version__
from twinrun.machine.inventory import detect

LAYOUTS = "recipes/deepspeed-pretrain"
# The second line of its manifest.
NAME = 'name = "mpt7b-scaling"\n'


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
# A line after `twinrun`, and parts of the one message. One that ends in `...` gets what of `HOST` it has not.
LINES: dict[str, str] = {
    "rnu": "twinrun: unknown command found: rnu | did you mean `run`?",
    "RUN RECIPE": "unknown command found: RUN | did you mean `run`?",
    "run": "twinrun run: RECIPE is missing allowed: twinrun run RECIPE | `twinrun run --help`",
    "compare a.json": "twinrun compare: B is missing allowed: twinrun compare A B",
    "checkpoint": "twinrun checkpoint: ACTION is missing allowed: twinrun checkpoint ACTION PLACE",
    "checkpoint verfy x": "ACTION: unknown action found: verfy | did you mean `verify`?",
    "report all --price h200=3": "--price: only with --hardware",
    "report": "twinrun report: WHAT is missing allowed: twinrun report WHAT",
    "report all --hardware --price h200=0": "--price h200: expected a price found: 0",
    "report --hardware lama-8b": "found: lama-8b | did you mean `llama-8b`?",
    "predict mpt-7b": "twinrun predict: --gpu is missing allowed: rows of images/gpus.toml",
    "predict mpt-7b --gpu MI300X": "--gpu: no such GPU found: MI300X | mean `mi300x`?",
    "predict mpt-7b --gpu=": "--gpu: this option needs a value found: nothing",
    "run RECIPE report": "one word too many found: report",
    "run RECIPE --stepz 3": "no such option found: --stepz allowed: --checkpoint,",
    "run RECIPE --batch-size 8": "no such option | it is set by `--set global_batch=...`",
    "run --recipe RECIPE": "no such option found: --recipe",
    "run RECIPE --scael node": "did you mean `--scale`?",
    "run RECIPE -e venv": "no such option found: -e",
    "run RECIPE --engine": "--engine: this option needs a value found: nothing",
    "run RECIPE --engine --dry": "--engine: this option needs a value found: nothing",
    "run RECIPE --engine=": "--engine: this option needs a value",
    "run RECIPE --set": "--set: this option needs a value | allowed: key=value",
    "run RECIPE --dry --dry": "--dry: given twice",
    "run RECIPE --scale smoke --scale=node": "--scale: given twice",
    "run RECIPE --dry -- more": "one word too many found: more",
    "--dry run RECIPE": "twinrun: unknown command found: --dry",
    "cluster up --nodes three": "--nodes: not a whole number found: three allowed: a whole",
    "checkpoint verify nowhere --step 1.5": "--step: not a whole number found: 1.5",
    "compare a b --margin 0.5": "--margin: only with --scores found: no --scores hint: add",
    "compare a b --scores --claims": "--scores: options exclude each other found: --claims",
    "parity a b --trace --bound .5": "options exclude each other found: --bound",
    "parity a b": "a: not a log found: No such file or directory allowed: a record, a run folder",
    "parity a b --bound 2": 'Invalid value "2.0" for --bound. Must be < 1.',
    "bisect RECIPE --bad cpu": "twinrun bisect: --good is missing allowed: the end before",
    "bisect RECIPE --good EMPTY --bad cpu --dry": "EMPTY: no stack, lock or record",
    "bisect --good cpu --bad cpu": "RECIPE: what runs allowed: a recipe, or --run",
    "bisect RECIPE --good cpu --bad cpu --number x": "--number: only with --run found: no --run",
    "report RECIPE --form --add x": "--form: options exclude each other found: --add",
    "report RECIPE": "RECIPE/results: no records to report | hint: copy a record.json there",
    "run recipes/mpt7b-scalign ...": "unknown recipe | mpt7b-scalign | allowed: | mpt7b-scaling`?",
    "run RECIPE --vendor cudaa ...": "--vendor | cudaa | cpu, cuda, rocm | did you mean `cuda`?",
    "run RECIPE --engine vnev ...": "--engine: unknown engine | docker, host, podman, pyxis | `venv`?",
    "run RECIPE --launcher slrm ...": "--launcher: unknown launcher | slrm | allowed: mpirun, srun, torchrun",
    "run RECIPE --scale smok ...": "--scale: unknown scale | smok | node | paper | `smoke`?",
    "run RECIPE --stack cpuu ...": "unknown stack | cpuu | allowed: cpu, | did you mean `cpu`?",
    "run RECIPE --set stepz=3 ...": "--set stepz: no such field | allowed: | `steps`?",
    "run RECIPE --set optimizer=3 ...": "--set optimizer: no such field | optimizer.betas",
    "run RECIPE --set steps=many ...": "--set:steps | integer | found: 'many'",
    "run RECIPE --set activation_checkpointing=selectiv ...": (
        "--set:activation_checkpointing | a valid boolean, or 'selective' | found: 'selectiv'"
    ),
    "run RECIPE --set steps=-1 ...": "--set:steps | greater than 0 | found: -1",
    "run RECIPE --set steps ...": "--set: expected key=value | found: steps | hint:",
    "run RECIPE --set steps=3 --set steps=4 ...": "--set steps: given twice | steps=4",
    "run RECIPE --set model=mpt-2b ...": "--set model | found: mpt-2b | allowed: mpt-",
    "run RECIPE --set devices=none ...": "--set devices | found: none | 1,2,4",
    "run RECIPE --set global_batch=33 ...": "--set global_batch | allowed: a multiple of 2",
    "run LAYOUTS --set precision=fp16 ...": "layouts.ddp.precision | no fp16 on a processor | found: fp16",
    "run LAYOUTS --set microbatch=3 ...": "layouts.ddp.microbatch | a divisor of 8 | found: 3",
    "run RECIPE --resume ...": "no unfinished run of this plan | hint: leave --resume out",
    "run RECIPE --vendor AMD ...": "--vendor: unknown vendor found: AMD | did you mean `rocm`?",
    "run RECIPE --set lr=1 ...": "--set lr: no such field | did you mean `optimizer.learning_rate`?",
    "run RECIPE --set batch_size=8 ...": "did you mean `global_batch`?",
    "run RECIPE --set devices=1,1 ...": "--set devices: expected counts of devices, each once found: 1,1",
    "run RECIPE --stack cuda12.6-torch2.7 ...": "for another vendor found: cuda | hint: add --vendor cuda",
}


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_refused(untouched: Path, line: str) -> None:
    words = line.replace("RECIPE", RECIPE).replace("LAYOUTS", LAYOUTS).split(" ")
    if words[-1] == "...":
        vendor, engine = ([] if one in words else [one, of] for one, of in (HOST[:2], HOST[2:]))
        words = [*words[:-1], *vendor, *engine]
    message = refused(untouched, *words)
    for part in LINES[line].replace("RECIPE/", f"{RECIPE}/").split(" | "):
        assert part in message


# What makes a file of the system wait for ever is ended.
BUSY_SECONDS, PATIENCE_SECONDS, MEMORY_BYTES = 10, 100, 6 << 30


@pytest.fixture
def limits() -> Iterator[None]:
    """Bound the time and the memory of what a test reads: some of it has no end."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.nightly)])
def test_wrong_lines_are_refused(tmp_path: Path, every: int, limits: None) -> None:
    (tmp_path / "files").mkdir()
    root, there = with_manifests(tmp_path / "project"), places(tmp_path / "files")
    all_lines = list(dict.fromkeys(lines(there)))
    assert len(all_lines) > 700
    found, before = [], files_of(root)
    for line in all_lines[::every]:
        start = time.process_time()
        signal.alarm(PATIENCE_SECONDS)
        done = invoke(root, *line)
        signal.alarm(0)
        seconds = time.process_time() - start
        well_said = done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
        # Wrong input, or right input that this machine cannot run.
        if done.returncode not in (2, 3) or not well_said or done.stdout or seconds > BUSY_SECONDS:
            shown = [word[:60] for word in line]
            found.append(f"{shown}: {done.returncode} after {seconds:.0f} s: {done.stderr[-300:]}")
    assert not found, "\n".join(["", *found])
    assert files_of(root) == before
    assert stat.S_ISFIFO(Path(there["pipe"]).lstat().st_mode)
    assert stat.S_ISCHR(Path("/dev/null").lstat().st_mode)


@pytest.mark.parametrize("words", ["run --help", "run recipes/mpt7b-scaling -h", "--help", ""])
def test_help_is_shown_and_nothing_started(words: str, tmp_path: Path) -> None:
    for folder in (ROOT, tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "twinrun", *words.split()],
            cwd=folder,
            env=environment(ROOT),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        said = ("RECIPE", "--dry", "--engine") if "run" in words else ("checkpoint", "bisect", "--version")
        assert all(part in done.stdout for part in said)


def test_the_version_and_a_removed_folder() -> None:
    assert invoke(ROOT, "--version").stdout == f"{__version__}\n"
    code = "import os, tempfile; folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)"
    command = [sys.executable, "-c", f"{code}; from twinrun.cli.program import start; start()"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(ROOT), check=False)
    assert "no folder to work in" in error_message(done, 2)


def with_invoke(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invoke", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True, check=False
    )


def test_invoke_as_it_comes_has_the_same_commands() -> None:
    listed = with_invoke("--list")
    assert (listed.returncode, listed.stderr) == (0, "")
    helped = with_invoke("run", "--help")
    assert "Run a published experiment and judge its claims." in helped.stdout
    assert "--checkpoint" in helped.stdout
    options = "--engine host --scale smoke --set steps=30 --set warmup_steps=2 --dry --json"
    plan = ("run", RECIPE, "--vendor=cpu", *options.split())
    ours, theirs = invoke(ROOT, *plan), with_invoke(*plan)
    assert (theirs.returncode, theirs.stdout) == (0, ours.stdout)
    wrong = with_invoke("run", RECIPE, "--scale", "smok")
    assert "--scale: unknown scale found: smok" in error_message(wrong, 2)
    # What Invoke itself cannot read ends with its own code.
    assert with_invoke("run", RECIPE, "--scael", "smoke").returncode == 1


def completions(*words: str) -> set[str]:
    done = invoke(ROOT, "__complete", *words)
    return {line.partition("\t")[0] for line in done.stdout.splitlines()}


def test_a_shell_completes_recipes_cards_and_stacks() -> None:
    assert "mpt7b-scaling" in completions("run", "mpt7")
    assert "mi300x" in completions("predict", "mpt-7b", "--gpu", "mi3")
    assert "cuda12.6-torch2.7" in completions("run", "x", "--stack", "cuda")


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


@pytest.mark.needs("docker")
def test_an_image_that_no_engine_has(root: Path) -> None:
    message = error_message(invoke(root, "run", RECIPE, "--vendor", "cpu", "--engine", "docker"), 3)
    assert "no.sock: the docker daemon does not answer" in message
    assert "hint:" in message


def test_no_network_and_no_environment(root: Path, tmp_path: Path) -> None:
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), CLOSED)
    proxies |= {name.lower(): CLOSED for name in proxies} | {"NO_PROXY": "", "no_proxy": ""}
    nothing = {"UV_CACHE_DIR": str(tmp_path / "uv"), "UV_HTTP_RETRIES": "0", "UV_FIND_LINKS": ""}
    options = ("--vendor", "cpu", "--engine", "venv", "--scale", "smoke")
    message = error_message(invoke(root, "run", RECIPE, *options, variables=proxies | nothing), 3)
    assert "uv pip sync: the environment cannot be installed" in message
    assert "see to the network" in message
    assert not [path for path in (tmp_path / "cache" / "environments").iterdir() if path.is_dir()]
    (run,) = (root / "runs" / "mpt7b-scaling").iterdir()
    assert {path.name for path in run.iterdir()} == {".lock", "plan.json", "sources", "sources.json"}


def test_a_run_folder_that_cannot_be_made(untouched: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    options = ("--vendor", "cpu", "--engine", "host", "--out", str(tmp_path / "file" / "runs"))
    message = refused(untouched, "run", RECIPE, *options, code=3)
    assert f"{tmp_path / 'file'}: cannot write here found: no folder" in message


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("run", RECIPE, "--vendor", "cpu", "--scale", "smoke", "--dry")],
    ids=["help", "dry run"],
)
def test_what_starts_nothing_imports_little(root: Path, arguments: tuple[str, ...]) -> None:
    done = invoke_anew(root, *arguments, variables={"PYTHONPROFILEIMPORTTIME": "1"})
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE))
    assert "cyclopts" in imported
    assert not imported & {"torch", "composer", "streaming", "numpy"}
