"""What the cache keeps of folders that are gone is removed, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinrun.foundation.cache import bytecode_folder, prune_bytecode


def test_bytecode_of_lost_folders_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    compiled, kept = [], ("checkout/src/package", "checkout/src/package/gone", "environment/lib")
    for name in (*kept, "old/src/package", "checkout/moved"):
        file = bytecode_folder() / (tmp_path / name).relative_to("/") / "module.cpython-311.pyc"
        file.parent.mkdir(parents=True)
        file.touch()
        compiled.append((name, file))
    for name in ("checkout/src/package", "environment/lib"):
        (tmp_path / name).mkdir(parents=True)
    prune_bytecode()
    assert [name for name, file in compiled if file.exists()] == list(kept)
    prune_bytecode()
    assert sum(file.exists() for _, file in compiled) == len(kept)
