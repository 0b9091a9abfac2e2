"""What a test needs beyond `.[test]`: where that is missing, the test is skipped and says what is missing."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import signal
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from docker.errors import DockerException

from twinrun.foundation.errors import MachineError, TwinrunError
from twinrun.images.apt_archive import open_archive
from twinrun.machine import daemon

# The fixtures of tests/doors.md.
pytest_plugins = ["tests.doors"]

# Workers of pytest fill the processors; threads of PyTorch beyond theirs wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell in the background lets what it starts ignore these, and tests send them to what they start.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, {signal.SIGINT: signal.default_int_handler}.get(number, signal.SIG_DFL))

# What every test with this marker needs.
_ENGINE = ("docker", "mmdebstrap", "mirror")
IMPLIED = {
    "cluster": ("docker", "mmdebstrap", "composer"),
    "docker": _ENGINE,
    "image": _ENGINE,
    "nightly": _ENGINE,
    "gpu": ("gpu",),
}
# Tests with these markers take minutes: they run where `-m` names the marker.
LONG = ("cluster", "image", "nightly", "trials")


def _engine() -> str:
    try:
        client = daemon.connect()
        client.ping()
        client.close()
    except (MachineError, DockerException, OSError):
        return "no container engine answers"
    return ""


def _mirror() -> str:
    try:
        with open_archive("bookworm", "amd64"):
            return ""
    except TwinrunError as error:
        return f"{error.place}: {error.message}"


def _gpu() -> str:
    found = find_spec("torch") and importlib.import_module("torch").cuda.is_available()
    return "" if found else "torch sees no GPU"


def _package(name: str) -> str:
    return "" if find_spec(name) else f"the package {name} is not installed"


def _program(name: str) -> str:
    return "" if shutil.which(name) else f"{name} is not installed"


def _root() -> str:
    return "" if os.geteuid() == 0 else "only root may do this"


READERS = ("mlflow", "rocrate_validator", "tensorboard", "wandb")
STACK_PACKAGES = frozenset(
    {"composer", "deepspeed", "lm_eval", "streaming", "torch", "torchao", "transformers"}
)
# The folders whose tests start ranks, or run what they do.
RANKS = ("recipes/", "tests/train/", "tests/parity/")
# Every other name is that of a program.
CHECKS: dict[str, Callable[[], str]] = {"docker": _engine, "gpu": _gpu, "mirror": _mirror, "root": _root} | {
    name: functools.partial(_package, name) for name in (*READERS, *STACK_PACKAGES, "axe_core_python")
}


@functools.cache
def missing(name: str) -> str:
    """Return why `name` is not to be had here, or nothing."""
    return CHECKS.get(name, functools.partial(_program, name))()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of sessions on machines that have everything."""
    parser.addoption("--skip-nothing", action="store_true", help="fail where a need is missing but a GPU")
    parser.addoption("--part", choices=("host", "ranks"), help="without or with the stack's packages")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the tests of a part: those of ranks are by folder, or need a package of the stack."""
    if part := config.getoption("--part"):
        of_ranks = [_of_ranks(item) for item in items]
        config.hook.pytest_deselected(
            items=[item for item, ranks in zip(items, of_ranks, strict=True) if ranks != (part == "ranks")]
        )
        items[:] = [item for item, ranks in zip(items, of_ranks, strict=True) if ranks == (part == "ranks")]


def _of_ranks(item: pytest.Item) -> bool:
    needs = {name for marker in item.iter_markers("needs") for name in marker.args}
    return bool(needs & STACK_PACKAGES) or item.nodeid.startswith(RANKS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that takes minutes and was not asked for, or whose needs are missing."""
    markers = {marker.name for marker in item.iter_markers()}
    chosen = item.config.getoption("-m")
    long = [name for name in LONG if name in markers]
    if long and not any(name in chosen for name in long):
        pytest.skip(f"takes minutes: `-m {long[0]}` runs it")
    needs = [name for marker in item.iter_markers("needs") for name in marker.args]
    for name in (*needs, *(need for marker in markers for need in IMPLIED.get(marker, ()))):
        if reason := missing(name):
            demanded = item.config.getoption("--skip-nothing") and name != "gpu"
            (pytest.fail if demanded else pytest.skip)(reason)
