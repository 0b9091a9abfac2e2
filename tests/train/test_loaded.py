"""What a rank says that it had loaded."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from twinrun.foundation.files import sha256_of_bytes
from twinrun.train import loaded


def test_modules_and_libraries_have_their_digests_and_what_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "given_module.py"
    module.write_text("RATE = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("given_module")
    assert str(module) not in loaded.loaded_files().files
    monkeypatch.setattr(loaded, "_ROOTS", (*loaded._ROOTS, str(tmp_path)))
    found = loaded.loaded_files()
    assert found.files[str(module)] == sha256_of_bytes(b"RATE = 1\n")
    assert str(module) in found.written
    assert any("/libc" in name for name in found.files)
    assert any(name.endswith("/pytest/__init__.py") for name in found.files)
    assert not [name for name in found.written if "site-packages" in name]
    sys.modules.pop("given_module")
