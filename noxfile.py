"""Sessions for machines: `nox --list` shows them, `nox -t VENDOR` runs those for a vendor's machines."""

from __future__ import annotations

import json
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = ["lint", "types", "tests", "contracts", "templates", "docs", "smoke(cpu)"]

LOCK = "images/stacks/cpu/requirements.lock"
PYTEST = ("python", "-m", "pytest")
TEMPLATES = "tests/contracts/test_every_template.py"
YAML = (".github", ".pre-commit-config.yaml", "mkdocs.yml")
YAML_STYLE = "{extends: relaxed, rules: {line-length: {max: 120}}}"
EXTRAS = nox.project.load_toml("pyproject.toml")["project"]["optional-dependencies"]
# Every machine runs these; the other tags are the vendors of stacks.
CPU = ["cpu"]


# A stack that no recipe runs in now, such as one of a publication: checked when asked for by its name.
BY_NAME = ["by-name"]


def read(path: Path) -> dict[str, Any]:
    """Return a manifest as it is; the commands validate it."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def marked(name: str) -> list[str]:
    """Return the test files that use a marker: others cannot all be collected without a stack's packages."""
    return [
        str(path) for path in sorted(Path("tests").glob("*.py")) if f"pytest.mark.{name}" in path.read_text()
    ]


def recipes_by_stack() -> dict[str, list[str]]:
    """Return, for each stack, the recipes that run in it now."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(Path("recipes").glob("*/recipe.toml")):
        for stack in read(path)["stacks"]["current"].values():
            found[stack].append(path.parent.as_posix())
    return found


RECIPES = recipes_by_stack()
# Stack to vendor, of every folder there is.
STACKS = {
    path.parent.name: read(path)["vendor"] for path in sorted(Path("images/stacks").glob("*/stack.toml"))
}


@nox.session(tags=CPU)
def lint(session: nox.Session) -> None:
    """Check style, spelling, shell scripts and workflows."""
    session.install(*EXTRAS["lint"])
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("shellcheck", ".ci/run")
    session.run("yamllint", "--strict", "--config-data", YAML_STYLE, *YAML)
    session.run("zizmor", "--offline", "--quiet", ".github/workflows")


@nox.session(tags=CPU)
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    session.install("-e", ".[dev,test,types]")
    session.run("mypy")
    session.run("mypy", "docs/hooks.py")


@nox.session(tags=CPU)
def tests(session: nox.Session) -> None:
    """Run the tests in the CPU stack as locked; those of a GPU say why they are skipped."""
    session.install("--require-hashes", "-r", LOCK)
    session.install("-e", ".[test,reference]")
    session.run(*PYTEST, "-m", "not docker and not image", "--ignore", "tests/contracts", *session.posargs)


@nox.session(tags=CPU)
def contracts(session: nox.Session) -> None:
    """Hold every recipe, stack, module and page to the rules."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, "tests/contracts", "--ignore", TEMPLATES, *session.posargs)


@nox.session(tags=CPU)
def templates(session: nox.Session) -> None:
    """Bake the template and hold what comes out to the rules of recipes."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, TEMPLATES, *session.posargs)


@nox.session(tags=CPU)
def docs(session: nox.Session) -> None:
    """Build the pages; a broken link is an error."""
    session.install("-e", ".[docs]")
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
@nox.parametrize(
    "stack",
    [
        nox.param(stack, id=stack, tags=[vendor] if stack in RECIPES else BY_NAME)
        for stack, vendor in STACKS.items()
    ],
)
def smoke(session: nox.Session, stack: str) -> None:
    """Run a stack's checks, in its image or the environment of its lock, and its recipes at smoke scale."""
    session.install("-e", ".")
    session.run("invoke", "doctor", "--stack", stack, *session.posargs)
    out = session.create_tmp()
    for recipe in RECIPES[stack]:
        options = ["--vendor", STACKS[stack], "--stack", stack, "--scale", "smoke", "--engine", "venv"]
        command = ["invoke", "run", recipe, *options, "--out", out, "--json"]
        printed = session.run(*command, silent=True, stderr=sys.stderr)
        verdicts = json.loads(printed or "{}")["verdicts"]
        outcomes = Counter(verdict["outcome"] for verdict in verdicts)
        session.log(f"{recipe}: {', '.join(f'{count} {name}' for name, count in outcomes.items())}")


@nox.session(tags=["engine"])
def docker(session: nox.Session) -> None:
    """Run the tests that need a container engine."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, "-m", "docker", *marked("docker"), *session.posargs)


@nox.session(tags=["engine"])
def images(session: nox.Session) -> None:
    """Build the images that Debian's packages are enough for, and check and run inside them."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, "-m", "image", *marked("image"), *session.posargs)
