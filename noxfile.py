"""Sessions for machines: `nox --list` shows them, `nox -t VENDOR` runs those for a vendor's machines."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "tests(host)", "docs", "smoke(cpu)"]

LOCK = "images/stacks/cpu/requirements.lock"
PYTEST = ("python", "-m", "pytest")
# Images are large and engines have one cache of builds: one test at a time.
ONE_BY_ONE = (*PYTEST, "--numprocesses=0")
YAML = (".github", ".pre-commit-config.yaml", "mkdocs.yml")
YAML_STYLE = "{extends: relaxed, rules: {line-length: {max: 120}}}"
PROJECT = nox.project.load_toml("pyproject.toml")["project"]
NEEDED, EXTRAS = PROJECT["dependencies"], PROJECT["optional-dependencies"]
# Pages are made of what the repository's own modules say.
MKDOCS = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": "."}
# Every machine runs these.
CPU = ["cpu"]


def read(path: Path) -> dict[str, Any]:
    """Return a manifest as it is; the commands validate it."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def recipes_by_stack() -> dict[str, list[str]]:
    """Return, for each stack, the recipes that run in it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("recipes").glob("*/recipe.toml")):
        stacks = read(path)["stacks"]
        for stack in (*stacks["current"].values(), *stacks.get("also", ()), *stacks.get("published", ())):
            found[stack].append(path.parent.as_posix())
    return found


def one_of_each_workload(recipes: list[str]) -> list[str]:
    """Return a recipe of each workload: the last by name, which of the training recipes is the plainest."""
    workloads = {path.name for path in Path("src/twinrun/workloads").iterdir() if path.is_dir()}
    tables = {recipe: read(Path(recipe, "recipe.toml")).keys() & workloads for recipe in recipes}
    return [*{table: recipe for recipe, (table,) in tables.items()}.values()]


RECIPES = recipes_by_stack()
STACKS = {p.parent.name: read(p)["vendor"] for p in sorted(Path("images/stacks").glob("*/stack.toml"))}


@nox.session(tags=CPU)
def lint(session: nox.Session) -> None:
    """Check style, spelling, shell scripts and workflows."""
    session.install(*EXTRAS["lint"])
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.install("-e", ".")
    session.run("lint-imports")
    session.run("codespell")
    session.run("shellcheck", ".ci/run", ".ci/fresh")
    session.run("yamllint", "--strict", "--config-data", YAML_STYLE, *YAML)
    session.run("zizmor", "--offline", "--quiet", ".github/workflows")


@nox.session(tags=CPU)
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    session.install("-e", ".[dev,test,types]")
    session.run("mypy")
    session.run("mypy", "docs/hooks.py")


@nox.session
@nox.parametrize("part", [nox.param("host", id="host", tags=CPU), nox.param("ranks", id="ranks", tags=CPU)])
def tests(session: nox.Session, part: str) -> None:
    """Run the tests that need no PyTorch (host), or those of ranks and recipes in the CPU stack."""
    if part == "host":
        session.install("-e", ".[test,docs]")
        parts = [["tests"]]
    else:
        install_stack(session, "test,reference,docs")
        # Recipes bring native code and compile graphs: what these break must not show in tests of ours.
        parts = [["recipes"], ["tests"]]
    each(session, *([*PYTEST, "-m", "not docker", "--part", part, *one] for one in parts))


def install_stack(session: nox.Session, extras: str) -> None:
    """Install the CPU stack as locked, and this project with its extras."""
    # Gigabytes: silence would look like a hang.
    session.install("--require-hashes", "--no-deps", "-r", LOCK, silent=False)
    session.install("-e", f".[{extras}]")


def each(session: nox.Session, *commands: Sequence[str]) -> None:
    """Run every command, whatever became of those before; fail if one failed."""
    failed = []
    for command in commands:
        try:
            session.run(*command, *session.posargs)
        except nox.command.CommandFailed:
            failed.append(" ".join(command))
    if failed:
        session.error(f"failed: {'; '.join(failed)}")


@nox.session(tags=CPU)
def lowest(session: nox.Session) -> None:
    """Read command lines and bake recipes under the lowest Invoke and cookiecutter of the range."""
    names = ("invoke>=", "cookiecutter>=")
    session.install("-e", ".[test]", *(one.replace(">=", "==") for one in NEEDED if one.startswith(names)))
    session.run(
        *PYTEST, "tests/cli/test_lines.py", "tests/contracts/test_every_template.py", *session.posargs
    )


@nox.session
def contracts(session: nox.Session) -> None:
    """Hold every recipe, stack, template, module and page to the rules, without PyTorch."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, "tests/contracts", *session.posargs)


@nox.session(venv_backend="none")
def size(session: nox.Session) -> None:
    """Count what has to be read and keep the figures, which only fall; refuse one that rose."""
    session.run("python", "-m", "tools.size", "--write", *session.posargs)


@nox.session
def schemas(session: nox.Session) -> None:
    """Write the JSON Schemas of manifests where an editor finds them."""
    session.install("-e", ".")
    session.run("python", "-m", "tools.schemas")


@nox.session(tags=CPU)
def docs(session: nox.Session) -> None:
    """Build the pages; a broken link is an error."""
    session.install("-e", ".[docs]")
    session.run("mkdocs", "build", "--strict", *session.posargs, env=MKDOCS)


@nox.session
@nox.parametrize("stack", [nox.param(name, id=name, tags=[vendor]) for name, vendor in STACKS.items()])
def smoke(session: nox.Session, stack: str) -> None:
    """Run a stack's checks and a recipe of each workload in its image; `-- all`, `-- --engine venv`."""
    session.install("-e", ".")
    engine = engine_of(session, stack)
    options = ["--stack", stack, "--engine", engine, "--json"]
    run = ["--vendor", STACKS[stack], "--scale", "smoke", "--out", session.create_tmp(), *options]
    # One rank leaves a core to another; what these runs measure of speed says nothing.
    with ThreadPoolExecutor(max_workers=2) as pool:
        # Raises what a task raised; tasks that have not started are left out then.
        recipes = RECIPES[stack] if "all" in session.posargs else one_of_each_workload(RECIPES[stack])
        tasks = [["doctor", *options], *(["run", one, *run] for one in recipes)]
        list(pool.map(functools.partial(smoke_task, session), tasks))


def smoke_task(session: nox.Session, task: list[str]) -> None:
    """Run a command with its subject before each line; say how many claims came to which outcome."""
    subject = Path(task[1]).name if task[0] == "run" else task[0]
    label = ["sed", "--unbuffered", f"s/^/{subject}: /"]
    # In a process group of its own it outlives Ctrl-C, and prints what the command says of it.
    with subprocess.Popen(label, stdin=subprocess.PIPE, stdout=sys.stderr, text=True, process_group=0) as sed:
        printed = session.run("invoke", *task, silent=True, stderr=sed.stdin, success_codes=[0, 3])
    if not printed:
        session.skip(f"this machine cannot run {subject}; the reason is above")
    if task[0] == "run":
        outcomes = Counter(verdict["final"] for verdict in json.loads(printed or "{}")["verdicts"])
        session.log(f"{task[1]}: {', '.join(f'{count} {name}' for name, count in outcomes.items())}")


def engine_of(session: nox.Session, stack: str) -> str:
    """Return the engine of `-- --engine`, else `docker`; skip where no engine has or builds the image."""
    if "--engine" in session.posargs:
        return str(session.posargs[session.posargs.index("--engine") + 1])
    command = ["invoke", "build", "--vendor", STACKS[stack], "--stack", stack, "--json"]
    if not session.run(*command, silent=True, stderr=sys.stderr, success_codes=[0, 3]):
        session.skip(f"not run: no engine for the image of {stack}; `-- --engine venv` runs its lock")
    return "docker"


@nox.session
def gpu(session: nox.Session) -> None:
    """Run all that these GPUs can show, into one file to send; `-- --help` has its options."""
    session.install("-e", ".")
    # nox would turn its exit codes, which are those of `invoke run`, into 1.
    command = [f"{session.bin}/python", "-m", "tools.gpu", *map(str, session.posargs)]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


@nox.session(tags=["engine"])
def engine(session: nox.Session) -> None:
    """Run the tests of containers, images and a Slurm cluster, which share one engine."""
    install_stack(session, "test")
    session.run(*ONE_BY_ONE, "-m", "(docker or image or cluster) and not nightly", "tests", *session.posargs)


# By name what takes too long for every change: the extras, the tests, and how they are chosen.
NIGHTLY = {
    "builds": ("test", ("-m", "nightly and not cluster", "tests", "recipes")),
    "trials": ("test,reference", ("-m", "trials", "tests", "recipes")),
    "faults": ("test", ("-s", "-m", "cluster", "tests/execution/test_faults.py")),
    "templates": ("test,reference,docs", ()),
    "mutations": ("test,mutations", ()),
}


@nox.session
@nox.parametrize("what", [nox.param(name, id=name, tags=["nightly"]) for name in NIGHTLY])
def nightly(session: nox.Session, what: str) -> None:
    """Run the long tests (builds, trials, faults), bake recipes into a clone (templates), plant mutations."""
    extras, chosen = NIGHTLY[what]
    install_stack(session, extras)
    if what == "mutations":
        session.run("mutmut", "run", *session.posargs)
        session.run("mutmut", "results")
    elif what == "templates":
        baked(session)
    else:
        session.run(*ONE_BY_ONE, *chosen, *session.posargs)


def baked(session: nox.Session) -> None:
    """Bake a recipe of each workload into a clone, add a signed record, run all tests and build the pages."""
    clone = Path(session.create_tmp(), "clone")
    session.run("rm", "-rf", str(clone), external=True)
    session.run("git", "clone", "--quiet", ".", str(clone), external=True)
    with session.chdir(clone):
        session.env.update(MKDOCS | {"PYTHONPATH": f"{clone}:{clone / 'src'}"})
        session.run("python", "-m", "tests.contracts.baking")
        each(session, [*PYTEST, "-m", "not docker"], ["mkdocs", "build", "--strict"])
