from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import pytest

from twinrun.execution.engine import PYTHON, Command, Workspace
from twinrun.execution.engines import Interpreter
from twinrun.execution.environment import (
    PythonEnvironment,
    inspect,
    lock_differences,
    steering_variables,
)
from twinrun.manifests.stack import LoadedStack, load_stack, normalise, stamp

LOCK = """\
alpha==1.0 \\
    --hash=sha256:{a}
beta==2.0 ; python_full_version < '3.12' \\
    --hash=sha256:{a}
beta==3.0 ; python_full_version >= '3.12' \\
    --hash=sha256:{a}
colours==4.0 ; sys_platform == 'win32' \\
    --hash=sha256:{a}
""".format(a="a" * 64)
MANIFEST = 'name = "small"\nvendor = "cpu"\ntitle = "A stack"\npython = ">=3.11"\nimage = "twinrun/small"\n'


@pytest.fixture
def stack(tmp_path: Path) -> LoadedStack:
    folder = tmp_path / "images" / "stacks" / "small"
    folder.mkdir(parents=True)
    (folder / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    (folder / "requirements.in").write_text("alpha==1.0\n", encoding="utf-8")
    text = f"{stamp(folder / 'requirements.in')}\n{LOCK}"
    (folder / "requirements.lock").write_text(text, encoding="utf-8")
    return load_stack(tmp_path, "small")


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"alpha": "1.0", "beta": "2.0", "pip": "25.0"}, {}),
        ({"alpha": "1.0", "beta": "3.0"}, {}),
        ({"beta": "2.5"}, {"alpha": "absent, lock has 1.0", "beta": "2.5, lock has 2.0 or 3.0"}),
        # A local label is another version.
        ({"alpha": "1.0+rocm6.3"}, {"alpha": "1.0+rocm6.3, lock has 1.0"}),
    ],
)
def test_what_differs_from_the_lock_is_named(
    stack: LoadedStack, tmp_path: Path, packages: dict[str, str], expected: dict[str, str]
) -> None:
    installed = PythonEnvironment(python="3.11.7", packages=packages)
    assert lock_differences(installed, stack, tmp_path) == expected


STEERING = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1", "UCX_TLS": "tcp"}
SECRETS = (
    "TORCH_HUB_TOKEN",
    "NCCL_KEY",
    "HSA_PASSWORD",
    "torch_token",
    "HF_TOKEN",
    "WANDB_API_KEY",
    "HOME",
    "OMPX",
)
CREDENTIALS = (
    *("sk-planted1234567", "ghp_planted1234567", "hf_plantedABCDEFGH", "AKIAPLANTED1234567"),
    *(
        "eyJhbGciOiJub25l.eyJwbGFudGVk.sig",
        "api_key=planted",
        "password: planted",
        "Plan7edKJHGkjhgsd76kjhGKJHd",
    ),
    "-----BEGIN OPENSSH PRIVATE KEY-----\nplanted\n-----END OPENSSH PRIVATE KEY-----",
    *("http://me:planted@host/cache", "plugin?key=planted-key"),
)
PLAIN = (
    *("expandable_segments:True,max_split_size_mb:512", "^docker0,lo", "/opt/Stack-2/lib/libPlugin64.so"),
    *("rc_x,cuda_copy,cuda_ipc", "GPU-8f1d2a3b-1234-5678-9abc-def012345678", "mlx5_0:1,mlx5_1:1", ":4096:8"),
)


def test_what_steers_a_run_is_kept_in_order_and_nothing_else() -> None:
    told = dict(reversed(STEERING.items())) | dict.fromkeys(SECRETS, "hidden")
    assert list(steering_variables(told).items()) == sorted(STEERING.items())
    for value in PLAIN:
        assert steering_variables({"NCCL_NET_PLUGIN": value}) == {"NCCL_NET_PLUGIN": value}


@pytest.mark.parametrize("value", CREDENTIALS)
def test_what_looks_like_a_credential_is_hidden(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "planted-key")
    found = steering_variables({"NCCL_NET_PLUGIN": value, "TORCH_LOGS": f"a {value} b"})
    assert "***" in found["NCCL_NET_PLUGIN"]
    assert not re.search("planted|Plan7ed|Zd|PLANTED", " ".join(found.values()))


def test_what_is_imported_is_compiled_once_and_leaves_the_checkout_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    # Whatever the caller's interpreter does.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "imported.py").write_text("", encoding="utf-8")
    workspace = Workspace(root=root, run=tmp_path, data=tmp_path)
    interpreter = Interpreter(python=sys.executable, workspace=workspace)
    code = "import imported; print(imported.__cached__)"
    compiled = Path(interpreter.read(Command(arguments=(PYTHON, "-c", code), variables={})).strip())
    assert compiled.is_relative_to(tmp_path / "cache")
    assert compiled.is_file()
    assert [path.name for path in root.rglob("*")] == ["src", "imported.py"]


def test_the_interpreter_is_asked_for_what_is_installed(tmp_path: Path) -> None:
    workspace = Workspace(root=tmp_path, run=tmp_path, data=tmp_path)
    found = inspect(Interpreter(python=sys.executable, workspace=workspace, search_path=""))
    assert found.python == platform.python_version()
    assert found.packages["pytest"] == pytest.__version__
    assert all(name == normalise(name) for name in found.packages)
