"""What guides show can be done as it stands: commands plan or run, manifests hold, Python compiles."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from tests.commands import ROOT, invoke
from tests.contracts.test_text import commands_in
from twinrun.manifests.attestation import Attestation
from twinrun.workloads import load_workload, workload_names

# The walk from the paper to the verdict makes its own recipes; tests/contracts/test_guide.py types it.
GUIDES = (path for path in (ROOT / "docs" / "guides").glob("*.md") if path.name != "add-a-recipe.md")
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md", *sorted(GUIDES)]
BLOCK = re.compile(r"^```(toml|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
RECORDS = sorted((ROOT / "recipes" / "mpt7b-scaling" / "results").glob("h200x4*.json"))
# What words in capitals stand for where a page is tried.
STANDS_FOR = {
    "SITE": "h100",
    "RECIPE": "recipes/mpt7b-scaling",
    "recipes/RECIPE": "recipes/mpt7b-scaling",
    "STACK": "cpu",
    "RECORD_A": str(RECORDS[0]),
    "RECORD_B": str(RECORDS[1]),
    "PATH": str(ROOT / "recipes" / "mpt7b-scaling"),
    "PLACE": "s3://bucket/prefix",
}
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


def blocks(language: str) -> list[tuple[str, str]]:
    """Return the page and the text of every block in a language."""
    return [
        (path.name, text)
        for path in PAGES
        for found, text in BLOCK.findall(path.read_text(encoding="utf-8"))
        if found == language
    ]


def plans() -> list[str]:
    """Return each command of the pages that plans something, or reads what every checkout has.

    What needs a registry, packages that were carried over, or a cluster is only parsed, by
    `tests/contracts/test_text.py`.
    """
    commands = {command for path in PAGES for command in commands_in(path.read_text(encoding="utf-8"))}
    wanted = re.compile(
        r"invoke (run \S|build -|(?:compare|parity) .*RECORD|report recipes/mpt|recipes$|--list$)"
    )
    elsewhere = re.compile(r"--pull|--wheelhouse|\.\.\.")
    return sorted(one for one in commands if wanted.match(one) and not elsewhere.search(one))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example sites of the guide, beside the cluster of a machine."""
    examples = "\n".join(text for _, text in blocks("toml") if "[site." in text)
    file = tmp_path_factory.mktemp("sites") / "cluster.toml"
    file.write_text(examples + LOCAL, encoding="utf-8")
    return file


@pytest.mark.parametrize("command", plans())
def test_a_command_of_a_page_does_what_the_page_says(command: str, sites: Path, tmp_path: Path) -> None:
    words = [STANDS_FOR.get(word, word) for word in shlex.split(command)[1:]]
    if words[0] in ("run", "build"):
        words += ["--dry"] if "--dry" not in words else []
    if words[0] == "report":
        words += ["--out", str(tmp_path / "report.html")]
    # A plan for GPUs is one for the site that has them.
    if "node" in words:
        words += ["--cluster", "h100"]
    done = invoke(ROOT, *words, variables={"TWINRUN_CLUSTER": str(sites)})
    # Two committed runs need not have one loss curve, nor control runs that tell.
    allowed = (0, 1, 3) if "parity" in words else (0,)
    assert done.returncode in allowed, done.stderr
    assert done.stdout


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_python_of_a_page_compiles(page: str, text: str) -> None:
    compile(text, page, "exec")


@pytest.mark.parametrize(("page", "text"), blocks("toml"))
def test_a_manifest_of_a_page_holds(page: str, text: str, sites: Path) -> None:
    content = tomllib.loads(text)
    if "site" in content:
        done = invoke(
            ROOT,
            *("run", "recipes/mpt7b-scaling", "--cluster", "h100", "--dry"),
            variables={"TWINRUN_CLUSTER": str(sites)},
        )
        assert done.returncode == 0, done.stderr
        assert "#SBATCH --gres=gpu:h100:" in done.stdout
    elif "attested" in content:
        assert [Attestation.model_validate_json(json.dumps(one)) for one in content["attested"]]
    else:
        (name,) = content.keys() & set(workload_names())
        tables = load_workload(name).tables
        scales = {name: content.get("scales", {}).get("paper") for name in ("smoke", "node", "paper")}
        whole = {key: value for key, value in content.items() if key in tables.model_fields}
        if all(scales.values()):
            whole["scales"] = scales
            tables.model_validate_json(json.dumps(whole))
        else:
            hold_apart(content, tables)


def hold_apart(content: dict[str, Any], tables: type[BaseModel]) -> None:
    """Hold each table of a page on its own; one that leaves out keys that are required has no others."""
    for name, field in tables.model_fields.items():
        value, kinds = content.get(field.alias or name), set()
        if value is None or field.annotation is None:
            continue
        try:
            TypeAdapter[Any](field.annotation).validate_json(json.dumps(value))
        except ValidationError as error:
            kinds = {one["type"] for one in error.errors()}
        assert kinds <= {"missing"}, value


def test_every_exit_code_and_message_of_the_trouble_page_is_real() -> None:
    page = (ROOT / "docs" / "guides" / "trouble.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\| ([\d, ]+) \|", (ROOT / "docs/reference/exit-codes.md").read_text("utf-8"), re.MULTILINE
    )
    assert re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) == listed
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    told = page.partition("## What messages mean")[2].partition("## Look")[0]
    rows = [row for row in told.splitlines() if row.startswith("| `")]
    for message in (one for row in rows for one in re.findall(r"`([^`]+)`", row.split(" | ")[0])):
        fixed = re.split(r"--set FIELD: |\d+ of \d+|\brank \d|signal \d", message)
        assert all(part.strip() in sources for part in fixed), message
