"""Nothing of ours reads a format that executes what it reads."""

from __future__ import annotations

import ast

import pytest

from tests.contracts.tree import project_files, shown

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Functions that unpickle, with the name that their module has in code.
CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "pandas.read_pickle", "pd.read_pickle"}
LOADING = [path for path in project_files("src/*.py", "recipes/*.py", "images/*.py") if path.suffix == ".py"]


def unpickling(text: str) -> list[str]:
    """Return what in a module can unpickle."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [node.module] if node.module.partition(".")[0] in MODULES else sorted(names & CALLS)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            found.append(ast.unparse(node))
    return found


def test_nothing_unpickles() -> None:
    assert LOADING
    found = {shown(path): unpickling(path.read_text(encoding="utf-8")) for path in LOADING}
    assert not {name: one for name, one in found.items() if one}


@pytest.mark.parametrize(
    "text", ["import pickle", "from torch import load", "import torch\ntorch.load('a')", "import dill.source"]
)
def test_what_unpickles_is_found(text: str) -> None:
    assert unpickling(text)
