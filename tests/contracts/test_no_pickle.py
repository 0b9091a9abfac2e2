"""Nothing of ours reads a format that executes what it reads."""

from __future__ import annotations

import ast

import pytest

from tests.contracts.tree import project_files, shown

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
# Functions that unpickle, with the name that their module has in code.
CALLS = {
    *("torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save", "torch.jit.load"),
    *("torch.hub.load", "torch.hub.load_state_dict_from_url", "np.load", "numpy.load", "yaml.load"),
}
# The same under any name: of PyTorch's distributed checkpoint, of DeepSpeed, of pandas.
NAMES = {"FileSystemReader", "FileSystemWriter", "load_checkpoint", "read_pickle", "load_pickle"}
# Switches that let a reader execute what it reads.
SWITCHES = {"allow_pickle", "allow_unsafe_types", "trust_remote_code", "weights_only"}
IMPORTERS = {"import_module", "__import__"}
LOADING = [path for path in project_files("src/*.py", "recipes/*.py", "images/*.py") if path.suffix == ".py"]


def unpickling(text: str) -> list[str]:
    """Return what in a module can unpickle."""
    return [name for node in ast.walk(ast.parse(text)) for name in _unpickling(node)]


def _unpickling(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if _is_module(alias.name)]
    if isinstance(node, ast.ImportFrom) and node.module:
        whole = [f"{node.module}.{alias.name}" for alias in node.names]
        found = [name for name in whole if name in CALLS or name.rpartition(".")[2] in NAMES]
        return [node.module] if _is_module(node.module) else found
    if isinstance(node, ast.Attribute) and (ast.unparse(node) in CALLS or node.attr in NAMES):
        return [ast.unparse(node)]
    if isinstance(node, ast.keyword) and node.arg in SWITCHES:
        return [node.arg]
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTERS:
        named = [one.value for one in node.args if isinstance(one, ast.Constant)]
        return [name for name in named if isinstance(name, str) and _is_module(name)]
    return []


def _is_module(name: str) -> bool:
    return name.partition(".")[0] in MODULES


def test_nothing_unpickles() -> None:
    assert LOADING
    found = {shown(path): unpickling(path.read_text(encoding="utf-8")) for path in LOADING}
    assert not {name: one for name, one in found.items() if one}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from torch import load",
        "import torch\ntorch.load('a')",
        "import dill.source",
        "from torch.serialization import load",
        "import torch\ntorch.jit.load('a')",
        "from torch.distributed.checkpoint import FileSystemReader",
        "import torch.distributed.checkpoint as dcp\ndcp.FileSystemReader('a')",
        "engine.load_checkpoint('a')",
        "import pandas\npandas.read_pickle('a')",
        "np.fromfile('a')\nread('a', allow_pickle=True)",
        "StreamingDataset(allow_unsafe_types=True)",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('marshal')",
    ],
)
def test_what_unpickles_is_found(text: str) -> None:
    assert unpickling(text)
