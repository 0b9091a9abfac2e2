"""What pages show can be done: each command plans, reads or has its options; sites plan; code is code."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
from invoke.collection import Collection
from invoke.exceptions import ParseError
from invoke.parser import Parser

import tasks
from tests.commands import ROOT, invoke
from tests.contracts.tree import project_files, shown

# What the template's page says is shown by the recipe that is baked.
PAGES = [path for path in project_files("*.md") if "{{" not in shown(path)]
BLOCK = re.compile(r"^```(?:console|bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = ("invoke", "twinrun", "nox")
INLINE = re.compile(rf"`((?:{'|'.join(PROGRAMS)})\b[^`\n]*)`")
CODE = re.compile(r"^```(toml|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A page bakes a recipe before it runs it.
MADE = re.compile(r"^cookiecutter .*\bname=([\w-]+)", re.MULTILINE)
CAPITALS = re.compile(r"(?<![A-Za-z0-9-])[A-Z][A-Z_]*[A-Z](?![A-Za-z0-9-])|\b[AB]\b|\.\.\.")
RECORD = str(ROOT / "tests" / "data" / "records" / "mpt7b-scaling.json")
RECIPE = "recipes/mpt7b-scaling"
# What a word in capitals stands for where a command is planned.
PLANNED = {
    "SITE": "h100",
    "RECIPE": RECIPE,
    "recipes/RECIPE": RECIPE,
    "PATH": str(ROOT / RECIPE),
    "STACK.tar": "cpu.tar",
    "STACK": "cpu",
    **dict.fromkeys(("RECORD", "RECORD_A", "RECORD_B"), RECORD),
}
# A word in capitals that only a user's machine has: the command is looked up in its help.
USERS = {"...", "A", "B", "C", "CLAIM", "COMMAND", "COMMIT", "DIGEST", "DIR", "FILE", "FOLDER", "FOLDER_A"}
USERS |= {"FOLDER_B", "ID", "KEY", "NAME", "NODE", "NUMBER", "OWNER", "PLACE", "POINT", "POOL", "RUN"}
USERS |= {"RUN_FOLDER", "URL", "VENDOR"}
# Folders that another command of the page has filled.
CARRIED = {"carried", "carried/base.tar", "./models/small"}
# Commands that plan: a run, where this machine has no such GPU, for the example site of eight nodes of H100s.
PLANS = {"run": ("--dry",), "build": ("--dry",)}
READS = {"recipes", "compare"}
# The site that `invoke cluster up` writes.
LOCAL = """
[site.local]
scheduler = "slurm"
vendor = "cpu"
nodes = 2
devices_per_node = 1
cores_per_node = 2
shared = ["/"]
"""


def commands_in(text: str) -> list[str]:
    """Return the commands of code blocks and of inline code, continued lines joined."""
    blocks = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    lines = [line.removeprefix("$ ").partition("  #")[0].strip() for line in blocks.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    inline = [one.replace("\\|", "|") for one in INLINE.findall(text)]
    return [part for part in (*parts, *inline) if part.split()[:1] and part.split()[0] in PROGRAMS]


def shown_commands() -> dict[str, list[str]]:
    """Return every command that pages show, with the pages; what a page makes first is left to its walk."""
    found: dict[str, list[str]] = {}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        made = [f"recipes/{name}" for name in MADE.findall(text)]
        for command in commands_in(text):
            if not any(name in command for name in made):
                found.setdefault(command, []).append(shown(path))
    return found


COMMANDS = shown_commands()


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example sites of the guide, beside the cluster of a machine."""
    guide = (ROOT / "docs/guides/describe-a-cluster.md").read_text(encoding="utf-8")
    file = tmp_path_factory.mktemp("sites") / "cluster.toml"
    file.write_text("\n".join(text for _, text in CODE.findall(guide)) + LOCAL, encoding="utf-8")
    return file


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one(command: str, sites: Path) -> None:
    fault = fault_of(command, sites)
    assert not fault, f"{', '.join(COMMANDS[command])}: `{command}`: {fault}"


def test_a_wrong_command_is_found(sites: Path) -> None:
    for wrong in (
        *("invoke ran recipes/mpt7b-scaling", "invoke run recipes/mpt7b-scaling --dri", "nox -s test"),
        *("invoke run recipes/no-such-recipe", "invoke jobs --cancle NUMBER", "invoke jobs --cancel WHAT"),
        "invoke run recipes/mpt7b-scaling --set steps=none",
    ):
        assert fault_of(wrong, sites), wrong


def fault_of(command: str, sites: Path) -> str:
    """Return why a command would not do what its page says, or nothing."""
    program, *words = shlex.split(command)
    capitals = set(CAPITALS.findall(" ".join(word for word in words if "=" not in word or "/" in word)))
    if unknown := capitals - PLANNED.keys() - USERS - {"FIELD"}:
        return f"undeclared placeholder {sorted(unknown)}"
    if program == "nox":
        named = words[words.index("-s") + 1 :] if "-s" in words else []
        named = [word.partition("(")[0] for word in (named[: named.index("--")] if "--" in named else named)]
        return "".join(f"no session {name}" for name in named if name not in sessions())
    if not words or words[0].startswith("-") or words[0] == "COMMAND":
        return ""
    if program == "invoke" and (fault := invokes_own(words)):
        return fault
    # An option that a sentence names has no subject.
    subject = words[1:2] and not words[1].startswith("-")
    whole = subject or words[0] == "recipes" or words[:2] == ["build", "--stack"]
    if whole and not capitals & USERS and not CARRIED & set(words) and words[0] in {*PLANS, *READS}:
        return refusal([PLANNED.get(word, word) for word in words], sites)
    done = invoke(ROOT, words[0], "--help")
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    missing = [one for one in options if not re.search(rf"(?<![\w-]){one}(?![\w-])", done.stdout)]
    return done.stderr or "".join(f"no option {one}" for one in missing)


def invokes_own(words: list[str]) -> str:
    """Return why Invoke's own parser, which takes one value an option, does not read a command."""
    try:
        Parser(contexts=Collection.from_module(tasks).to_contexts()).parse_argv(words)
    except ParseError as error:
        # A sentence may name a command without its words.
        return "" if len(words) == 1 or words[1].startswith("-") else str(error)
    return ""


def refusal(words: list[str], sites: Path) -> str:
    """Return why a command is refused on a CPU and on the example site of H100s."""
    variables = {"TWINRUN_CLUSTER": str(sites)}
    words = [*words, *(one for one in PLANS.get(words[0], ()) if one not in words)]
    elsewhere = [] if "--cluster" in words else ["--cluster", "h100"]
    elsewhere += [] if "--scale" in words else ["--scale", "node"]
    for more in ([], elsewhere) if words[0] == "run" else ([],):
        done = invoke(ROOT, *words, *more, variables=variables)
        if done.returncode == 0 and done.stdout:
            return ""
    return done.stderr


@cache
def sessions() -> set[str]:
    """Return the functions of noxfile.py that are sessions."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if "nox.session" in ast.unparse(node).partition("def ")[0]}


@pytest.mark.parametrize("path", [one for one in PAGES if CODE.search(one.read_text("utf-8"))], ids=shown)
def test_code_of_a_page_is_code(path: Path) -> None:
    for language, text in CODE.findall(path.read_text(encoding="utf-8")):
        if language == "python":
            compile(text, shown(path), "exec")
        else:
            assert tomllib.loads(text)


def test_the_example_sites_plan(sites: Path) -> None:
    for name in tomllib.loads(sites.read_text(encoding="utf-8"))["site"]:
        fault = refusal(["run", RECIPE, "--cluster", name], sites)
        assert not fault, f"{name}: {fault}"


def test_every_exit_code_and_message_of_the_trouble_page_is_real() -> None:
    page = (ROOT / "docs/guides/trouble.md").read_text(encoding="utf-8")
    codes = re.compile(r"^\| ([\d, ]+) \|", re.MULTILINE)
    assert codes.findall(page) == codes.findall((ROOT / "docs/reference/exit-codes.md").read_text("utf-8"))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    rows = [row for row in page.partition("## What does")[2].splitlines() if row.startswith("| `")]
    assert rows
    for message in (one for row in rows for one in re.findall(r"`([^`]+)`", row.split(" | ")[0])):
        fixed = re.split(r"--set FIELD: |\d+ of \d+|\brank \d|signal \d", message)
        assert all(part.strip() in sources for part in fixed), message
