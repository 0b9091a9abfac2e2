"""The files that the contracts look at, and what an import of them loads."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "twinrun"
STACK_PACKAGES = {"composer", "datasets", "deepspeed", "lm_eval", "streaming", "torch", "torchvision"}
STACK_PACKAGES |= {"transformers", "triton"}


def host_modules() -> dict[str, Path]:
    """Return the modules of the host side by their dotted names."""
    return {name: path for name, path in modules().items() if not is_train(name)}


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    return {_dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_train(name: str) -> bool:
    """Say whether a dotted name belongs to the training side."""
    return name == "twinrun.train" or name.startswith("twinrun.train.")


def project_files(*patterns: str) -> list[Path]:
    """Return the files that git tracks or would, so that caches and runs are left out."""
    kinds = ("--cached", "--others", "--exclude-standard")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *kinds, *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in sorted(listed.split("\0")) if name and (ROOT / name).is_file()]


def shown(path: Path) -> str:
    """Return `path` as it stands in the checkout."""
    return path.relative_to(ROOT).as_posix()


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Return which frameworks a new interpreter has loaded after running `code`."""
    report = f"\nprint('loaded', *({STACK_PACKAGES!r} & sys.modules.keys()))"
    command = [sys.executable, "-c", code + report, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()) - {"loaded"}
