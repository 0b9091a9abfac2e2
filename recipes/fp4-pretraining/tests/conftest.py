"""The recipe's modules are imported as its script imports them: by their names, from its folder."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
if find_spec("torch"):
    from tests.train.small import corpus, corpus_folder, make_job  # noqa: F401 fixtures
